"""What of a run nobody needs: over random graphs of steps that refer to each other's packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.types.removal import StepFiles, Unreferenced
from holdfast.training.runs.removal.reachability import unreferenced


def is_pack(key: str) -> bool:
    return key.endswith(".safetensors")


@dataclass(frozen=True)
class Run:
    """Steps, and what is decided of them."""

    steps: tuple[StepFiles, ...]
    staying: frozenset[int]
    under_way: frozenset[int]
    packs_known: bool
    attempts_stay_whole: bool = False

    def unreferenced(self) -> Unreferenced:
        return unreferenced(
            self.steps,
            self.staying,
            self.under_way,
            is_pack,
            packs_known=self.packs_known,
            attempts_stay_whole=self.attempts_stay_whole,
        )

    def without(self, gone: Unreferenced) -> Run:
        """Return what is left of it."""
        left = []
        for each in self.steps:
            attempts = {name: rest(files, gone) for name, files in each.attempts.items() if rest(files, gone)}
            now = replace(each, attempts=attempts, reports=rest(each.reports, gone))
            if gone.steps.get(each.step) is not None:
                now = replace(now, digest=None, attempt=None, counts=False, packs=frozenset())
            left.append(now)
        return replace(self, steps=tuple(left))


def rest(files: Mapping[str, int], gone: Unreferenced) -> dict[str, int]:
    return {key: size for key, size in files.items() if key not in gone.files}


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Steps of one to three attempts each, which refer to packs of the steps before."""
    numbers = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=8)))
    earlier: list[str] = []
    steps = []
    for number in numbers:
        attempts = {}
        for name in draw(st.lists(st.sampled_from(["a" * 16, "b" * 16, "c" * 16]), unique=True, max_size=3)):
            packs = draw(st.lists(st.sampled_from(["r00000", "r00001", "enc/r00000"]), unique=True, max_size=3))
            keys = [f"step-{number:012d}/{name}/{pack}.safetensors" for pack in packs]
            attempts[name] = {key: draw(st.integers(0, 9)) for key in [*keys, f"step-{number:012d}/{name}/index-00000"]}
        has_manifest = bool(attempts) and draw(st.booleans())
        readable = has_manifest and draw(st.integers(0, 5)) > 0
        attempt = draw(st.sampled_from(sorted(attempts))) if readable else None
        referred = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if readable and earlier else []
        own = [key for key in attempts.get(attempt or "", {}) if is_pack(key)]
        steps.append(
            StepFiles(
                step=number,
                digest=f"{number:032x}" if has_manifest else None,
                attempt=attempt,
                counts=has_manifest and (not readable or draw(st.integers(0, 4)) > 0),
                attempts=attempts,
                reports={f"step-{number:012d}/reports/x": 1} if draw(st.booleans()) else {},
                packs=frozenset([*own, *referred]),
                pinned=frozenset(draw(st.lists(st.sampled_from(sorted(attempts)), max_size=1)) if attempts else []),
            )
        )
        earlier += [key for files in attempts.values() for key in files if is_pack(key)]
    unread = {each.step for each in steps if each.digest is not None and each.attempt is None}
    under_way = draw(st.frozensets(st.sampled_from(numbers), max_size=2))
    staying = draw(st.frozensets(st.sampled_from(numbers))) | unread | under_way
    return Run(tuple(steps), staying, under_way, draw(st.booleans()))


@given(runs())
def test_what_stays_keeps_all_it_needs(run: Run) -> None:
    gone = run.unreferenced()
    for each in run.steps:
        if each.counts and each.step in run.staying:
            assert each.step not in gone.steps
            assert not each.packs & gone.files.keys()
            own = each.attempts.get(each.attempt or "", {})
            assert not own.keys() & gone.files.keys()
        if each.step in run.under_way:
            assert each.step not in gone.steps
            assert not {key for files in each.attempts.values() for key in files} & gone.files.keys()
        for name in each.pinned:
            assert not each.attempts[name].keys() & gone.files.keys()


@given(runs())
def test_once_is_enough(run: Run) -> None:
    assert not run.without(run.unreferenced()).unreferenced()


@given(runs())
def test_what_nobody_needs_goes(run: Run) -> None:
    gone = run.unreferenced()
    left = run.without(gone)
    needed = {key for each in run.steps if each.counts and each.step in run.staying for key in each.packs}
    for each in left.steps:
        stays = each.counts and each.step in run.staying
        if each.step in run.under_way:
            continue
        assert each.digest is None or stays
        for name, files in each.attempts.items():
            if name in each.pinned or (stays and each.attempt in (name, None)):
                continue
            assert all(key in needed or (is_pack(key) and not run.packs_known) for key in files)


@given(runs())
def test_where_attempts_stay_whole_all_packs_of_an_attempt_go_or_none(run: Run) -> None:
    whole = replace(run, attempts_stay_whole=True)
    gone, gone_by_pack = whole.unreferenced(), run.unreferenced()
    for each in run.steps:
        for files in each.attempts.values():
            packs = {key for key in files if is_pack(key)}
            assert packs <= gone.files.keys() or packs.isdisjoint(gone.files)
            assert packs <= gone.files.keys() or not packs <= gone_by_pack.files.keys()
            assert files.keys() - packs - gone.files.keys() == files.keys() - packs - gone_by_pack.files.keys()
    assert gone.steps == gone_by_pack.steps
    assert not whole.without(gone).unreferenced()


@given(runs())
def test_a_manifest_goes_only_with_its_digest(run: Run) -> None:
    gone = run.unreferenced()
    assert all(gone.steps[each.step] == each.digest for each in run.steps if each.step in gone.steps)
    assert gone.confirmed_by(gone) == gone
    assert not gone.confirmed_by(Unreferenced())
    assert not Unreferenced({1: "a"}).confirmed_by(Unreferenced({1: "b"}))


def test_a_pack_goes_with_the_last_that_refers_to_it() -> None:
    pack = "step-000000000001/aaaaaaaaaaaaaaaa/r00000.safetensors"
    first = StepFiles(1, "1" * 32, "a" * 16, True, {"a" * 16: {pack: 5}}, packs=frozenset([pack]))
    second = StepFiles(2, "2" * 32, "b" * 16, True, {}, packs=frozenset([pack]))
    third = StepFiles(3, "3" * 32, "c" * 16, True, {})
    run = Run((first, second, third), frozenset([2, 3]), frozenset(), True)
    assert run.unreferenced() == Unreferenced({1: "1" * 32}, {})
    left = replace(run.without(run.unreferenced()), staying=frozenset([3]))
    assert left.unreferenced() == Unreferenced({2: "2" * 32}, {pack: 5})


def test_a_manifest_that_cannot_be_read_keeps_every_pack_but_not_the_rest() -> None:
    folder = "step-000000000001/aaaaaaaaaaaaaaaa/"
    files = {folder + "r00000.safetensors": 5, folder + "index-00000.msgpack": 1}
    old = StepFiles(1, "1" * 32, "a" * 16, True, {"a" * 16: files})
    damaged = StepFiles(
        2, "2" * 32, None, True, {"b" * 16: {"step-000000000002/bbbbbbbbbbbbbbbb/index-00000.msgpack": 1}}
    )
    run = Run((old, damaged), frozenset([2]), frozenset(), False)
    assert run.unreferenced() == Unreferenced({1: "1" * 32}, {folder + "index-00000.msgpack": 1})

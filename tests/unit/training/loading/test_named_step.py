"""Steps by name: numbers, tags, `latest`, and the best value of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from holdfast.base.clock import SystemClock
from holdfast.core.format.names import manifest_key
from holdfast.core.format.step_name import StepName, require_tag_name, step_name
from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.policies import BestN
from holdfast.stored.repository.quarantine import identity_at, quarantine
from holdfast.training.loading.named_step import finder_of
from holdfast.training.runs.tags import tag_step
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.unit.ranks import World, fresh_store, plain, run_of

NAN = math.nan
METRICS: Mapping[int, Mapping[str, float]] = {
    1: {"loss": 0.5, "accuracy": 0.7},
    2: {"loss": 0.25, "accuracy": 0.9, "odd": NAN},
    3: {"loss": 0.25, "accuracy": NAN, "odd": math.inf},
    4: {"loss": NAN, "accuracy": 0.9},
    5: {"loss": -math.inf},
    6: {},
}


@pytest.fixture
def world() -> World:
    world = World(1)
    world.play(lambda rank, run: [run.save(s, {"a": plain(s)}, metrics=m).wait() for s, m in METRICS.items()])
    return world


def loaded(world: World, step: object = None, best: object = None) -> object:
    state = {"a": plain(0.0)}
    (step,) = world.play(lambda rank, run: run.load(state, step, best=best))  # type: ignore[arg-type]
    if isinstance(step, Exception):
        raise step
    assert state["a"].array[0] == step, "the tensors are of another step"
    return step


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (None, StepName()),
        ("latest", StepName()),
        (300, StepName(300)),
        ("300", StepName(300)),
        ("000300", StepName(300)),
        ("0" * 5000 + "300", StepName(300)),
        ("000", StepName(0)),
        ("300@1f2e", StepName(300, "1f2e")),
        ("best", StepName(tag="best")),
        ("v1.0", StepName(tag="v1.0")),
    ],
)
def test_what_a_name_stands_for(step: object, named: StepName) -> None:
    assert step_name(step) == named


@pytest.mark.parametrize(
    "step", ["", " best", "a/b", "300@", "300@xyz", -1, True, 1.5, 10**12, "1" * 30, ["best"], "²"]
)
def test_what_names_no_step(step: object) -> None:
    with pytest.raises(InvalidError, match="expected a whole number"):
        step_name(step)


@pytest.mark.parametrize("name", ["300", "0", "3_000", "latest", "Latest", "LATEST"])
def test_a_tag_that_is_a_number_or_latest_is_refused(name: str) -> None:
    with pytest.raises(InvalidError, match="are reserved"):
        require_tag_name(name)


@pytest.mark.parametrize(
    "name", [" 300", "300 ", "latest ", " latest", "latest\n", "300\n", "300@1f2e", "+3", "-3", "٣"]
)
def test_a_tag_that_is_nearly_one_is_refused(name: str) -> None:
    with pytest.raises(InvalidError, match="tag"):
        require_tag_name(name)


def test_a_tag_a_number_and_the_newest(world: World) -> None:
    tag_step(world.store, SystemClock(), 2, "best")
    assert [loaded(world, step) for step in ("best", 3, "4", "latest", None)] == [2, 3, 4, 6, 6]


def test_an_unknown_tag_names_three_and_the_count(world: World) -> None:
    with pytest.raises(MissingError, match="no tag 'best'; there are: none"):
        loaded(world, "best")
    for name in ("a", "b", "c", "d", "e"):
        tag_step(world.store, SystemClock(), 1, name)
    with pytest.raises(MissingError, match="no tag 'best'; there are: a, b, c and 2 more"):
        loaded(world, "best")


def test_a_tag_of_a_step_that_is_gone(world: World) -> None:
    tag_step(world.store, SystemClock(), 2, "best")
    world.store.delete([entry.key for entry in world.store.list("step-000000000002/")])
    with pytest.raises(MissingError, match="tag 'best' names step 2, which is gone or was saved again since"):
        loaded(world, "best")


def test_a_damaged_tag_is_told(world: World) -> None:
    tag_step(world.store, SystemClock(), 2, "best")
    world.store.put("tags/best.json", b"damaged")
    with pytest.raises(CorruptError, match=r"best\.json"):
        loaded(world, "best")


@pytest.mark.parametrize(
    ("best", "step"),
    [
        ("loss", 3),  # Of equal values the newer step; neither NaN nor infinity is ranked.
        (("loss", "max"), 1),
        (("accuracy", "max"), 4),
        (("accuracy", "min"), 1),
        (["accuracy", "max"], 4),
        (BestN(7, "accuracy", "max"), 4),
    ],
)
def test_the_best_step(world: World, best: object, step: int) -> None:
    assert loaded(world, best=best) == step


def test_the_best_is_what_keep_keeps(world: World) -> None:
    from holdfast.training.runs.removal.retention import KeptFacts, kept

    facts = [KeptFacts(step, metrics=metrics) for step, metrics in METRICS.items()]
    for metric, mode in (("loss", "min"), ("loss", "max"), ("accuracy", "min"), ("accuracy", "max")):
        rule = BestN(1, metric, mode)  # type: ignore[arg-type]
        (best,) = (step for (step, _), why in kept(rule, facts).items() if f"{mode} {metric}" in why)
        assert loaded(world, best=(metric, mode)) == best


@pytest.mark.parametrize(
    ("step", "best", "error", "said"),
    [
        (None, "los", InvalidError, r"no committed step has this metric; they have \['accuracy', 'loss', 'odd'\]"),
        (None, "odd", MissingError, "no committed step has a finite value"),
        (None, "", InvalidError, "expected the name of a metric"),
        (None, 7, InvalidError, "expected the name of a metric"),
        (None, ("loss", "low"), InvalidError, "a pair such as"),
        (3, "loss", InvalidError, "expected one of them"),
    ],
)
def test_what_is_no_best(world: World, step: object, best: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        loaded(world, step, best)


def test_damaged_and_quarantined_steps_are_not_ranked(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.store.put("step-000000000003/manifest.json", b"damaged")
    assert loaded(world, best="loss") == 2
    assert "step 3 is not ranked" in caplog.text
    key = "step-000000000002/manifest.json"
    quarantine(world.store, 2, key, identity_at(world.store, key), "found damaged", "now")
    assert loaded(world, best="loss") == 1


def test_superseded_steps_are_not_ranked(world: World) -> None:
    def back(rank: int, run: object) -> None:
        run.load({"a": plain(0.0)}, 1)  # type: ignore[attr-defined]
        run.save(7, {"a": plain(7)}, metrics={"loss": 0.4}).wait()  # type: ignore[attr-defined]

    world.play(back)  # type: ignore[arg-type]
    assert loaded(world, best="loss") == 7


def test_a_root_without_steps() -> None:
    store = fresh_store()
    for find in (finder_of("best"), finder_of(None, "loss"), finder_of(3)):
        assert find is not None
        with pytest.raises(MissingError, match="no root of a run"):
            find(store)
    assert finder_of("latest") is None is finder_of(None)


def test_every_rank_takes_the_step_that_rank_0_finds() -> None:
    store = fresh_store()
    group = ThreadGroup(3)

    def work(comm: ThreadComm) -> object:
        run = run_of(comm, store)
        for step, metrics in METRICS.items():
            run.save(step, {"a": plain(step)}, metrics=metrics, move_tags={"best"} if step == 4 else ()).wait()
        # The tag moves after rank 0 has looked; nobody else looks.
        found = [run.load({"a": plain(0.0)}, "best"), run.load({"a": plain(0.0)}, best="loss")]
        run.close()
        return found

    assert outcomes_of_ranks(3, work, group=group) == [[4, 3]] * 3


def test_a_tag_whose_step_is_damaged_says_so_and_not_that_it_is_gone(world: World) -> None:
    tag_step(world.store, SystemClock(), 2, "paper")
    data = world.store.get(manifest_key(2), 1 << 20)
    world.store.put(manifest_key(2), data[:-40])
    with pytest.raises(CorruptError, match=r"tag 'paper' names step 2, of which a manifest is damaged: .*--step 2"):
        loaded(world, "paper")
    world.store.delete([manifest_key(2)])
    with pytest.raises(MissingError, match="is gone or was saved again"):
        loaded(world, "paper")

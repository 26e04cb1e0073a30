"""Losing a race also means that the winner's object is durable: who sees "exists" may act on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.errors import ConflictError, MissingError
from holdfast.settings import Settings
from tests.doubles.faults import Faults, FaultySyscalls, fail_with

CLAIM = "it/overwriting/claim.json"
KEPT = "it/manifest.json"
MOVED = "it/tag.json"
ASIDE = "it/overwriting/aside.json"


def local(tmp_path: Path, faults: Faults | None = None) -> LocalStore:
    syscalls = None if faults is None else cast(Syscalls, FaultySyscalls(Syscalls(), faults))
    return LocalStore(tmp_path / "root", settings=Settings(), syscalls=syscalls)


def with_a_claim(tmp_path: Path) -> LocalStore:
    store = local(tmp_path)
    store.put_if_absent(KEPT, b"kept")
    store.put_if_absent(MOVED, b"moved")
    store.put_if_absent(CLAIM, b"winner")
    return store


def losing(store: LocalStore) -> None:
    store.put_if_absent(CLAIM, b"loser")


def moving(store: LocalStore) -> None:
    store.move(MOVED, ASIDE)


def operations(tmp_path: Path, act: Callable[[LocalStore], None]) -> list[str]:
    """Return the names of the operations of a call that nobody disturbs."""
    with_a_claim(tmp_path)
    recording = Faults()
    try:
        act(local(tmp_path, recording))
    except ConflictError:
        assert act is losing
    return [seen.name for seen in recording.seen]


def test_conflict_makes_the_winners_object_durable(tmp_path: Path) -> None:
    LocalStore(tmp_path / "root", settings=Settings()).put_if_absent("step/manifest.json", b"winner")
    faults = Faults(fail_with(5), at=1_000_000)
    store = LocalStore(
        tmp_path / "root", settings=Settings(), syscalls=cast(Syscalls, FaultySyscalls(Syscalls(), faults))
    )
    with pytest.raises(ConflictError):
        store.put_if_absent("step/manifest.json", b"loser")
    names = [each.name for each in faults.seen]
    after_link = names[names.index("link") :]
    assert after_link.count("fsync") >= 3, "the object, its folder and the root"
    assert store.get("step/manifest.json", 100) == b"winner"


def test_the_winner_may_remove_its_object_and_the_folder_at_any_moment(tmp_path: Path) -> None:
    names = operations(tmp_path / "undisturbed", losing)
    lost = 0
    for at in range(1, len(names) + 1):
        winner = with_a_claim(tmp_path / str(at))
        faults = Faults(lambda _, store=winner: store.delete([CLAIM]), at=at)  # type: ignore[misc]
        try:
            losing(local(tmp_path / str(at), faults))
        except ConflictError:
            lost += 1
            assert names[:at].count("link") > 0, "it was there when the name was refused"
            with pytest.raises(MissingError):
                winner.get(CLAIM, 100)
        else:
            assert winner.get(CLAIM, 100) == b"loser"
        assert faults.met == 1
        assert winner.get(KEPT, 100) == b"kept"
    assert lost >= 4, "removed before it was opened, before it was synced, and before each folder was"


@pytest.mark.parametrize(
    ("name", "number", "synced_before"),
    [("unlink", 1, 1), ("fsync", 2, 2), ("fsync", 3, 3)],
    ids=["before it is opened", "before its folder is synced", "before the folder above is synced"],
)
def test_the_removal_is_what_a_conflict_makes_durable_then(
    tmp_path: Path, name: str, number: int, synced_before: int
) -> None:
    """Who finds nothing there acts on it too."""
    winner = with_a_claim(tmp_path)
    faults = Faults(lambda _: winner.delete([CLAIM]), names=[name], at=number, after=True)
    with pytest.raises(ConflictError):
        losing(local(tmp_path, faults))
    assert faults.met == 1
    synced = [seen.subject for seen in faults.seen if seen.name == "fsync"]
    assert f"{tmp_path}/root/it" in synced[synced_before:]
    assert f"{tmp_path}/root" in synced[synced_before:]


def test_what_was_moved_may_be_removed_with_its_folder_at_any_moment(tmp_path: Path) -> None:
    """Who takes a claim over clears away what others have moved aside, and releases it."""
    names = operations(tmp_path / "undisturbed", moving)
    for at in range(1, len(names) + 1):
        other = with_a_claim(tmp_path / str(at))
        faults = Faults(lambda _, store=other: store.delete([CLAIM, ASIDE]), at=at)  # type: ignore[misc]
        moving(local(tmp_path / str(at), faults))
        assert faults.met == 1
        assert [entry.key for entry in other.list()] == [KEPT, *([] if "rename" in names[: at - 1] else [ASIDE])]
        synced = [seen.subject for seen in faults.seen if seen.name == "fsync"]
        assert f"{tmp_path}/{at}/root/it" in synced, "nothing is at the old key, for good"


def test_claims_taken_and_released_in_turn_only_ever_conflict(tmp_path: Path) -> None:
    stores = [local(tmp_path) for _ in range(2)]
    held: list[int] = []
    failures: list[BaseException] = []

    def claim_often(number: int) -> None:
        try:
            for _ in range(100):
                try:
                    stores[number].put_if_absent(CLAIM, b"%d" % number)
                except ConflictError:
                    continue
                held.append(number)
                assert held == [number]
                held.remove(number)
                stores[number].delete([CLAIM])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=claim_often, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []

"""What a resume judges is what lies there: not what one rank fails to see, nor what took its place meanwhile."""

from __future__ import annotations

import errno
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.torch import containers
from holdfast.backends.torch.framework import TorchFramework
from holdfast.backends.torch.local_shards import Ranks
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.names import manifest_key
from holdfast.core.format.sealed_json import sealed
from holdfast.errors import InvalidError, UnavailableError
from holdfast.stored.repository.quarantine import identity_at, quarantine
from holdfast.training.coordination.job import Job
from holdfast.training.loading import step_choice as resume
from holdfast.training.loading.resume_order import ResumeOrder
from tests.crash.damage.damages import damage_a_chunk, flip
from tests.doubles.comm import ThreadComm, ThreadGroup
from tests.doubles.faults import FaultPoint, Faults
from tests.support.crashed_run import (
    NEW,
    NEXT,
    OLD,
    SETTINGS,
    committed_at,
    expected_fingerprint,
    fingerprint,
    local_store,
    run_at,
    step_path,
    training_state,
)


def resumed_by(*stores: Store) -> list[tuple[int | None, str] | Exception]:
    """Let one rank for each store resume together; return what came of it by rank."""
    group = ThreadGroup(len(stores))

    def rank(number: int) -> tuple[int | None, str] | Exception:
        framework = TorchFramework(Ranks(number, len(stores), lambda each: each))
        run = CheckpointManager.over(stores[number], Job(ThreadComm(group, number), SystemClock(), SETTINGS, framework))
        state = training_state(99)
        try:
            return run.load(state), fingerprint(state)
        except Exception as error:
            return error
        finally:
            run.close()

    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(rank, range(len(stores))))


def require_untouched(root: Path) -> None:
    assert not (root / "quarantine").exists()
    assert resumed_by(local_store(root)) == [(NEXT, expected_fingerprint(NEXT))]


def test_what_one_rank_does_not_see_is_no_damage(in_memory: Path) -> None:
    root, elsewhere = in_memory / "root", in_memory / "elsewhere"
    committed_at(root, OLD, NEW, NEXT)
    elsewhere.mkdir()
    for outcome in resumed_by(local_store(root), local_store(elsewhere)):
        assert isinstance(outcome, UnavailableError), outcome
        assert "rank 1" in str(outcome)
        assert "Nothing was quarantined" in str(outcome)
    require_untouched(root)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["r00000.safetensors", "index-00000.msgpack"])
def test_what_is_not_seen_once_is_no_damage(in_memory: Path, name: str, rank: int) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW, NEXT)
    seen: list[FaultPoint] = []

    def miss(operation: FaultPoint) -> None:
        if operation.subject.endswith(name) and not seen:
            seen.append(operation)
            raise OSError(errno.ENOENT, "not seen", operation.subject)

    blind = local_store(root, Faults(miss, names={"open", "stat"}, lasting=True))
    stores = [blind if number == rank else local_store(root) for number in (0, 1)]
    for outcome in resumed_by(*stores):
        assert isinstance(outcome, UnavailableError) or outcome == (NEXT, expected_fingerprint(NEXT))
    assert seen or (rank, name) == (1, "index-00000.msgpack"), "rank 0 alone reads the index"
    require_untouched(root)


def test_what_one_rank_alone_finds_damaged_everywhere_is_not_put_under_quarantine(
    in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, elsewhere = in_memory / "root", in_memory / "elsewhere"
    committed_at(root, OLD, NEW, NEXT)
    shutil.copytree(root, elsewhere)
    for step in (OLD, NEW, NEXT):
        damage_a_chunk(step_path(elsewhere, step))
    for outcome in resumed_by(local_store(root), local_store(elsewhere)):
        assert isinstance(outcome, UnavailableError), outcome
        assert "rank 1 finds all 3 committed steps damaged" in str(outcome)
    require_untouched(root)


def test_a_step_saved_anew_meanwhile_is_not_put_under_quarantine(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = in_memory / "root"
    committed_at(root, OLD, NEW)
    damage_a_chunk(step_path(root, NEW))
    judged = identity_at(local_store(root), manifest_key(NEW))

    def late(store: Store, step: int, key: str, identity: str, why: str, found: str) -> None:
        monkeypatch.setattr(resume, "quarantine", quarantine)
        other = run_at(local_store(root))
        assert other.load(training_state(99)) == OLD
        other.save(NEW, training_state(NEXT)).wait()
        other.close()
        quarantine(store, step, key, identity, why, found)

    monkeypatch.setattr(resume, "quarantine", late)
    assert resumed_by(local_store(root)) == [(OLD, expected_fingerprint(OLD))]
    assert resumed_by(local_store(root)) == [(NEW, expected_fingerprint(NEXT))]
    records = [path.name for path in (root / "quarantine").iterdir() if "manifest" not in path.name]
    assert records == [f"{step_path(root, NEW).name}.{judged}.json"]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_step_that_went_lets_the_steps_be_listed_again(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    root = in_memory / "root"
    training = committed_at(root, OLD)
    list_steps = ResumeOrder.list

    def between(order: ResumeOrder) -> None:
        monkeypatch.setattr(ResumeOrder, "list", list_steps)
        list_steps(order)
        committed_at(root, NEW, NEXT)
        if is_damaged:
            damage_a_chunk(step_path(root, NEXT))
        shutil.rmtree(step_path(root, OLD))

    monkeypatch.setattr(ResumeOrder, "list", between)
    whole = NEW if is_damaged else NEXT
    assert resumed_by(local_store(root)) == [(whole, expected_fingerprint(whole))]
    del training


def test_values_of_a_damaged_step_that_an_older_one_lacks_do_not_stay_unsaid(in_memory: Path) -> None:
    root = in_memory / "root"
    with CheckpointManager(root) as manager:
        manager.save(OLD, {"z": torch.full((100_000,), 1.0)}).wait()
        manager.save(NEW, {"z": torch.full((100_000,), 2.0), "b": torch.full((1_000_000,), 3.0)}).wait()
    piece = holdfast.open_checkpoint(step_path(root, NEW)).pieces("z")[0]
    (pack,) = step_path(root, NEW).glob(f"*/{piece.pack}")
    flip(pack, piece.offset + piece.bytes - 4)
    with CheckpointManager(root) as manager:
        state = {"z": torch.zeros(100_000), "b": torch.full((1_000_000,), -7.0)}
        with pytest.raises(InvalidError, match=r"lacks 1 names, .*: b\. .*Make the state anew"):
            manager.load(state, strict=False)
        state["b"].fill_(-7.0)
        assert manager.load(state, strict=False) == OLD
        assert (state["z"][0].item(), state["b"].unique().tolist()) == (1.0, [-7.0])


def test_what_others_wrote_steers_no_terminal(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = in_memory / "root"
    with CheckpointManager(root) as manager:
        for step in (OLD, NEW):
            manager.save(step, {"\x1b[2Jevil": torch.randn(100_000)}).wait()
    damage_a_chunk(step_path(root, NEW))
    state = {"\x1b[2Jevil": torch.zeros(100_000)}
    with CheckpointManager(root) as manager:
        assert manager.load(state) == OLD
    (record,) = (root / "quarantine").iterdir()
    holdfast_header = {"format": [1, 2], "kind": "quarantine"}
    forged = {"holdfast": holdfast_header, "step": NEW, "why": "\x1b]0;owned\x07 well\nWARNING:forged", "found": "\x1b"}
    record.write_bytes(sealed(forged))
    with CheckpointManager(root) as manager:
        assert manager.load(state) == OLD
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all(text.isprintable() for text in warned), warned


@pytest.mark.parametrize("value", [torch.float16, torch.device("cuda:3")], ids=str)
def test_what_this_torch_does_not_know_is_no_damage(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    root = in_memory / "root"
    with CheckpointManager(root) as manager:
        for step in (OLD, NEW):
            manager.save(step, {"w": torch.ones(10), "config": {"it": value}}).wait()

    def unknown(name: str) -> torch.device:
        raise RuntimeError(f"expected one of cpu, meta; got {name}")

    monkeypatch.setattr(containers, "_DTYPES", {})
    monkeypatch.setattr(torch, "device", type("device", (), {"__new__": lambda _, name: unknown(name)}))
    with CheckpointManager(root) as manager, pytest.raises(InvalidError, match="this torch"):
        manager.load({"w": torch.zeros(10), "config": {"it": 0}})
    assert not (root / "quarantine").exists()

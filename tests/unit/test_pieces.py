"""What a caller plans itself: pieces of several ranks become one checkpoint or none, and boxes are read back."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Settings
from holdfast._face import wiring
from holdfast._face.pieces import names
from holdfast._face.pieces import writer as writer_module
from holdfast._face.pieces.torch_bytes import torch_bytes
from holdfast.backends.foreign.file_layout import FileLayout
from holdfast.backends.foreign.torch.archive_writer import put_archive
from holdfast.base.types.values import FrameworkValue, Group, Value
from holdfast.core.engine import background
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.integrations import host
from holdfast.pieces import BoxReader, PickledValue, PieceWriter, TensorPiece
from holdfast.training.saving import attempt, target
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.support.tuning import tuned

Given = tuple[Sequence[TensorPiece], Mapping[str, object]]

WHOLE = torch.arange(48, dtype=torch.float32).view(8, 6)
SMALL = tuned(Settings(chunk_bytes=4096), window_bytes=4096)


def half(number: int) -> TensorPiece:
    return TensorPiece("model.weight", (8, 6), (4 * number, 0), WHOLE[4 * number : 4 * number + 4])


def write(path: Path, ranks: Sequence[Given], **options: object) -> tuple[PieceWriter, list[bytes]]:
    """Return the coordinator's writer and the parts of all ranks, each of which had a writer of its own."""
    writers = [PieceWriter(path, **options) for _ in ranks]  # type: ignore[arg-type]
    tickets = writers[0].open(len(ranks))
    parts = [writer.write(ticket, *given) for writer, ticket, given in zip(writers, tickets, ranks, strict=True)]
    return writers[0], parts


def save(
    path: Path, *ranks: Given, paths: Mapping[str, tuple[str | int, ...]] | None = None, **options: object
) -> None:
    writer, parts = write(path, ranks, **options)
    writer.finish(parts, paths=paths)


def read(path: Path, fqn: str, shape: tuple[int, ...], start: tuple[int, ...], into: torch.Tensor) -> torch.Tensor:
    BoxReader(path).read([TensorPiece(fqn, shape, start, into)])
    return into


def files_below(path: Path) -> list[str]:
    return sorted(each.name for each in path.rglob("*") if each.is_file()) if path.exists() else []


def test_pieces_of_two_ranks_become_one_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "it", ([half(0)], {"step": 3}), ([half(1)], {"names": ["a", ("b", 1)]}))
    found = holdfast.open_checkpoint(tmp_path / "it")
    assert np.array_equal(found.read("model.weight"), WHOLE.numpy())
    assert found.objects == {"step": 3, "names": ["a", ("b", 1)]}
    assert found.manifest.world_size == 2
    assert found.written_by("model.weight") == {0: 1, 1: 1}
    assert list(found.verify()) == []


def test_any_box_is_read_across_pieces(tmp_path: Path) -> None:
    save(tmp_path / "it", ([half(0)], {}), ([half(1)], {}))
    assert torch.equal(read(tmp_path / "it", "model.weight", (8, 6), (3, 1), torch.zeros(2, 4)), WHOLE[3:5, 1:5])
    columns = torch.zeros(6, 8).T
    assert torch.equal(read(tmp_path / "it", "model.weight", (8, 6), (0, 0), columns), WHOLE)
    assert torch.equal(columns, WHOLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_every_kind_of_element_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(5).to(dtype)
    save(tmp_path / "it", ([TensorPiece("x", (5,), (0,), tensor), TensorPiece("s", (), (), tensor[1])], {}))
    assert torch.equal(read(tmp_path / "it", "x", (5,), (0,), torch.zeros(5, dtype=dtype)), tensor)
    assert torch.equal(read(tmp_path / "it", "s", (), (), torch.zeros((), dtype=dtype)), tensor[1])


def test_several_pieces_of_one_rank_and_empty_ones(tmp_path: Path) -> None:
    pieces = [
        TensorPiece("x", (4,), (2,), torch.tensor([2.0, 3.0])),
        TensorPiece("x", (4,), (0,), torch.tensor([0.0, 1.0])),
        TensorPiece("x", (4,), (4,), torch.zeros(0)),
        TensorPiece("none", (0, 3), (0, 0), torch.zeros(0, 3)),
    ]
    save(tmp_path / "it", (pieces, {}), ([TensorPiece("none", (0, 3), (0, 0), torch.zeros(0, 3))], {}))
    assert read(tmp_path / "it", "x", (4,), (0,), torch.zeros(4)).tolist() == [0, 1, 2, 3]
    assert BoxReader(tmp_path / "it").tensors["none"].shape == (0, 3)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([([half(0)], {}), ([], {})], "do not cover 1 tensors exactly once"),
        ([([half(0), half(1)], {}), ([half(1)], {})], "do not cover 1 tensors exactly once"),
        ([([half(0)], {}), ([TensorPiece("model.weight", (8, 6), (4, 0), WHOLE[4:].double())], {})], "float64"),
    ],
    ids=["gap", "overlap", "two dtypes"],
)
def test_a_plan_that_does_not_fit_leaves_nothing(tmp_path: Path, ranks: list[Given], expected: str) -> None:
    writer, parts = write(tmp_path / "it", ranks)
    with pytest.raises((InvalidError, CorruptError), match=expected):
        writer.finish(parts)
    assert files_below(tmp_path / "it") == []


def test_a_missing_part_leaves_nothing(tmp_path: Path) -> None:
    writer, parts = write(tmp_path / "it", [([half(0)], {}), ([half(1)], {})])
    with pytest.raises(InvalidError, match=r"ranks 1 have no part of this attempt; expected one of each of 2 ranks"):
        writer.finish(parts[:1])
    assert files_below(tmp_path / "it") == []


def test_a_coordinator_that_wrote_nothing_cannot_finish(tmp_path: Path) -> None:
    writer = PieceWriter(tmp_path / "it", overwrite=True)
    ticket = writer.open(2)[1]
    part = PieceWriter(tmp_path / "it").write(ticket, [half(1)], {})
    with pytest.raises(ConflictError, match="was given up, or never opened"):
        writer.finish([part])
    assert [name for name in files_below(tmp_path / "it") if name.endswith(".safetensors")] == []
    save(tmp_path / "it", ([half(0), half(1)], {}), overwrite=True)


def test_a_part_of_another_attempt_is_refused(tmp_path: Path) -> None:
    _, old = write(tmp_path / "it", [([half(0)], {}), ([half(1)], {})])
    writer, parts = write(tmp_path / "it", [([half(0)], {}), ([half(1)], {})])
    with pytest.raises(InvalidError, match="ranks 1 have no part"):
        writer.finish([parts[0], old[1]])


def test_a_rank_that_fails_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [PieceWriter(tmp_path / "it"), PieceWriter(tmp_path / "it")]
    tickets = writers[0].open(2)
    writers[0].write(tickets[0], [half(0)], {})
    before = files_below(tmp_path / "it")
    full = Faults(raise_error(UnavailableError), names=("upload.complete",))
    at = wiring.store_at
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), full))
    with pytest.raises(UnavailableError, match="a fault was injected"):
        PieceWriter(tmp_path / "it").write(tickets[1], [half(1)], {})
    assert files_below(tmp_path / "it") == before
    assert len(before) == 1
    writers[0].abort()
    assert files_below(tmp_path / "it") == []
    with pytest.raises(MissingError):
        holdfast.open_checkpoint(tmp_path / "it")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_does_not_answer_ends_the_claim_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The other ranks wait for their tickets. Once it answers, a save waits for the claim that was given up."""
    answers = threading.Event()
    given_up: list[Future[object]] = []

    class Recorded:
        def submit(self, call: Callable[[], object]) -> Future[object]:
            given_up.append(background.DAEMON_POOL.submit(call))
            return given_up[-1]

    monkeypatch.setattr(target, "DAEMON_POOL", Recorded())
    at = wiring.store_at
    silent = Faults(lambda _: answers.wait(60), lasting=True)
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), silent))
    settings = Settings(agreement_timeout_seconds=0.2)
    for overwrite in (False, True):
        answers.set()
        writer = PieceWriter(tmp_path / "it", overwrite=overwrite, settings=settings)
        answers.clear()
        with pytest.raises(UnavailableError, match=r"the look at .*it did not end within 0\.\d s.*look at the storage"):
            writer.open(ranks)
    answers.set()
    monkeypatch.undo()
    save(tmp_path / "it", ([half(0), half(1)], {"step": 1}), overwrite=True)
    # The threads of both have ended: one of a look, one of a claim that it gave back.
    assert len(given_up) == 2
    assert not wait(given_up, timeout=60).not_done
    assert holdfast.open_checkpoint(tmp_path / "it").objects == {"step": 1}
    assert files_below(tmp_path / "it" / "overwriting") == []


def test_the_claim_is_gone_once_a_save_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may overwrite the path as soon as the caller says that it is done."""
    slow = Faults(lambda _: time.sleep(0.2), names=("delete",), lasting=True)
    at = wiring.store_at
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), slow))
    save(tmp_path / "it", ([half(0), half(1)], {}), overwrite=True)
    assert slow.met > 0
    assert not (tmp_path / "it" / "overwriting" / "claim.json").exists()


@pytest.mark.parametrize("names", [("put_if_absent",), ("sync",), ("get",)])
def test_a_store_that_fails_the_commit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    at = wiring.store_at
    faults = Faults(raise_error(UnavailableError), names=names, lasting=True)
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), faults))
    writer, parts = write(tmp_path / "it", [([half(0), half(1)], {})])
    with pytest.raises(UnavailableError, match="a fault was injected"):
        writer.finish(parts)
    monkeypatch.undo()
    assert files_below(tmp_path / "it") == []


def test_an_interrupt_while_it_publishes_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest may be there: a checkpoint whose files were removed would be worse than none."""

    def interrupt(operation: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    at = wiring.store_at
    faults = Faults(interrupt, names=("put_if_absent",), at=3, after=True)
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), faults))
    writer, parts = write(tmp_path / "it", [([half(0), half(1)], {"step": 1})])
    with pytest.raises(KeyboardInterrupt):
        writer.finish(parts)
    writer.abort()
    monkeypatch.undo()
    assert faults.met
    assert list(holdfast.open_checkpoint(tmp_path / "it").verify()) == []


def test_a_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
    save(tmp_path / "it", ([half(0), half(1)], {"step": 1}))
    with pytest.raises(ConflictError, match="overwrite=True"):
        PieceWriter(tmp_path / "it").open(1)
    writer, _ = write(tmp_path / "it", [([half(0), half(1)], {"step": 2})], overwrite=True)
    writer.abort()
    assert holdfast.open_checkpoint(tmp_path / "it").objects == {"step": 1}
    save(tmp_path / "it", ([half(0), half(1)], {"step": 3}), overwrite=True)
    assert holdfast.open_checkpoint(tmp_path / "it").objects == {"step": 3}


def test_a_save_that_was_never_finished_is_in_nobodys_way(tmp_path: Path) -> None:
    first, parts = write(tmp_path / "it", [([half(0), half(1)], {"step": 1})], overwrite=True)
    save(tmp_path / "it", ([half(0), half(1)], {"step": 2}), overwrite=True)
    with pytest.raises(ConflictError, match="another save to the path began in this process"):
        first.finish(parts)
    assert holdfast.open_checkpoint(tmp_path / "it").objects == {"step": 2}


def test_ranks_that_do_not_agree_are_named(tmp_path: Path) -> None:
    ticket = PieceWriter(tmp_path / "it").open(2)[1]
    with pytest.raises(InvalidError, match="rank 1 saves here, and rank 0 to"):
        PieceWriter(tmp_path / "other").write(ticket, [], {})
    with pytest.raises(InvalidError, match=r"settings.chunk_bytes is 4096 on rank 1 and 1048576 on rank 0"):
        PieceWriter(tmp_path / "it", settings=SMALL).write(ticket, [], {})


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (
            TensorPiece("x", (4,), (2,), torch.zeros(4)),
            r"x: a piece of shape \[4\] at \[2\]; expected a box inside \[4\]",
        ),
        (TensorPiece("x", (2,), (0,), torch.zeros(2).to_sparse()), "x: torch.sparse_coo Tensor cannot be saved"),
        (TensorPiece("x", (2,), (0,), torch.zeros(2, device="meta")), "x: is a meta tensor"),
        (TensorPiece("x", (2,), (0,), [0.0, 1.0]), "x: a piece is list; expected a plain tensor"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, piece: TensorPiece, expected: str) -> None:
    writer = PieceWriter(tmp_path / "it")
    (ticket,) = writer.open(1)
    with pytest.raises(InvalidError, match=expected):
        writer.write(ticket, [piece], {})


def test_values_outside_the_closed_set_are_named_with_a_way_out(tmp_path: Path) -> None:
    writer = PieceWriter(tmp_path / "it")
    (ticket,) = writer.open(1)
    with pytest.raises(InvalidError, match=r"extra\.it: a value of type .*leave it out of the state$") as caught:
        writer.write(ticket, [], {"extra": {"it": io.BytesIO()}})
    assert "skip" not in str(caught.value)


def archive(value: object) -> PickledValue:
    layout = FileLayout()
    put_archive(layout, value)
    file = layout.file("")
    data = bytearray(file.bytes)
    for at, literal in file.literals:
        data[at : at + len(literal)] = literal
    return PickledValue(bytes(data))


def test_pickled_values_are_read_by_the_allow_list(tmp_path: Path) -> None:
    save(tmp_path / "it", ([], {"extra": archive({"a": [1, (2.5, "x")]})}))
    assert holdfast.open_checkpoint(tmp_path / "it").objects["extra"] == {"a": [1, (2.5, "x")]}
    writer = PieceWriter(tmp_path / "other")
    (ticket,) = writer.open(1)
    with pytest.raises(CorruptError, match="begins with b'not '"):
        writer.write(ticket, [], {"extra": PickledValue(b"not an archive")})


def test_tensors_in_values_are_stored_as_tensors(tmp_path: Path) -> None:
    save(tmp_path / "it", ([], {"extra": (torch.arange(3), {"deep": torch.ones(2)})}))
    found = holdfast.open_checkpoint(tmp_path / "it")
    assert sorted(found.tensors) == ["extra.0", "extra.1.deep"]
    reader = BoxReader(tmp_path / "it")
    assert (sorted(reader.tensors), list(reader.values)) == ([], ["extra"])
    state = holdfast.read(tmp_path / "it")
    assert torch.equal(state["extra"][0], torch.arange(3))  # type: ignore[index]


@pytest.mark.parametrize(
    "value", [{"a": 1, "b": {"c": [1]}}, {"w": torch.ones(2), "n": 1}, [{"a": 1}], {}, {"a": {}}, {3: "x"}], ids=repr
)
def test_a_container_that_is_one_value_stays_one(tmp_path: Path, value: object) -> None:
    save(tmp_path / "it", ([], {"extra": value, "step": 1}))
    reader = BoxReader(tmp_path / "it")
    assert (sorted(reader.tensors), sorted(reader.values)) == ([], ["extra", "step"])
    assert dict(reader.paths) == {"extra": ("extra",), "step": ("step",)}
    loaded = torch.load(io.BytesIO(reader.torch_bytes("extra")), weights_only=False)  # noqa: TID251 - ours, made now
    for each in (holdfast.read(tmp_path / "it")["extra"], loaded):
        assert type(each) is type(value)
        assert sorted(map(repr, each.items() if isinstance(each, dict) else each)) == sorted(  # type: ignore[call-overload]
            map(repr, value.items() if isinstance(value, dict) else value)  # type: ignore[call-overload]
        )


def test_damage_is_found(tmp_path: Path) -> None:
    save(tmp_path / "it", ([half(0), half(1)], {}))
    (pack, *_) = (tmp_path / "it").rglob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptError, match=r"model\.weight"):
        read(tmp_path / "it", "model.weight", (8, 6), (0, 0), torch.zeros(8, 6))


def test_a_lost_manifest_is_rebuilt_with_the_values_of_all_ranks(tmp_path: Path) -> None:
    """The coordinator's part has the whole tree: parts are still all that a repair needs."""
    save(tmp_path / "it", ([half(0)], {"step": 3}), ([half(1)], {"extra": {"a": 1}}))
    before = holdfast.open_checkpoint(tmp_path / "it")
    manifest = tmp_path / "it" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-100])
    (step,) = holdfast.api.repair(tmp_path / "it").steps
    assert (step.outcome, step.lost_tensors) == ("repaired", ())
    after = holdfast.open_checkpoint(tmp_path / "it")
    assert after.objects == before.objects == {"step": 3, "extra": {"a": 1}}
    assert sorted(BoxReader(tmp_path / "it").values) == ["extra", "step"]
    assert torch.equal(read(tmp_path / "it", "model.weight", (8, 6), (0, 0), torch.zeros(8, 6)), WHOLE)


def test_memory_that_does_not_fit_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    save(tmp_path / "it", ([half(0), half(1)], {}))
    into = torch.full((8, 6), 7, dtype=torch.int8)
    with pytest.raises(InvalidError, match="float32 in the checkpoint and int8 here"):
        read(tmp_path / "it", "model.weight", (8, 6), (0, 0), into)
    assert into.eq(7).all()
    with pytest.raises(InvalidError, match=r"\[8, 6\] in the checkpoint and \[8, 7\] here"):
        read(tmp_path / "it", "model.weight", (8, 7), (0, 0), torch.zeros(8, 7))
    with pytest.raises(MissingError, match="no tensor 'other'"):
        read(tmp_path / "it", "other", (1,), (0,), torch.zeros(1))
    half_wide = read(tmp_path / "it", "model.weight", (8, 6), (0, 0), torch.zeros(8, 6, dtype=torch.bfloat16))
    assert torch.equal(half_wide, WHOLE.bfloat16())


def test_names_are_kept_where_the_tree_has_others(tmp_path: Path) -> None:
    """The tree of an optimizer keeps hyperparameters by parameter; a caller has them by number of their group."""
    moments = TensorPiece("optim.state.w.exp_avg", (2,), (0,), torch.ones(2))
    weight = TensorPiece("model.w", (2,), (0,), torch.zeros(2))
    values = {"optim.param_groups.0.lr": 0.5, "optim.param_groups.0.params": ["w"]}
    paths: dict[str, tuple[str | int, ...]] = {
        "model.w": ("model", "w"),
        "optim.state.w.exp_avg": ("optim", "state", "w", "exp_avg"),
        "optim.param_groups.0.lr": ("optim", "param_groups", 0, "lr"),
        "optim.param_groups.0.params": ("optim", "param_groups", 0, "params"),
    }
    save(tmp_path / "it", ([weight, moments], values), paths=paths)
    reader = BoxReader(tmp_path / "it")
    assert dict(reader.paths) == paths
    assert (sorted(reader.tensors), sorted(reader.values)) == (["model.w", "optim.state.w.exp_avg"], sorted(values))
    net = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.full((2,), 9.0))})
    optimizer = torch.optim.Adam(net.parameters(), lr=9.0)
    net["w"].grad = torch.ones(2)
    optimizer.step()
    report = holdfast.load(tmp_path / "it", {"model": net, "optim": optimizer}, strict=False)
    assert net["w"].tolist() == [0.0, 0.0]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[net["w"]]["exp_avg"].tolist() == [1.0, 1.0]
    assert report.unexpected == ()


def test_names_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    writer, parts = write(tmp_path / "it", [([], {"a": 1, "a.b": 2})])
    with pytest.raises(InvalidError, match=r"a\.b is inside 'a'"):
        writer.finish(parts, paths={"a.b": ("a", "b")})
    writer, parts = write(tmp_path / "it", [([], {names.MARK: 1})])
    with pytest.raises(InvalidError, match="is a name that Holdfast uses itself"):
        writer.finish(parts)


def test_the_mark_is_the_one_of_the_integrations() -> None:
    assert names.MARK == host.MARK


def test_a_writer_that_is_gone_is_in_nobodys_way(tmp_path: Path) -> None:
    """Its claim would stay, renewed by this process, and refuse every later save to the path."""
    settings = Settings(lease_seconds=3)
    save(tmp_path / "it", ([half(0), half(1)], {"step": 1}))
    write(tmp_path / "it", [([half(0), half(1)], {"step": 2})], overwrite=True, settings=settings)
    gc.collect()
    save(tmp_path / "it", ([half(0), half(1)], {"step": 3}), overwrite=True, settings=settings)
    assert holdfast.open_checkpoint(tmp_path / "it").objects == {"step": 3}


def test_an_error_after_the_commit_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> str:
        raise RuntimeError("no line")

    monkeypatch.setattr(attempt, "saved_line", fail)
    writer, parts = write(tmp_path / "it", [([half(0)], {}), ([half(1)], {})])
    with pytest.raises(UnavailableError, match="outcome unknown: RuntimeError: no line"):
        writer.finish(parts)
    assert list(holdfast.open_checkpoint(tmp_path / "it").verify()) == []


def test_what_an_abandoned_call_wrote_is_no_part_of_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = wiring.store_at
    faults = Faults(lambda _: reopened(), names=("upload.complete",), after=True)
    monkeypatch.setattr(wiring, "store_at", lambda path, settings: FaultyStore(at(path, settings), faults))
    writer = PieceWriter(tmp_path / "it")
    parts: list[bytes] = []

    def reopened() -> None:
        """While the first call still writes, the writer saves anew."""
        (ticket,) = writer.open(1)
        parts.append(writer.write(ticket, [half(0), half(1)], {"step": 2}))

    (ticket,) = writer.open(1)
    with pytest.raises(ConflictError, match="this save was given up"):
        writer.write(ticket, [TensorPiece("model.weight", (8, 6), (0, 0), WHOLE + 1)], {"step": 1})
    writer.finish(parts)
    found = holdfast.open_checkpoint(tmp_path / "it")
    assert list(found.verify()) == []
    assert np.array_equal(found.read("model.weight"), WHOLE.numpy())


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"dtype": "float13", "shape": (1,), "data": b"1234"}, InvalidError, "dtype 'float13'; expected one of"),
        ({"dtype": "float32", "shape": (2,), "data": b"1234"}, CorruptError, r"float32 \[2\] with 4 bytes"),
        ({"dtype": "float32", "shape": (-1, -1), "data": b"1234"}, CorruptError, r"float32 \[-1, -1\]"),
        ({"dtype": 7, "shape": (1,), "data": b"1234"}, CorruptError, "expected a text, a tuple and bytes"),
        ({"shape": (1,)}, CorruptError, "without dtype, shape and data"),
    ],
)
def test_a_crafted_small_tensor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: Value, kind: type[Exception], expected: str
) -> None:
    value: Value = [FrameworkValue("torch.tensor", fields)]
    tree = Group("dict", {"extra": value})
    monkeypatch.setattr(writer_module, "tree_of_pieces", lambda *_: tree)
    save(tmp_path / "it", ([], {}))
    with pytest.raises(kind, match=rf"extra.*{expected}"):
        BoxReader(tmp_path / "it").torch_bytes("extra")
    with pytest.raises(kind, match=rf"extra.*{expected}"):
        holdfast.export(tmp_path / "it", tmp_path / "it.pt", to="torch", model_only=False)
    with pytest.raises(kind, match=rf"extra.*{expected}"):
        torch_bytes(value, "extra", lambda fqn: pytest.fail(fqn))

"""Checkpoints whose index lies in several files: each rank reads those it needs, and proves what it wants of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.geometry.region import FlatRange
from holdfast.base.ports.store import Store
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.index.columns import decode_column, encode_column
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.format.manifest import decode_manifest
from holdfast.core.format.names import OVERVIEW_FILE, is_index_name, step_folder
from holdfast.core.format.sealed_json import sealed, unsealed
from holdfast.errors import CheckpointError, CorruptError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.coverage import stored_by
from holdfast.stored.checkpoint.index_loading import index_frames, resolved_frames
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_bytes_at
from tests.doubles.comm import ThreadComm, outcomes_of_ranks, run_ranks
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, fresh_store, plain, run_of, sharded

SPLIT = tuned(PATIENT, index_chunks_max=8)
FOLDER = step_folder(1)
WRITERS = 8


def state(world_size: int, *, filled: bool) -> dict[str, Any]:
    """Several tensors split by rows, one that is nowhere split, flat ranges, and one without elements."""
    numel = 30 * 7
    cuts = [numel * rank // world_size for rank in range(world_size + 1)]
    flat = {rank: (FlatRange(cuts[rank], cuts[rank + 1]),) for rank in range(world_size)}
    found = {f"layers.{n}": sharded(world_size, rows=64) for n in range(4)} | {
        "flat": GlobalTensor("float32", np.arange(numel, dtype=np.float32).reshape(30, 7), declared=flat),
        "step": plain(7.0, count=1),
        "empty": GlobalTensor("float32", np.zeros((0, 3), np.float32)),
    }
    if not filled:
        for tensor in found.values():
            tensor.array[...] = -1
    return found


def save(store: Store, settings: Settings = SPLIT) -> None:
    def work(comm: ThreadComm) -> None:
        run = run_of(comm, store, settings)
        run.save(1, state(WRITERS, filled=True)).wait()
        run.close()

    run_ranks(WRITERS, work)


class Watched(MemoryStore):
    """Notes what is read whole."""

    def __init__(self, inner: MemoryStore) -> None:
        self.__dict__.update(inner.__dict__)
        self.read: list[str] = []

    def get(self, key: str, bytes_max: int) -> bytes:
        self.read.append(key.rpartition("/")[2])
        return super().get(key, bytes_max)


def load(stores: Sequence[Store]) -> tuple[list[object], list[dict[str, Any]]]:
    """Load on as many ranks as there are stores; return what each came to, and its state."""
    states = [state(len(stores), filled=False) for _ in stores]

    def work(comm: ThreadComm) -> object:
        run = run_of(comm, stores[comm.rank])
        try:
            return run.load(states[comm.rank])
        finally:
            run.close()

    return outcomes_of_ranks(len(stores), work), states


def require_loaded(states: Sequence[dict[str, Any]]) -> None:
    wanted = state(len(states), filled=True)
    for rank, found in enumerate(states):
        for name, tensor in found.items():
            for region in tensor.regions_on(rank):
                if isinstance(region, FlatRange):
                    at: Any = slice(region.start, region.stop)
                    assert (tensor.array.reshape(-1)[at] == wanted[name].array.reshape(-1)[at]).all(), name
                else:
                    at = region.relative_to((0,) * tensor.array.ndim)
                    assert (tensor.array[at] == wanted[name].array[at]).all(), name


def document_of(store: MemoryStore) -> dict[str, Any]:
    return unsealed(store.get(FOLDER + "manifest.json", 1 << 20), "here")[0]


def opened(store: Store) -> Checkpoint:
    return Checkpoint(CheckpointLocation(store, FOLDER, 1), PATIENT, lambda array, _: array)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_what_is_saved_comes_back_on_any_number_of_ranks(ranks: int) -> None:
    store = fresh_store()
    save(store)
    assert len(document_of(store)["indexes"]) > 8
    outcomes, states = load([store] * ranks)
    assert all(not isinstance(each, Exception) for each in outcomes), outcomes
    require_loaded(states)
    checkpoint = opened(store)
    assert list(checkpoint.verify()) == []
    assert (checkpoint.read("layers.2") == state(1, filled=True)["layers.2"].array).all()
    assert set(checkpoint.tensors) == set(state(1, filled=True))
    assert checkpoint.plan_for("fsdp=4").ranks[0].bytes > 0


def test_a_rank_reads_the_index_files_it_needs_and_rank_0_reads_none_for_the_others() -> None:
    store = fresh_store()
    save(store)
    files = {name for name, *_ in document_of(store)["indexes"]}
    stores = [Watched(store) for _ in range(WRITERS)]
    outcomes, states = load(stores)
    assert all(not isinstance(each, Exception) for each in outcomes), outcomes
    require_loaded(states)
    for rank, each in enumerate(stores):
        read = [name for name in each.read if is_index_name(name)]
        assert len(read) == len(set(read)), "no file twice"
        assert 0 < len(read) < len(files) / 2, (rank, read)
        assert (OVERVIEW_FILE in each.read) == (rank == 0)


def test_a_small_index_stays_one_file() -> None:
    store = fresh_store()
    save(store, PATIENT)
    document = document_of(store)
    assert len(document["indexes"]) == 1
    assert "overview" not in document


def alter(store: MemoryStore, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file of the attempt and make every digest fit, as who can write the files can."""
    document = document_of(store)
    key = f"{FOLDER}{document['attempt']}/{name}"
    found = msgspec.msgpack.decode(store.get(key, 1 << 20))
    change(found)
    data = msgspec.msgpack.encode(found)
    store.put(key, data)
    for record in (*document["indexes"], document["overview"]):
        if record[0] == name:
            record[1:] = [len(data), hex_digest_of(data)]
    store.put(FOLDER + "manifest.json", sealed(document))


def without_first_piece(document: dict[str, Any]) -> None:
    """Leave the first piece out, digests and all; every piece here is one chunk."""
    widths = decode_column(tuple(document["ndims"]), "here")[
        decode_column(tuple(document["piece_tensors"]), "here")
    ].tolist()
    for name in ("piece_tensors", "piece_packs", "piece_offsets"):
        document[name] = encode_column(decode_column(tuple(document[name]), "here")[1:])
    for name in ("piece_starts", "piece_stops"):
        document[name] = encode_column(decode_column(tuple(document[name]), "here")[widths[0] :])
    document["digests"] = document["digests"][16:]


def file_with(store: MemoryStore, fqn: str) -> str:
    document = document_of(store)
    for name, *_ in document["indexes"]:
        found = msgspec.msgpack.decode(store.get(f"{FOLDER}{document['attempt']}/{name}", 1 << 20))
        if found["fqns"][0] == fqn and not found["piece_kinds"]:
            return str(name)
    raise AssertionError(f"no index file that begins with {fqn}")


def test_a_hole_is_found_by_the_rank_that_wants_it_and_told_to_all() -> None:
    store = fresh_store()
    save(store)
    alter(store, file_with(store, "layers.1"), without_first_piece)
    outcomes, states = load([store] * 4)
    assert all(isinstance(each, CorruptError) for each in outcomes), outcomes
    assert any("leave holes or overlap: layers.1" in str(each) for each in outcomes)
    assert all((tensor.array == -1).all() for found in states for tensor in found.values() if tensor.array.size)
    (damage,) = opened(store).verify()
    assert "layers.1" in damage.message


def overview_said(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d: d["fqns"].__setitem__(-1, "zzz"), id="another name"),
        pytest.param(overview_said("bands", 1), id="other bands"),
        pytest.param(
            lambda d: d.update(
                file_bands_stop=encode_column([0] * len(decode_column(tuple(d["file_bands_stop"]), "")))
            ),
            id="files of no band",
        ),
        pytest.param(
            lambda d: d.update(file_tensors_stop=encode_column(decode_column(tuple(d["file_tensors_first"]), ""))),
            id="files of no tensor",
        ),
        pytest.param(
            lambda d: d.update(shapes=encode_column(decode_column(tuple(d["shapes"]), "") * (1 << 20))),
            id="gigantic tensors",
        ),
        pytest.param(overview_said("dtypes", ["float64"]), id="another dtype"),
        pytest.param(overview_said("chunk_bytes", 8192), id="other chunks"),
    ],
)
def test_an_overview_that_contradicts_the_index_is_refused_on_every_rank(change: Callable[[Any], object]) -> None:
    store = fresh_store()
    save(store)
    alter(store, OVERVIEW_FILE, change)
    outcomes, _ = load([store] * 3)
    assert all(isinstance(each, CheckpointError) for each in outcomes), outcomes
    assert list(opened(store).verify())
    with pytest.raises(CorruptError):
        _ = opened(store).tensors


def test_totals_that_the_packs_cannot_hold_are_refused_before_anything_is_allocated() -> None:
    store = fresh_store()
    save(store)
    alter(
        store,
        OVERVIEW_FILE,
        lambda d: d.update(shapes=encode_column(decode_column(tuple(d["shapes"]), "") * (1 << 15))),
    )
    document = document_of(store)
    overview = msgspec.msgpack.decode(store.get(f"{FOLDER}{document['attempt']}/{OVERVIEW_FILE}", 1 << 20))
    lengths = iter(decode_column(tuple(overview["shapes"]), "").tolist())
    shapes = [[next(lengths) for _ in range(ndim)] for ndim in decode_column(tuple(overview["ndims"]), "").tolist()]
    document["tensor_bytes"] = sum(4 * int(np.prod(shape, dtype=np.int64)) for shape in shapes)
    store.put(FOLDER + "manifest.json", sealed(document))
    outcomes, _ = load([store] * 2)
    assert all(isinstance(each, CorruptError) and "bytes of tensors in packs of" in str(each) for each in outcomes), (
        outcomes
    )


def test_a_file_of_the_index_that_is_gone_is_corrupt() -> None:
    store = fresh_store()
    save(store)
    document = document_of(store)
    store.delete([f"{FOLDER}{document['attempt']}/{file_with(store, 'layers.1')}"])
    outcomes, _ = load([store] * 2)
    assert all(isinstance(each, CorruptError) for each in outcomes), outcomes
    assert any("missing" in damage.message for damage in opened(store).verify())


def split_index_of(store: MemoryStore) -> SplitIndex:
    location = CheckpointLocation(store, FOLDER, 1)
    data = manifest_bytes_at(location)
    manifest = decode_manifest(data, location.url)
    found = resolved_frames([data, *index_frames(location, manifest)], location)[1]
    assert isinstance(found, SplitIndex)
    return found


def cut_last_byte(store: MemoryStore, pack: str) -> None:
    key = f"{FOLDER}{document_of(store)['attempt']}/{pack}"
    store.put(key, store.get(key, 1 << 30)[:-1])


def test_pieces_asked_for_by_name_are_those_of_the_whole_index() -> None:
    store = fresh_store()
    save(store)
    split, whole = split_index_of(store), opened(store).index
    for fqn in whole.tensors:
        assert list(split.pieces_of(fqn)) == list(whole.pieces_of(fqn)), fqn
        assert fqn == "empty" or split.pieces_of(fqn)
    assert split.pieces_of("nowhere") == []


@pytest.mark.parametrize("missing_bytes", [1, 64, 700])
def test_tensors_of_a_short_pack_are_refused_by_name_and_no_others(missing_bytes: int) -> None:
    store = fresh_store()
    save(store)
    whole = opened(store).index
    pack, size, *_ = document_of(store)["packs"][1]
    short = {pack: (size - missing_bytes, CorruptError("short"))}
    cut = {
        fqn
        for fqn in whole.tensors
        for piece in whole.pieces_of(fqn)
        if piece.pack == pack and piece.offset + piece.bytes > size - missing_bytes
    }
    assert 0 < len(cut) < len(whole.tensors)
    for index in (whole, split_index_of(store)):
        require = stored_by(index, short)
        for fqn in whole.tensors:
            if fqn in cut:
                with pytest.raises(CorruptError, match=f"{fqn}: short"):
                    require(fqn)
            else:
                require(fqn)


def test_a_short_pack_under_thousands_of_tensors_is_told_in_the_time_of_a_load() -> None:
    store, settings = fresh_store(), tuned(PATIENT, index_chunks_max=500)
    names = [f"layers.{number:04d}" for number in range(4000)]

    def work(comm: ThreadComm) -> None:
        run = run_of(comm, store, settings)
        saved = {name: plain(1.0, count=4) for name in names}
        run.save(1, saved).wait()
        start = time.process_time()
        run.load(saved)
        whole_seconds = time.process_time() - start
        ((pack, *_),) = document_of(store)["packs"]
        cut_last_byte(store, pack)
        start = time.process_time()
        with pytest.raises(CorruptError, match=r"layers\.3999: .*expected"):
            run.load(saved, 1)
        short_seconds = time.process_time() - start
        run.close()
        # Merging what is asked for anew for every name took forty times as long as loading.
        assert short_seconds < 5 * whole_seconds + 0.5, (short_seconds, whole_seconds)

    run_ranks(1, work)
    assert len(document_of(store)["indexes"]) > 32


def test_reading_a_tensor_reads_the_index_files_that_list_it_and_the_whole_is_read_at_most_twice() -> None:
    store = fresh_store()
    save(store, tuned(SPLIT, index_chunks_max=2))
    files = {name for name, *_ in document_of(store)["indexes"]}
    wanted = state(1, filled=True)
    watched = Watched(store)
    checkpoint = opened(watched)
    assert (checkpoint.read("layers.2", slice(8, 12)) == wanted["layers.2"].array[8:12]).all()
    read = [name for name in watched.read if is_index_name(name)]
    assert 0 < len(read) <= len(files) / 4
    for _ in range(3):
        for fqn, tensor in wanted.items():
            assert (checkpoint.read(fqn) == tensor.array).all(), fqn
    read = [name for name in watched.read if is_index_name(name)]
    assert max(map(read.count, files)) <= 2
    assert watched.read.count(OVERVIEW_FILE) <= 2


def test_a_hole_hinders_reading_what_it_is_in_and_nothing_else() -> None:
    store = fresh_store()
    save(store)
    alter(store, file_with(store, "layers.1"), without_first_piece)
    checkpoint = opened(store)
    assert (checkpoint.read("step") == 7.0).all()
    with pytest.raises(CorruptError, match=r"leave holes or overlap: layers\.1\."):
        checkpoint.read("layers.1")

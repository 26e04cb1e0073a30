"""Exports to a store of objects: the files of a disk, one by one, claimed, continued, refused; no server needed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import holdfast
from holdfast import api
from holdfast._face import export_wiring, wiring
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.parts import CollectedUpload
from holdfast.base.types.events import Progress
from holdfast.base.types.export import ExportOptions
from holdfast.errors import ConflictError, InvalidError, MissingError, UnavailableError
from holdfast.offline.export.object_place import ObjectPlace
from holdfast.offline.export.request import ExportRequest
from holdfast.settings import KIB, MIB, Settings
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.export.sources import SMALL, noise
from tests.export.test_publishing import contents
from tests.support.object_server import ObjectServer

NOTE, BEGUN = ".holdfast-export/plan.json", ".holdfast-export/begun"
SHARDS = 450 * KIB
"""Most bytes of a file: one layer of the source."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "saved"
    tensors = {f"layer{n}": noise((100, 1000), torch.float32, n) for n in range(4)}
    moments = {f"layer{n}": noise((100, 100), torch.float32, 9 + n) for n in range(4)}
    holdfast.save(path, {"model": tensors, "moments": moments, "step": 3}, process_group=False, settings=SMALL)
    return path


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def store_of(url: str) -> MemoryStore:
    return MemoryStore(url.removeprefix("memory://")).with_any_names()


def objects_in(url: str) -> dict[str, bytes]:
    store = store_of(url)
    return {entry.key: store.get(entry.key, entry.bytes) for entry in store.list()}


def exported(source: Path, target: object, to: str = "safetensors", **options: object) -> api.ExportReport:
    return api.export(source, target, to=to, **{"shard_bytes": SHARDS, **options})  # type: ignore[arg-type]


def test_each_worker_has_its_share(source: Path, url: str) -> None:
    capped = Settings(max_bytes_per_second=100)
    settings, shard_bytes = export_wiring.resources_of(url, capped, 1 << 30, 2, None)
    assert shard_bytes == 64 * MIB
    assert (settings.max_bytes_per_second, settings.object_store.bytes_in_flight_max) == (50, 320 * MIB)
    assert export_wiring.resources_of(source, wiring.DEFAULT_SETTINGS, 1 << 30, 2, None)[1] == 5_000_000_000


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@pytest.mark.parametrize("model_only", [True, False])
def test_the_objects_are_the_files_of_a_disk(tmp_path: Path, source: Path, url: str, to: str, model_only: bool) -> None:
    on_disk = exported(source, tmp_path / "out", to, model_only=model_only)
    report = exported(source, url, to, model_only=model_only)
    assert objects_in(url) == contents(tmp_path / "out")
    assert (report.files, report.bytes, report.url) == (on_disk.files, on_disk.bytes, url)
    assert (report.resumed_bytes, report.begun_anew) == (0, False)


@pytest.mark.parametrize(
    ("to", "last"),
    [("safetensors", "model.safetensors.index.json"), ("dcp", ".metadata"), ("small", "model.safetensors")],
)
def test_the_file_that_names_the_others_comes_last(source: Path, url: str, to: str, last: str) -> None:
    seen: list[set[str]] = []

    class Looks:
        def on_event(self, event: Progress) -> None:
            seen.append(set(objects_in(url)))

    options = {"shard_bytes": MIB * 8} if to == "small" else {}
    exported(source, url, to.replace("small", "safetensors"), model_only=False, observer=Looks(), **options)
    names = set(objects_in(url))
    assert all(last not in each for each in seen[:-1])
    assert seen[-1] == {*names, NOTE, BEGUN} and last in names


class LendsNothing(MemoryStore):
    """A store whose uploads take bytes from the memory of the caller alone, and may be under way at once."""

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> CollectedUpload:
        upload = super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)
        upload.room = lambda offset, length_bytes: None  # type: ignore[method-assign, assignment]
        copied = MemoryStore.upload(self, key, bytes_max, part_bytes)
        upload.write, upload.complete = copied.write, copied.complete  # type: ignore[method-assign]
        return upload


@pytest.mark.parametrize("memory_mib", [64, 200])
def test_a_store_that_lends_no_memory_gets_buffers(tmp_path: Path, url: str, memory_mib: int) -> None:
    tensors = {f"layer{n}": noise((5 * MIB,), torch.float32, n) for n in range(4)}
    holdfast.save(tmp_path / "saved", {"model": tensors}, process_group=False)
    for target in (url, tmp_path / "out"):
        options = ExportOptions(shard_bytes=20 * MIB)
        planned = export_wiring.export_of(tmp_path / "saved", target, "safetensors", options, SMALL)
        if target is url:
            planned.place = ObjectPlace(LendsNothing(url.removeprefix("memory://")).with_any_names())
        planned.run(ExportRequest(memory_bytes=memory_mib * MIB, workers=1))
    assert objects_in(url) == contents(tmp_path / "out")
    assert len(objects_in(url)) == 5


class Stops:
    """Ends an export once some bytes are written."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def on_event(self, event: Progress) -> None:
        if event.done_bytes:
            raise self._error


def test_an_interrupted_export_goes_on(tmp_path: Path, source: Path, url: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        exported(source, url, observer=Stops(KeyboardInterrupt))
    left = objects_in(url)
    assert NOTE in left and "model.safetensors.index.json" not in left
    with pytest.raises(MissingError, match=r"\d files of model-\*-of-00004\.safetensors and no index"):
        api.open_checkpoint(url)
    there = sum(len(data) for key, data in left.items() if key not in (NOTE, BEGUN))
    report = exported(source, url)
    assert report.resumed_bytes == there > 0
    exported(source, tmp_path / "out")
    assert objects_in(url) == contents(tmp_path / "out")


@pytest.mark.parametrize("shard_bytes", [SHARDS, None])
def test_half_an_export_does_not_pass_for_a_whole_checkpoint(source: Path, url: str, shard_bytes: int | None) -> None:
    """Its parts can be read by themselves: the optimizer without the model, and the model without the optimizer."""
    last = "model.safetensors" if shard_bytes is None else "model.safetensors.index.json"
    exported(source, url, shard_bytes=shard_bytes, model_only=False)
    store, whole = store_of(url), set(api.open_checkpoint(url).tensors)
    data = store.get(last, 4 * MIB)
    store.delete([last])
    store.put(NOTE, b"{}")
    with pytest.raises(MissingError, match=r"an export to here has not ended"):
        api.open_checkpoint(url)
    store.put(last, data)
    assert set(api.open_checkpoint(url).tensors) == whole


def test_an_export_that_died_before_its_note_went_is_done(source: Path, url: str) -> None:
    exported(source, url)
    before = objects_in(url)
    planned = export_wiring.export_of(source, url, "safetensors", ExportOptions(shard_bytes=SHARDS), SMALL)
    store_of(url).put(NOTE, json.dumps({"fingerprint": planned.fingerprint, "nonce": "1"}).encode())
    store_of(url).put(BEGUN, b"1")
    report = exported(source, url)
    assert report.resumed_bytes == report.bytes and not report.read_bytes
    assert objects_in(url) == before


def test_what_is_there_is_not_touched(source: Path, url: str) -> None:
    store_of(url).put("mine", b"1")
    with pytest.raises(ConflictError, match=r"mine: exists already; it was not touched\. Export elsewhere"):
        exported(source, url)
    assert objects_in(url) == {"mine": b"1"}


@pytest.mark.parametrize("note", [b'{"fingerprint": "other"}', b"{", b"[]"])
def test_another_export_that_has_not_ended_is_not_touched(source: Path, url: str, note: bytes) -> None:
    store_of(url).put(NOTE, note)
    with pytest.raises(
        ConflictError, match="another export, or one with other options, was begun there and has not ended"
    ):
        exported(source, url)
    assert objects_in(url) == {NOTE: note}


def test_something_else_under_the_name_of_a_file_is_not_touched(source: Path, url: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        exported(source, url, observer=Stops(KeyboardInterrupt))
    store_of(url).put("model.safetensors.index.json", b"{}")
    with pytest.raises(ConflictError, match=r"index\.json: an object of 2 bytes; this export stores \d+ bytes there"):
        exported(source, url)
    assert objects_in(url)["model.safetensors.index.json"] == b"{}"


class Beaten(MemoryStore):
    """A store in which somebody else is quicker."""

    def __init__(self, name: str, meanwhile: Callable[[MemoryStore], None]) -> None:
        super().__init__(name)
        self._meanwhile = meanwhile

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        self._meanwhile(self)
        super().put_if_absent(key, data, folders_durable=folders_durable)


def test_of_two_exports_that_begin_together_one_goes_on(url: str) -> None:
    name = url.removeprefix("memory://")

    def came_and_went(store: MemoryStore) -> None:
        store.put("model.safetensors", b"1")

    with pytest.raises(ConflictError, match="exists already"):
        ObjectPlace(Beaten(name, came_and_went).with_any_names()).claim("ours", SystemClock())
    assert objects_in(url) == {"model.safetensors": b"1"}
    store_of(url).delete(["model.safetensors"])

    def began(fingerprint: str) -> Callable[[MemoryStore], None]:
        return lambda store: store.put(NOTE, json.dumps({"fingerprint": fingerprint, "nonce": "2"}).encode())

    with pytest.raises(ConflictError, match="another export, or one"):
        ObjectPlace(Beaten(name, began("theirs")).with_any_names()).claim("ours", SystemClock())
    store_of(url).delete([NOTE])
    # The same export from two processes: both go on, and store the same bytes.
    assert not ObjectPlace(Beaten(name, began("ours")).with_any_names()).claim("ours", SystemClock())
    store_of(url).put("model.safetensors", b"1")
    assert ObjectPlace(store_of(url)).claim("ours", SystemClock())
    assert set(objects_in(url)) == {NOTE, BEGUN, "model.safetensors"}


def test_files_of_another_export_are_not_taken_for_those_of_one_that_died_as_it_began(url: str) -> None:
    """Two steps of a run have files of the same names and sizes. The first export comes and goes before the note."""
    name = url.removeprefix("memory://")
    first = Beaten(name, lambda store: store.put("model.safetensors", b"1")).with_any_names()
    # The listing after the note fails, so nothing withdraws it.
    faults = Faults(raise_error(lambda where: UnavailableError(f"{where}: no answer")), at=4, lasting=True)
    with pytest.raises(UnavailableError):
        ObjectPlace(FaultyStore(first, faults)).claim("second", SystemClock())
    assert set(objects_in(url)) == {NOTE, "model.safetensors"}
    with pytest.raises(ConflictError, match=r"model\.safetensors: exists already; it was not touched"):
        ObjectPlace(store_of(url)).claim("second", SystemClock())


@pytest.mark.parametrize("after", [False, True])
def test_after_a_fault_at_any_request_the_same_call_continues(
    tmp_path: Path, source: Path, url: str, after: bool
) -> None:
    exported(source, tmp_path / "out", "dcp")
    whole, request = contents(tmp_path / "out"), ExportRequest(memory_bytes=64 * MIB, workers=1)
    at, met = 1, 1
    while met:
        there = f"{url}-{at}"
        planned = export_wiring.export_of(source, there, "dcp", ExportOptions(shard_bytes=SHARDS), SMALL)
        down = raise_error(lambda where: UnavailableError(f"{where}: no answer"))
        faults = Faults(down, at=at, lasting=True, after=after)
        planned.place = ObjectPlace(FaultyStore(store_of(there), faults))
        try:
            planned.run(request)
        except UnavailableError:
            exported(source, there, "dcp")
        found = objects_in(there)
        assert {key: data for key, data in found.items() if key not in (NOTE, BEGUN)} == whole
        at, met = at + 1, faults.met
        assert NOTE not in found or met, "only a fault keeps the note"
    assert at > 15, "one for each request at least"


def test_a_source_that_changes_meanwhile_is_not_completed(tmp_path: Path, url: str) -> None:
    path = tmp_path / "one.safetensors"
    path.write_bytes(save({"w": torch.zeros(1000), "v": torch.zeros(1000)}))

    class Rewrites:
        def on_event(self, event: Progress) -> None:
            newer = path.with_suffix(".new")
            newer.write_bytes(save({"w": torch.ones(1000), "v": torch.zeros(1000)}))
            newer.replace(path)

    with pytest.raises(ConflictError, match="was written again while it was read"):
        exported(path, url, shard_bytes=4000, observer=Rewrites())
    assert "model.safetensors.index.json" not in objects_in(url)


def test_what_cannot_be_is_refused_before_anything_is_stored(source: Path, url: str) -> None:
    with pytest.raises(InvalidError, match=r"torch is one file; expected the URL of an object in a bucket"):
        exported(source, url, "torch")
    holdfast.save(f"{url}-empty", {"step": 3}, process_group=False)
    with pytest.raises(InvalidError, match="has nothing that safetensors holds; expected a tensor"):
        exported(f"{url}-empty", url, model_only=False)  # type: ignore[arg-type]
    large = {"model": {"w": torch.zeros(80 * MIB, dtype=torch.uint8)}}
    holdfast.save(f"{url}-large", large, process_group=False)
    with pytest.raises(InvalidError, match=r"a worker has 41943040 bytes for it\. Allow \d+ bytes of memory.*--memory"):
        api.export(f"{url}-large", url, to="safetensors", memory_bytes=64 * MIB)
    with pytest.raises(InvalidError, match="expected at least"):
        exported(source, url, memory_bytes=MIB)
    with pytest.raises(InvalidError, match="which is exported; expected a place outside it"):
        exported(f"{url}-large", f"{url}-large", memory_bytes=64 * MIB)  # type: ignore[arg-type]
    assert objects_in(url) == {}


def test_a_file_above_the_memory_of_a_worker_asks_for_memory(
    objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What S3 takes in one request grows with the memory: that limit says nothing of what to do."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", objects.endpoint)
    count = 300 * MIB
    header = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    with open(tmp_path / "large.safetensors", "wb") as sparse:
        sparse.write(len(header).to_bytes(8, "little") + header)
        sparse.truncate(8 + len(header) + count)
    with pytest.raises(InvalidError, match=r"a worker has 41943040 bytes for it\. Allow \d+ bytes of memory.*--memory"):
        api.export(tmp_path / "large.safetensors", objects.new_url(), to="safetensors", memory_bytes=64 * MIB)

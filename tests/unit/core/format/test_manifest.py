"""manifest.json: it comes back, every flipped bit of it is found, and what cannot be is refused."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import pytest

from holdfast.base.types.manifest import FileRecord, OptimizerRecord
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.manifest import decode_manifest, encode_manifest, run_fields_of_manifest
from holdfast.core.format.names import STEP_MAX, part_name
from holdfast.core.format.sealed_json import sealed, unsealed
from holdfast.errors import CorruptError, InvalidError
from tests.unit.core.format.documents import little_memory, manifest

OTHER = "step-000000000003/89abcdef01234567/"


def test_a_manifest_comes_back_with_its_digest() -> None:
    for each in (manifest(), replace(manifest(), step=None, parent=None, layouts=(), aliases={})):
        data = encode_manifest(each)
        again = decode_manifest(data, "here")
        assert again == each
        assert again.digest == unsealed(data, "here")[1]
        assert encode_manifest(again) == data


def test_metrics_come_back_and_state_the_version_that_brought_them() -> None:
    for metrics in ({"loss": 0.25}, {"loss": math.inf, "psnr/é": -math.inf, "tokens": 3e12}):
        data = encode_manifest(replace(manifest(), metrics=metrics))
        assert b'"format":[1,2]' in b"".join(data.split())
        assert decode_manifest(data, "here").metrics == metrics
    nan = decode_manifest(encode_manifest(replace(manifest(), metrics={"loss": math.nan})), "here").metrics
    assert list(nan) == ["loss"] and math.isnan(nan["loss"])
    # Without any, nothing changes: older readers and golden files know it so.
    assert b"metrics" not in encode_manifest(manifest())


def test_optimizers_come_back_and_leave_the_version_as_it_is() -> None:
    records = {
        "optimizer": OptimizerRecord("torch.optim.adamw.AdamW", ("exp_avg", "step")),
        "b.é": OptimizerRecord("X", ()),
    }
    data = encode_manifest(replace(manifest(), optimizers=records))
    assert decode_manifest(data, "here").optimizers == records
    # A reader that does not know the field ignores it, and loads the same.
    format_of = {unsealed(each, "here")[0]["holdfast"]["format"][1] for each in (data, encode_manifest(manifest()))}
    assert len(format_of) == 1
    assert b"optimizers" not in encode_manifest(manifest())


@pytest.mark.parametrize("pack", ["coded/r00000.safetensors", f"{OTHER}coded/r00001.safetensors"])
def test_a_pack_of_coded_pieces_states_the_version_that_brought_them(pack: str) -> None:
    coded = replace(manifest(), packs=(*manifest().packs, FileRecord(pack, 4096, "e" * 32)))
    data = encode_manifest(coded)
    assert b'"format":[1,4]' in b"".join(data.split())
    assert decode_manifest(data, "here").packs == coded.packs
    assert b'"format":[1,0]' in b"".join(encode_manifest(manifest()).split())


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    data = encode_manifest(manifest())
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises((CorruptError, InvalidError)):
                decode_manifest(bytes(flipped), "here")


def test_every_truncation_of_a_manifest_is_found() -> None:
    data = encode_manifest(manifest())
    for stop in range(len(data)):
        with pytest.raises(CorruptError):
            decode_manifest(data[:stop], "here")
    with pytest.raises(CorruptError):
        decode_manifest(data + b"\n", "here")


BAD_FIELDS: dict[str, tuple[object, ...]] = {
    "holdfast": (None, {}, {"format": 1}, {"format": []}, {"format": [2, 0]}, {"format": [1, 0], "kind": "run"}, []),
    "run_id": (None, 1, []),
    "step": (-1, STEP_MAX + 1, 1.5, "7", True),
    "attempt": (None, "", "0123456789ABCDEF", "../../../../etc/x", "0123456789abcdef0", 7),
    "created": (None, 7),
    "parent": ([], ["run", 1], ["run", "1", "x"], "run", 7),
    "world_size": (None, -1, 1 << 40, "2", 2.0, True),
    "layouts": (None, {}, "x"),
    "software": (None, []),
    "tensors": (None, -1, 1 << 63),
    "tensor_bytes": (None, -1),
    "aliases": (None, []),
    "packs": (None, {}, [[]], [["r00000.safetensors", 1]], [["/etc/passwd", 1, "x"]], [["r00000.safetensors", -1, "x"]],
              [["r00000.safetensors", 1.5, "x"]], [["r00000.safetensors", True, "x"]], [["r00000.safetensors", 1, 2]],
              [["r00000.safetensors", 1, "x"]] * 2, ["r00000.safetensors"], [[1, 1, "x"]]),
    "metrics": ([], "loss", {"loss": "low"}, {"loss": 1}, {"loss": True}, {"": 1.0}, {"$loss": 1.0}, {"a\nb": 1.0}),
    "optimizers": ([], "x", {"o": None}, {"o": {"class": "X"}}, {"o": {"class": 1, "state_keys": []}},
                   {"o": {"class": "X", "state_keys": "step"}}, {"o": {"class": "X", "state_keys": [1]}}),
    "parts": (None, [["r00000.safetensors", 1, "x"]], [["parts/../x.msgpack", 1, "x"]]),
    "indexes": (None, [["index-0.msgpack", 1, "x"]]),
    "state": (None, 1, [], {"$group": 1}, {"$group": {"kind": "x", "items": {}}}),
}  # fmt: skip


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_sealed_manifest_that_says_something_impossible_is_refused(field: str) -> None:
    document, _ = unsealed(encode_manifest(manifest()), "here")
    for bad in BAD_FIELDS[field]:
        changed = {**document, field: bad}
        if bad == -1 or not (isinstance(bad, int) and bad >= 1 << 63):
            with little_memory(), pytest.raises((CorruptError, InvalidError)):
                decode_manifest(sealed(changed), "here")
    if field not in ("step", "parent", "metrics", "optimizers"):
        without = {name: value for name, value in document.items() if name != field}
        with pytest.raises((CorruptError, InvalidError)):
            decode_manifest(sealed(without), "here")


def test_a_newer_format_is_refused_saying_which_reads_it() -> None:
    document, _ = unsealed(encode_manifest(manifest()), "here")
    newer = sealed({**document, "holdfast": {"format": [2, 3], "kind": "checkpoint"}})
    with pytest.raises(InvalidError, match=r"format 2\.3.*reads format 1.*major format 2"):
        decode_manifest(newer, "here")


def test_an_unknown_field_is_ignored() -> None:
    document, _ = unsealed(encode_manifest(manifest()), "here")
    assert decode_manifest(sealed({**document, "later": [1, 2]}), "here") == manifest()


# ------------------------------------------------------------------------------------- the fields that a run needs


def test_the_fields_of_a_run_are_read_without_making_the_names_of_files() -> None:
    parts = tuple(FileRecord(part_name(rank), 1000, "e" * 32) for rank in range(2000))
    data = encode_manifest(replace(manifest(), parts=parts, step=7, epoch=3))
    run_fields_of_manifest(data, "here")
    tracemalloc.start()
    fields = run_fields_of_manifest(data, "here")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (fields.step, fields.epoch, fields.digest) == (7, 3, decode_manifest(data, "here").digest)
    assert peak < len(data) / 10, "a load reads these fields of every step of a run"


def test_the_fields_of_a_run_are_proven_by_the_digest() -> None:
    data = encode_manifest(manifest())
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(CorruptError):
            run_fields_of_manifest(bytes(changed), "here")
    with pytest.raises(CorruptError):
        run_fields_of_manifest(data[:-1], "here")


@pytest.mark.parametrize(
    "body", [b"[1", b"{", b'{"holdfast": ' + b"[" * 100_000, b'{\n "step": 1', b'{"holdfast": 1 1']
)
def test_a_sealed_text_that_is_no_manifest_has_no_fields(body: bytes) -> None:
    data = body + b',\n "digest": "' + hex_digest_of(body).encode() + b'"\n}\n'
    with pytest.raises(CorruptError):
        run_fields_of_manifest(data, "here")


@pytest.mark.parametrize("version", [[1, 99], [2, 0]])
def test_the_fields_of_a_newer_format_are_refused_by_its_name(version: list[int]) -> None:
    document, _ = unsealed(encode_manifest(manifest()), "here")
    newer = sealed({**document, "holdfast": {"format": version, "kind": "checkpoint"}, "step": "of another kind"})
    with pytest.raises(InvalidError, match=rf"format {version[0]}\.{version[1]}"):
        run_fields_of_manifest(newer, "here")

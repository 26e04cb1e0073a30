"""manifest.json: the commit record, readable by a person and closed by its own digest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from holdfast.errors import CorruptError, InvalidError
from holdfast.format.health import decode_health, encode_health
from holdfast.format.names import (
    EPOCH_MAX,
    OVERVIEW_FILE,
    STEP_MAX,
    WORLD_SIZE_MAX,
    is_file_url,
    is_index_name,
    is_pack_name,
    is_part_name,
    step_of_pack,
)
from holdfast.format.sealed_json import Fields, check_format, sealed, unsealed
from holdfast.format.values import values
from holdfast.types.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR_IMPORTED,
    FORMAT_MINOR_RUN,
    FileRecord,
    Manifest,
    Parent,
    is_metric_name,
)
from holdfast.types.values import Group

MANIFEST_BYTES_MAX = 1 << 28
"""A manifest larger than this is taken for damage, not read."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json`.

    Raises:
        InvalidError: A value of the non-tensor state is outside the closed set.
    """
    parent = manifest.parent
    data = sealed(
        {
            "holdfast": {"format": [FORMAT_MAJOR, _minor_of(manifest)], "kind": "checkpoint"},
            "run_id": manifest.run_id,
            "step": manifest.step,
            "attempt": manifest.attempt,
            "created": manifest.created,
            "parent": None if parent is None else [parent.run_id, parent.step, parent.digest],
            "world_size": manifest.world_size,
            "layouts": list(manifest.layouts),
            "software": manifest.software,
            "tensors": manifest.tensors,
            "tensor_bytes": manifest.tensor_bytes,
            "aliases": manifest.aliases,
            "packs": [_record(each) for each in manifest.packs],
            "parts": [_record(each) for each in manifest.parts],
            "indexes": [_record(each) for each in manifest.indexes],
            **({} if manifest.overview is None else {"overview": _record(manifest.overview)}),
            **({} if manifest.origin is None else {"origin": manifest.origin}),
            **({"masters": manifest.masters} if manifest.masters else {}),
            **({"epoch": manifest.epoch} if manifest.epoch else {}),
            **({"metrics": values.encode(manifest.metrics, "metrics")} if manifest.metrics else {}),
            **({} if manifest.health is None else {"health": encode_health(manifest.health)}),
            "state": values.encode(manifest.tree, ""),
        }
    )
    if len(data) > MANIFEST_BYTES_MAX:
        raise InvalidError(
            f"the manifest has {len(data)} bytes; expected at most {MANIFEST_BYTES_MAX}. Keep large values as tensors"
        )
    return data


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest that a text holds.

    Raises:
        CorruptError: The text is damaged or says something impossible.
        InvalidError: It was written by a format this version does not read.
    """
    document, digest = unsealed(data, where)
    check_format(document, "checkpoint", where)
    field = Fields(document, where)
    tree = values.decode(document.get("state"), "")
    if not isinstance(tree, Group) or tree.kind != "dict":
        raise CorruptError(f"{where}: state is {type(tree).__name__}; expected the root of a state")
    step = field.whole("step", STEP_MAX) if document.get("step") is not None else None
    packs = _records(field.of("packs", list), _is_pack_or_elsewhere, where)
    for pack in packs:
        other = step_of_pack(pack.name)
        if other is not None and (step is None or other == step):
            said = "which is no step of a run" if step is None else f"which is step {step} itself"
            raise CorruptError(
                f"{where}: refers to {pack.name}, a pack of step {other}, in a checkpoint {said}; expected another step"
            )
    return Manifest(
        run_id=field.of("run_id", str, values.is_json_scalar),
        step=step,
        attempt=field.of("attempt", str, lambda text: re.fullmatch("[0-9a-f]{16}", text) is not None),
        created=field.of("created", str, values.is_json_scalar),
        parent=_parent(document.get("parent"), where),
        world_size=field.whole("world_size", WORLD_SIZE_MAX),
        layouts=tuple(dict(each) for each in field.of("layouts", list) if isinstance(each, dict)),
        software=field.texts("software"),
        tensors=field.whole("tensors", 1 << 62),
        tensor_bytes=field.whole("tensor_bytes", 1 << 80),
        aliases=field.texts("aliases"),
        tree=tree,
        packs=packs,
        parts=_records(field.of("parts", list), is_part_name, where),
        indexes=_records(field.of("indexes", list), is_index_name, where),
        overview=_overview(document.get("overview"), where),
        origin=field.of("origin", str, values.is_json_scalar) if document.get("origin") is not None else None,
        masters=field.texts("masters") if document.get("masters") is not None else {},
        epoch=_epoch(document, where),
        metrics=_metrics(document.get("metrics"), where),
        health=decode_health(document.get("health"), where),
        digest=digest,
    )


def _minor_of(manifest: Manifest) -> int:
    """Return the lowest minor version of the format that has everything a manifest says."""
    is_sharing = any(step_of_pack(pack.name) is not None for pack in manifest.packs)
    if manifest.epoch or manifest.metrics or manifest.health is not None or is_sharing:
        return FORMAT_MINOR_RUN
    is_referencing = any(is_file_url(pack.name) for pack in manifest.packs)
    return FORMAT_MINOR_IMPORTED if manifest.origin is not None or manifest.masters or is_referencing else 0


def standing_of(data: bytes, where: str) -> tuple[int | None, int, str]:
    """Return a manifest's step, the epoch under which it was published, and its digest; nothing else is judged.

    Raises:
        CorruptError: The text is damaged.
        InvalidError: It is of another major version.
    """
    document, digest = unsealed(data, where)
    check_format(document, "checkpoint", where)
    return _step(document, where), _epoch(document, where), digest


def _step(document: Mapping[str, object], where: str) -> int | None:
    if document.get("step") is None:
        return None
    return Fields(document, where).whole("step", STEP_MAX)


def _epoch(document: Mapping[str, object], where: str) -> int:
    if document.get("epoch") is None:
        return 0
    return Fields(document, where).whole("epoch", EPOCH_MAX)


def _record(record: FileRecord) -> list[object]:
    return [record.name, record.bytes, record.digest]


def _records(entries: list[object], is_name: Callable[[str], bool], where: str) -> tuple[FileRecord, ...]:
    records = []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 3:
            raise CorruptError(f"{where}: {str(entry)[:80]!r}; expected [name, bytes, digest]")
        name, count, digest = entry
        if not isinstance(name, str) or not is_name(name):
            raise CorruptError(f"{where}: file {str(name)[:80]!r}; expected a name of this format")
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{32}", digest):
            raise CorruptError(f"{where}: {name} with digest {str(digest)[:80]!r}; expected 32 hexadecimal digits")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise CorruptError(f"{where}: {name} of {str(count)[:80]} bytes; expected a whole number")
        records.append(FileRecord(name, count, digest))
    if len({record.name for record in records}) != len(records):
        raise CorruptError(f"{where}: a file is listed twice")
    return tuple(records)


def _is_pack_or_elsewhere(name: str) -> bool:
    return is_pack_name(name) or step_of_pack(name) is not None or (is_file_url(name) and values.is_json_scalar(name))


def _overview(entry: object, where: str) -> FileRecord | None:
    if entry is None:
        return None
    (record,) = _records([entry], lambda name: name == OVERVIEW_FILE, where)
    return record


def _metrics(entry: object, where: str) -> dict[str, float]:
    if entry is None:
        return {}
    metrics = values.decode(entry, "metrics")
    if type(metrics) is not dict or not all(
        isinstance(name, str) and is_metric_name(name) and type(value) is float for name, value in metrics.items()
    ):
        raise CorruptError(f"{where}: metrics are {str(entry)[:80]!r}; expected numbers by name")
    return metrics


def _parent(entry: object, where: str) -> Parent | None:
    if entry is None:
        return None
    if isinstance(entry, list) and len(entry) == 3:
        run_id, step, digest = entry
        if isinstance(run_id, str) and values.is_json_scalar(run_id) and type(step) is int and isinstance(digest, str):
            return Parent(run_id, step, digest)
    raise CorruptError(f"{where}: parent {str(entry)[:80]!r}; expected [run, step, digest]")

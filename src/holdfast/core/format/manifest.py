"""manifest.json: the commit record of a checkpoint. JSON that a person can read, closed by its own digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Annotated, NamedTuple

import msgspec

from holdfast.base.types.manifest import (
    FORMAT_MINOR_CODED,
    FORMAT_MINOR_IMPORTED,
    FORMAT_MINOR_RUN,
    FORMAT_MINOR_TIMELINES,
    FORMAT_MINOR_TYPES,
    FileRecord,
    Manifest,
    OptimizerRecord,
    Parent,
    is_metric_name,
)
from holdfast.base.types.timeline import Timeline
from holdfast.base.types.values import Group
from holdfast.core.format.health import decode_health, encode_health
from holdfast.core.format.names import (
    OVERVIEW_FILE,
    is_coded_pack_name,
    is_file_url,
    is_index_name,
    is_pack_name,
    is_part_name,
    step_of_pack,
)
from holdfast.core.format.sealed_json import (
    Count,
    Digest,
    EpochNumber,
    StepNumber,
    Text,
    WorldSize,
    decode_fields,
    decode_sealed,
    header,
    sealed,
)
from holdfast.core.format.state_order import numbers_in, text_of
from holdfast.core.format.timeline import TimelineDocument, decode_timeline, encode_timeline
from holdfast.core.format.values import values
from holdfast.errors import CorruptError, InvalidError

MANIFEST_BYTES_MAX = 1 << 28
"""Readers refuse a larger manifest as damaged, without reading it."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json`.

    Raises:
        InvalidError: The state holds a value of an unsupported type, or is too large.
    """
    data = sealed(
        {
            **header("checkpoint", _minor_of(manifest)),
            "run_id": manifest.run_id,
            "step": manifest.step,
            "attempt": manifest.attempt,
            "created": manifest.created,
            "parent": None if manifest.parent is None else list(manifest.parent),
            "world_size": manifest.world_size,
            "layouts": list(manifest.layouts),
            "software": manifest.software,
            "tensors": manifest.tensors,
            "tensor_bytes": manifest.tensor_bytes,
            "aliases": manifest.aliases,
            "packs": list(map(list, manifest.packs)),
            "parts": list(map(list, manifest.parts)),
            "indexes": list(map(list, manifest.indexes)),
            **({} if manifest.overview is None else {"overview": list(manifest.overview)}),
            **({} if manifest.origin is None else {"origin": manifest.origin}),
            **({"masters": manifest.masters} if manifest.masters else {}),
            **({"epoch": manifest.epoch} if manifest.epoch else {}),
            **({"metrics": values.encode(manifest.metrics, "metrics")} if manifest.metrics else {}),
            **({} if manifest.health is None else {"health": encode_health(manifest.health)}),
            **({} if manifest.timeline.number == 1 else {"timeline": encode_timeline(manifest.timeline)}),
            **({"optimizers": _encoded_optimizers(manifest.optimizers)} if manifest.optimizers else {}),
            **({"order": text_of(manifest.order)} if manifest.order else {}),
            **({"newer_types": list(manifest.newer_types)} if manifest.newer_types else {}),
            # No minor version by itself: a reader that ignores the field loads the step without its log.
            **({"log": manifest.log} if manifest.log else {}),
            **({"near_only": True} if manifest.near_only else {}),  # Likewise: the step is as readable as any.
            "state": values.encode(manifest.tree, ""),
        }
    )
    if len(data) > MANIFEST_BYTES_MAX:
        raise InvalidError(
            f"step {manifest.step}: the manifest has {len(data)} bytes; expected at most {MANIFEST_BYTES_MAX}. Save "
            "large values as tensors"
        )
    return data


_HexId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class _OptimizerDocument(msgspec.Struct):
    state_keys: list[Text]
    class_name: Text = msgspec.field(name="class")


class _RunFieldsDocument(msgspec.Struct):
    step: StepNumber | None = None
    epoch: EpochNumber | None = None
    timeline: TimelineDocument | None = None
    log: _HexId | None = None


_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Record = tuple[str, _Whole, Digest]


class _ManifestDocument(_RunFieldsDocument, kw_only=True):
    run_id: Text
    attempt: _HexId
    created: Text
    parent: tuple[Text, int, Text] | None = None
    world_size: WorldSize
    layouts: list[object]
    software: dict[Text, Text]
    tensors: Count
    tensor_bytes: _Whole
    aliases: dict[Text, Text]
    packs: list[_Record]
    parts: list[_Record]
    indexes: list[_Record]
    overview: _Record | None = None
    origin: Text | None = None
    masters: dict[Text, Text] | None = None
    metrics: object = None
    health: object = None
    optimizers: dict[Text, _OptimizerDocument] | None = None
    order: str = ""
    newer_types: tuple[Text, ...] = ()
    near_only: bool = False
    state: object


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest that a text holds.

    Raises:
        CorruptError: The text is damaged, or a field is impossible.
        InvalidError: It was written by a format this version does not read.
    """
    document, digest = decode_sealed(data, "checkpoint", _ManifestDocument, where)
    tree = values.decode(document.state, "")
    if not isinstance(tree, Group) or tree.kind != "dict":
        raise CorruptError(
            f"{where}: state is {type(tree).__name__}; expected the group at its root. Read another copy"
        )
    packs = _records(document.packs, _is_pack_or_elsewhere, where)
    _require_other_steps(packs, document.step, where)
    overviews = _records([document.overview] if document.overview else [], OVERVIEW_FILE.__eq__, where)
    fields = msgspec.structs.asdict(document) | {
        "parent": Parent(*document.parent) if document.parent else None,
        "layouts": tuple(layout for layout in document.layouts if isinstance(layout, dict)),
        "masters": document.masters or {},
        "epoch": document.epoch or 0,
        "metrics": _metrics(document.metrics, where),
        "health": decode_health(document.health, where),
        "timeline": decode_timeline(document.timeline),
        "log": document.log or "",
        "optimizers": {
            path: OptimizerRecord(record.class_name, tuple(record.state_keys))
            for path, record in (document.optimizers or {}).items()
        },
        "order": numbers_in(document.order, where),
        "tree": tree,
        "packs": packs,
        "parts": _records(document.parts, is_part_name, where),
        "indexes": _records(document.indexes, is_index_name, where),
        "overview": overviews[0] if overviews else None,
        "digest": digest,
    }
    del fields["state"]  # Decoded as `tree`.
    return Manifest(**fields)


def _encoded_optimizers(optimizers: Mapping[str, OptimizerRecord]) -> dict[str, object]:
    # No minor version by itself: a reader that ignores the field loads the checkpoint as before.
    return {path: {"class": name, "state_keys": list(keys)} for path, (name, keys) in sorted(optimizers.items())}


def _minor_of(manifest: Manifest) -> int:
    """Return the lowest minor version of the format that has every field of a manifest."""
    if manifest.newer_types:
        return FORMAT_MINOR_TYPES
    if any(is_coded_pack_name(pack.name) for pack in manifest.packs):
        return FORMAT_MINOR_CODED
    if manifest.timeline.number > 1:
        return FORMAT_MINOR_TIMELINES
    shares_packs = any(step_of_pack(pack.name) is not None for pack in manifest.packs)
    if manifest.epoch or manifest.metrics or manifest.health is not None or shares_packs:
        return FORMAT_MINOR_RUN
    references_files = any(is_file_url(pack.name) for pack in manifest.packs)
    return FORMAT_MINOR_IMPORTED if manifest.origin is not None or manifest.masters or references_files else 0


class RunFields(NamedTuple):
    """The fields of a manifest that say whether and where it counts in its run."""

    step: int | None
    """Its step; None for a checkpoint saved by path."""

    epoch: int
    """Epoch under which it was published; 0 if under none."""

    digest: str
    """Its digest."""

    timeline: Timeline
    """Its timeline."""

    log: str = ""
    """The redo log of which it is a base; empty if there is none."""


def run_fields_of_manifest(data: bytes, where: str) -> RunFields:
    """Return the fields of a manifest that its run needs. No other field is checked.

    Raises:
        CorruptError: The text is damaged.
        InvalidError: It is of another version.
    """
    document, digest = decode_fields(data, "checkpoint", _RunFieldsDocument, where)
    return RunFields(document.step, document.epoch or 0, digest, decode_timeline(document.timeline), document.log or "")


def _records(entries: Sequence[_Record], is_name: Callable[[str], bool], where: str) -> tuple[FileRecord, ...]:
    for name, _, _ in entries:
        if not is_name(name):
            raise CorruptError(f"{where}: file {name[:80]!r}; expected a name of this format. Read another copy")
    if len({name for name, _, _ in entries}) != len(entries):
        raise CorruptError(f"{where}: a file is listed twice; expected each once. Read another copy")
    return tuple(starmap(FileRecord, entries))


def _require_other_steps(packs: Sequence[FileRecord], step: int | None, where: str) -> None:
    for pack in packs:
        # A manifest names up to hundreds of thousands of packs, most often none of another step.
        pack_step = step_of_pack(pack.name) if pack.name.startswith("step-") else None
        if pack_step is not None and (step is None or pack_step == step):
            problem = "has no step, so it cannot share packs" if step is None else f"is of step {step} itself"
            raise CorruptError(
                f"{where}: refers to {pack.name}, a pack of step {pack_step}, but {problem}. Read another copy"
            )


def _is_pack_or_elsewhere(name: str) -> bool:
    return is_pack_name(name) or step_of_pack(name) is not None or (is_file_url(name) and values.is_json_scalar(name))


def _metrics(entry: object, where: str) -> dict[str, float]:
    metrics = {} if entry is None else values.decode(entry, "metrics")
    if type(metrics) is not dict or not all(
        isinstance(name, str) and is_metric_name(name) and type(value) is float for name, value in metrics.items()
    ):
        raise CorruptError(f"{where}: metrics are {str(entry)[:80]!r}; expected floats by name. Read another copy")
    return metrics

"""The words for one checkpoint: facts and JSON that `holdfast inspect` and the page share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from holdfast._face.run_words import health_document, json_number, log_document, shown_metrics, shown_time
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.types.coding import KindCoding
from holdfast.errors import counted, printable, shown_bytes
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.codings import StoredForm


def provenance(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return facts about a checkpoint for people, each with its name, as `holdfast inspect` prints them.

    Example:
        print(holdfast.api.provenance(holdfast.open_checkpoint("run-7", step="latest")))
    Returns:
        Names and texts without control characters. The first name is empty: its text names the checkpoint.
    """
    return list(_facts(checkpoint))


def _facts(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    manifest = checkpoint.manifest
    saved = "checkpoint saved by path" if manifest.attempt else "another system's checkpoint"
    named = saved if manifest.step is None else f"step {manifest.step}"
    yield "", named
    yield "path", printable(checkpoint.url)
    if checkpoint.origin is not None:
        yield "origin" if manifest.attempt else "format", printable(checkpoint.origin)
    if manifest.attempt:
        yield "run", printable(manifest.run_id)
        yield "created", shown_time(manifest.created)
    for finding in manifest.findings:
        yield "unhealthy", printable(finding)
    if manifest.health is not None and manifest.healthy:
        yield "health", "healthy"
    if manifest.metrics:
        yield "metrics", shown_metrics(manifest.metrics)
    parent = manifest.parent
    if parent is not None:
        run = "" if parent.run_id == manifest.run_id else f" of run {printable(parent.run_id)}"
        yield "continues", f"step {parent.step}{run} (manifest {printable(parent.digest)})"
    steps = checkpoint.packs_of_other_steps
    shared = [pack for packs in steps.values() for pack in packs]
    pack_bytes = sum(pack.bytes for pack in manifest.packs) - sum(pack.bytes for pack in shared)
    kind = "referenced file" if checkpoint.references else "pack" if manifest.attempt else "file"
    yield "size", f"{manifest.tensors:,} tensors of {shown_bytes(manifest.tensor_bytes)}"
    yield "stored", f"{shown_bytes(pack_bytes)} in {counted(len(manifest.packs) - len(shared), kind)}"
    if shared:
        owners = f"step{'s' * (len(steps) != 1)} {', '.join(map(str, steps))}"
        yield "unchanged", f"in {counted(len(shared), 'pack')} of {owners}"
    log = checkpoint.log
    if log is not None:
        segments = f"{shown_bytes(log.bytes)} in {counted(len(log.segments), 'segment')}"
        yield "redo log", f"{log.id}: to step {log.reach}, {segments}"
    yield "saved by", counted(manifest.world_size, "rank")
    for view in checkpoint.layouts:
        yield "seen by", printable(f"layout {view}")
    for layout in _layouts(manifest.layouts):
        yield "layout", layout
    if manifest.attempt:
        yield "software", printable(", ".join(f"{name} {version}" for name, version in manifest.software.items()))
        yield "attempt", manifest.attempt
        yield "digest", manifest.digest
    for remark in checkpoint.remarks:
        yield "remark", printable(remark)


def _layouts(layouts: tuple[dict[str, object], ...]) -> Iterator[str]:
    """Yield a line for each layout. Only people read it, so a layout of any form is shown."""
    for layout in layouts:
        mesh, placements = layout.get("mesh"), layout.get("placements")
        if isinstance(mesh, list) and isinstance(placements, list):
            ranks = " x ".join(map(str, mesh))
            text = f"mesh {ranks}, {', '.join(map(str, placements))}: {layout.get('tensors')} tensors"
        else:
            text = str(layout)
        yield printable(text)


def coded_forms(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, StoredForm]:
    """Return how each tensor is stored; nothing for a checkpoint whose tensors are all stored as they are.

    Example:
        checkpoint = holdfast.open_checkpoint("checkpoint")
        print(holdfast.api.coded_forms(checkpoint, list(checkpoint.tensors)))
    """
    forms = {fqn: checkpoint.stored_form(fqn) for fqn in names}
    return forms if any(form.codecs for form in forms.values()) else {}


def tensor_totals(
    checkpoint: Checkpoint, names: Sequence[str], forms: Mapping[str, StoredForm]
) -> dict[str, dict[str, int]]:
    """Return number and bytes of tensors by the first part of their names, the key of the state.

    Where some are coded, their stored bytes too.

    Example:
        checkpoint = holdfast.open_checkpoint("checkpoint")
        print(holdfast.api.tensor_totals(checkpoint, list(checkpoint.tensors), {}))
    Args:
        checkpoint: The checkpoint.
        names: The tensors.
        forms: The `coded_forms` of these tensors.
    """
    totals: dict[str, dict[str, int]] = {}
    for fqn in names:
        total = totals.setdefault(fqn.partition(".")[0], {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += checkpoint.tensors[fqn].bytes
        if forms:
            total["stored_bytes"] = total.get("stored_bytes", 0) + forms[fqn].stored_bytes
    return totals


def codings_document(codings: Mapping[int, Iterable[KindCoding]]) -> list[dict[str, object]]:
    """Return the decisions of all ranks as JSON, one entry for each rank and kind."""
    return [{"rank": rank, **asdict(coding)} for rank, of_rank in codings.items() for coding in of_rank]


def checkpoint_document(checkpoint: Checkpoint, names: Sequence[str], *, values: bool = True) -> dict[str, object]:
    """Return a checkpoint as JSON, as `holdfast inspect --json` prints it.

    Example:
        checkpoint = holdfast.open_checkpoint("checkpoint")
        print(holdfast.api.checkpoint_document(checkpoint, list(checkpoint.tensors))["totals"])
    Args:
        checkpoint: The checkpoint.
        names: Tensors to describe.
        values: Whether to add the values that are not tensors.
    """
    manifest = checkpoint.manifest
    parent = manifest.parent
    chosen = set(names)
    document: dict[str, object] = {
        **_attributes(checkpoint, "url", "origin", "remarks"),
        **_attributes(manifest, "step", "run_id", "attempt", "created"),
        **health_document(checkpoint),
        "metrics": {name: json_number(value) for name, value in manifest.metrics.items()},
        "digest": manifest.digest,
        "parent": None if parent is None else _attributes(parent, "run_id", "step", "digest"),
        **_attributes(manifest, "world_size", "layouts", "software"),
        "tensor_count": manifest.tensors,
        "tensor_bytes": manifest.tensor_bytes,
        "packs": [_attributes(pack, "name", "bytes", "digest") for pack in manifest.packs],
        "log": None if checkpoint.log is None else log_document(checkpoint.log),
        "totals": tensor_totals(checkpoint, names, coded_forms(checkpoint, names)),
        "codings": codings_document(checkpoint.codings),
        "tensors": {fqn: tensor_document(checkpoint, fqn) for fqn in names},
        "aliases": {alias: fqn for alias, fqn in sorted(checkpoint.aliases.items()) if fqn in chosen},
    }
    if values:
        document["values"] = checkpoint.objects_document()
    return document


def tensor_document(checkpoint: Checkpoint, fqn: str) -> dict[str, object]:
    """Return a tensor of a checkpoint as JSON: type, shape, bytes, codecs, and pieces with the ranks that wrote them.

    Example:
        print(holdfast.api.tensor_document(holdfast.open_checkpoint("checkpoint"), "model.weight"))
    """
    info, form = checkpoint.tensors[fqn], checkpoint.stored_form(fqn)
    return {
        **_attributes(info, "dtype", "shape", "bytes"),
        "stored_bytes": form.stored_bytes,
        "codecs": {name or "raw": count for name, count in form.chunks.items()},
        "pieces": [
            {**_region(piece.region), **_attributes(piece, "pack", "offset", "bytes", "stored_bytes")}
            for piece in checkpoint.pieces(fqn)
        ],
        "pieces_by_rank": {str(rank): count for rank, count in sorted(checkpoint.written_by(fqn).items())},
    }


def _region(region: Region) -> dict[str, object]:
    """Return the region of a piece: corners of a box, or a range of the flattened tensor."""
    if isinstance(region, FlatRange):
        return {"flat_start": region.start, "flat_stop": region.stop}
    return _attributes(region, "start", "stop")


def _attributes(record: object, *names: str) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}

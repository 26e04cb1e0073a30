"""The facts about one checkpoint, in words that `holdfast inspect` and the page share."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast._face.run_words import shown_metrics, shown_time
from holdfast.errors import counted, printable, shown_bytes
from holdfast.stored.checkpoint.checkpoint import Checkpoint


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

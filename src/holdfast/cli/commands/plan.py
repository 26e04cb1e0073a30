"""Output of `holdfast inspect --plan`: how much each rank of a job would read."""

from __future__ import annotations

from holdfast import api
from holdfast.cli.screen import Column, Screen, attributes, counted, shown_bytes
from holdfast.errors import printable

_COLUMNS = (
    Column("RANK", "right"),
    Column("HOLDS", "right"),
    Column("READS", "right"),
    Column("CHUNKS", "right"),
    Column("RUNS", "right"),
)


def show_plan(screen: Screen, checkpoint: api.Checkpoint, forecast: api.Forecast, limit: int | None) -> None:
    """Print what every rank would read, at most `limit` of them."""
    mesh, ranks = forecast.mesh, forecast.ranks
    dimensions = zip(mesh.names, mesh.shape, mesh.placements, strict=True)
    screen.line(f"plan for {counted(len(ranks), 'rank')}; nothing was read", style="bold")
    screen.field("path", printable(checkpoint.url.removeprefix("file://")))
    screen.field("mesh", ", ".join(f"{name}={size} {placement}" for name, size, placement in dimensions))
    screen.field("tensors", f"{forecast.tensors:,} of {shown_bytes(forecast.stored_bytes)}")
    screen.field("reads", f"{shown_bytes(forecast.bytes)} over all ranks")
    screen.field("imbalance", f"{forecast.imbalance:.2f} (most over mean)")
    screen.line()
    rows = [
        [str(rank.rank), shown_bytes(rank.held_bytes), shown_bytes(rank.bytes), f"{rank.chunks:,}", f"{rank.reads:,}"]
        for rank in ranks[:limit]
    ]
    screen.table(_COLUMNS, rows)
    screen.note_left_out(len(ranks), limit, " ranks: --all shows them")


def plan_document(checkpoint: api.Checkpoint, forecast: api.Forecast) -> dict[str, object]:
    """Return the plan as a JSON document."""
    mesh = forecast.mesh
    dimensions = zip(mesh.names, mesh.shape, mesh.placements, strict=True)
    return {
        "url": checkpoint.url,
        "step": checkpoint.step,
        "mesh": [{"name": name, "size": size, "placement": str(placement)} for name, size, placement in dimensions],
        "tensor_count": forecast.tensors,
        "tensor_bytes": forecast.stored_bytes,
        "bytes": forecast.bytes,
        "imbalance": forecast.imbalance,
        "ranks": [attributes(rank, "rank", "held_bytes", "bytes", "chunks", "reads") for rank in forecast.ranks],
    }

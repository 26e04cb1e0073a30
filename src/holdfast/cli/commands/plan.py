"""What `holdfast inspect --plan` shows: which rank of a job would read how much."""

from __future__ import annotations

from holdfast import api
from holdfast.cli.screen import Column, Screen, shown_bytes
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
    screen.line(f"plan for {len(ranks):,} rank{'s' * (len(ranks) != 1)}; nothing was read", style="bold")
    screen.field("path", printable(checkpoint.url.removeprefix("file://")))
    screen.field("mesh", ", ".join(f"{name}={size} {placement}" for name, size, placement in dimensions))
    screen.field("tensors", f"{forecast.tensors:,} of {shown_bytes(forecast.stored_bytes)}")
    screen.field("reads", f"{shown_bytes(forecast.bytes)} over all ranks")
    screen.field("imbalance", f"{forecast.imbalance:.2f} (most over mean)")
    screen.line()
    rows = [
        [str(each.rank), shown_bytes(each.held_bytes), shown_bytes(each.bytes), f"{each.chunks:,}", f"{each.reads:,}"]
        for each in ranks[:limit]
    ]
    screen.table(_COLUMNS, rows)
    if len(rows) < len(ranks):
        screen.line(f"… and {len(ranks) - len(rows):,} more ranks: --all shows them", style="dim")


def plan_document(checkpoint: api.Checkpoint, forecast: api.Forecast) -> dict[str, object]:
    """Return the same as a JSON document."""
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
        "ranks": [
            {
                "rank": each.rank,
                "held_bytes": each.held_bytes,
                "bytes": each.bytes,
                "chunks": each.chunks,
                "reads": each.reads,
            }
            for each in forecast.ranks
        ],
    }

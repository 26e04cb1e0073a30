"""`holdfast ls`: the steps of a run."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, Root
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, attributes, print_result

STYLES = {"bad": "red", "warning": "yellow", "old": "dim", "": ""}


def ls(
    root: Root,
    near: Annotated[
        str | None,
        typer.Option(
            "--near", metavar="PATH", help="The near tier. Default: the one of the root, if this host has it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the steps of a run, oldest first, with damaged and unfinished ones."""
    with ended_well():
        print_result(api.list_steps(root, near=near), _show, _document, as_json=as_json)


def _show(screen: Screen, run: api.RunRecord) -> None:
    table = api.step_table(run)
    if table.rows:
        screen.table(table.columns, table.rows, [STYLES[tone] for tone in table.tones])
    else:
        screen.line("no committed step yet")
    for tone, text in (*table.notes, *(api.agent_notes(run.agent) if run.agent is not None else ())):
        screen.line(text, style=STYLES[tone])


def log_document(log: api.RunLog) -> dict[str, object]:
    """Return the redo log after a base, as JSON."""
    return {**attributes(log, "id", "base", "reach"), "segments": len(log.segments), "bytes": log.bytes}


def health_document(record: api.Checkpoint | api.StepRecord) -> dict[str, object]:
    """Return the health of a checkpoint, as JSON."""
    manifest = record.manifest
    health = None if manifest is None else manifest.health
    return {
        "healthy": manifest and manifest.healthy,
        "nonfinite": None if health is None or health.nonfinite is None else dict(health.nonfinite),
        "unhealthy": () if manifest is None else manifest.findings,
    }


def json_number(value: float) -> float | str:
    """Return a number for JSON; as text if JSON cannot express it: `NaN`, `Infinity`, `-Infinity`."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _document(run: api.RunRecord) -> dict[str, object]:
    return {
        "root": run.url,
        "run_id": run.run_id,
        "error": None if run.error is None else str(run.error),
        "steps": [_step_document(record) for record in run.steps],
        "logs": [log_document(log) for log in run.logs],
        "agent": run.agent and asdict(run.agent),
    }


def _step_document(record: api.StepRecord) -> dict[str, object]:
    manifest = record.manifest
    return {
        "step": record.step,
        "status": record.status,
        "error": None if record.error is None else str(record.error),
        "created": manifest and manifest.created,
        "tensors": manifest and manifest.tensors,
        "bytes": manifest and manifest.tensor_bytes,
        "ranks": manifest and manifest.world_size,
        "attempt": manifest and manifest.attempt,
        "epoch": manifest and manifest.epoch,
        "timeline": manifest and manifest.timeline.number,
        "digest": manifest and manifest.digest,
        **health_document(record),
        "metrics": manifest and {name: json_number(value) for name, value in manifest.metrics.items()},
        **attributes(record, "stands_alone", "places", "safety", "tags", "leftovers", "holds_packs_of", "quarantined"),
    }

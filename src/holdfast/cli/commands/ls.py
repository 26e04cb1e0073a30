"""`holdfast ls`: the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, Root
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, attributes, counted, print_result
from holdfast.errors import CorruptError, first_three, printable, shown_bytes

_COLUMNS = (">STEP", "CREATED", ">AGE", ">TENSORS", ">BYTES", ">RANKS", "ATTEMPT")


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
    loadable = [record for record in run.steps if record.committed or record.superseded]
    if loadable:
        now = datetime.now(UTC)
        extra = [(column, shown) for column, shown in _EXTRA if any(map(shown, loadable))]
        if any(record.shares_packs for record in loadable):
            # In every other run each step stands alone.
            extra.insert(0, ("ALONE", _alone))
        rows = [[*_row(record, now), *(shown(record) or "-" for _, shown in extra)] for record in loadable]
        columns = [*_COLUMNS, *(column for column, _ in extra)]
        screen.table(columns, rows, [_style(record) for record in loadable])
    else:
        screen.line("no committed step yet")
    if run.error:
        problem = "is damaged" if isinstance(run.error, CorruptError) else "cannot be read"
        screen.line(f"holdfast.json {problem}: {printable(str(run.error))}", style="red")
    for record in run.steps:
        if record.error:
            screen.line(f"step {record.step}: {printable(str(record.error))}", style="red")
        elif record.fenced:
            screen.line(f"step {record.step}: fenced: a newer writer did not accept it; not loaded", style="yellow")
        elif _status(record) == "removed":
            screen.line(f"step {record.step}: removed; holds packs of steps {first_three(record.holds_packs_of)}")
        elif _status(record) == "unfinished":
            screen.line(f"step {record.step}: unfinished, no manifest (a save is running, or died)", style="yellow")
        elif record.quarantined is not None:
            screen.line(f"step {record.step}: under quarantine: {printable(record.quarantined)}", style="red")
        elif record.leftovers:
            attempts = counted(len(record.leftovers), "unfinished attempt")
            screen.line(f"step {record.step}: holds {attempts} beside the committed one", style="yellow")
        _show_health(screen, record)
    newest = max((record.step for record in loadable if record.committed and not record.quarantined), default=0)
    for log in run.logs[:1]:
        if not log.steps or log.reach < newest:
            continue
        segments = counted(len(log.segments), "segment")
        screen.line(f"{log.base} + log to {log.reach}: {shown_bytes(log.bytes)} in {segments}")
    if run.agent is not None:
        show_agent(screen, run.agent)


def show_agent(screen: Screen, status: api.AgentStatus) -> None:
    """Print the status of the agent of a near tier."""
    since = datetime.fromtimestamp(status.since_unix_seconds, UTC).isoformat()
    state = status.state if status.is_running else f"does not run; was {status.state}"
    age = shown_age(since, datetime.now(UTC))
    screen.line(f"agent of {status.near}: {state} for {age}, process {status.pid}; root {status.root}")
    if status.waiting:
        screen.line(f"the root lacks steps [{first_three(status.waiting)}]", style="yellow")
    if status.error:
        screen.line(f"the last drain failed: {printable(status.error)}", style="red")


def agent_document(status: api.AgentStatus) -> dict[str, object]:
    """Return the status of the agent of a near tier, as JSON."""
    document = attributes(status, "near", "root", "pid", "state", "since_unix_seconds", "error", "is_running")
    return {**document, "waiting": list(status.waiting)}


def log_document(log: api.RunLog) -> dict[str, object]:
    """Return the redo log after a base, as JSON."""
    return {**attributes(log, "id", "base", "reach"), "segments": len(log.segments), "bytes": log.bytes}


def _show_health(screen: Screen, record: api.StepRecord) -> None:
    findings = () if record.manifest is None else record.manifest.findings
    if findings:
        more = f" (and {len(findings) - 1} more, see: holdfast inspect)" if len(findings) > 1 else ""
        screen.line(f"step {record.step}: unhealthy: {printable(findings[0])}{more}", style="yellow")


def _row(record: api.StepRecord, now: datetime) -> list[str]:
    manifest = record.manifest
    if manifest is None:
        return [str(record.step), _problem(record), *["-"] * (len(_COLUMNS) - 2)]
    return [
        record.name,
        shown_time(manifest.created),
        shown_age(manifest.created, now),
        f"{manifest.tensors:,}",
        shown_bytes(manifest.tensor_bytes),
        str(manifest.world_size),
        manifest.attempt,
    ]


def _problem(record: api.StepRecord) -> str:
    """Return in a word why a manifest cannot be read: one of a newer format is as good as it was."""
    return "damaged" if isinstance(record.error, CorruptError) else "unreadable"


def _style(record: api.StepRecord) -> str:
    return "red" if record.error else "dim" if record.superseded else ""


def _timeline(record: api.StepRecord) -> str:
    number = 1 if record.manifest is None else record.manifest.timeline.number
    return f"{number} superseded" if record.superseded else str(number) if number > 1 else ""


def _alone(record: api.StepRecord) -> str:
    return "" if record.stands_alone is None else "yes" if record.stands_alone else "no"


def _health(record: api.StepRecord) -> str:
    healthy = None if record.manifest is None else record.manifest.healthy
    return "" if healthy is None else "healthy" if healthy else "unhealthy"


def _place(record: api.StepRecord) -> str:
    return f"draining {record.drained:.0%}" if record.drained else "+".join(record.places)


_EXTRA: tuple[tuple[str, Callable[[api.StepRecord], str]], ...] = (
    ("IN", _place),
    ("TIMELINE", _timeline),
    ("HEALTH", _health),
    ("METRICS", lambda record: "" if record.manifest is None else shown_metrics(record.manifest.metrics)),
    ("TAGS", lambda record: printable(" ".join(record.tags))),
)
"""Columns that are shown if a step has a value in them."""


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a step, for people: `loss=0.25 accuracy=0.9`."""
    return printable(" ".join(f"{name}={value:.6g}" for name, value in metrics.items()))


def shown_age(created: str, now: datetime) -> str:
    """Return the age of a step, for people: `12 min`; `-` if its time is malformed or in the future."""
    try:
        seconds = (now - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return "-"
    if seconds < 0:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        # Hours up to two days, and so on: "1 h" would be wrong for 90 minutes.
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def shown_time(created: str) -> str:
    """Return the creation time in a manifest, for people."""
    return printable(created.removesuffix("+00:00").replace("T", " ")) + " UTC" * created.endswith("+00:00")


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
        "agent": run.agent and agent_document(run.agent),
    }


def _status(record: api.StepRecord) -> str:
    if record.error:
        return _problem(record)
    if record.fenced:
        return "fenced"
    if record.superseded:
        return "superseded"
    if record.committed:
        return "committed"
    return "removed" if record.holds_packs_of else "unfinished"


def _step_document(record: api.StepRecord) -> dict[str, object]:
    manifest = record.manifest
    return {
        "step": record.step,
        "status": _status(record),
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
        **attributes(record, "stands_alone", "places", "tags", "leftovers", "holds_packs_of", "quarantined"),
    }

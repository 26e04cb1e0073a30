"""The words for a run: the table and the notes that `holdfast ls` and the page share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from holdfast.errors import CorruptError, counted, first_three, printable, shown_bytes
from holdfast.training.runs.listing import RunRecord, StepRecord
from holdfast.training.runs.tiers.agent_files import AgentStatus

_COLUMNS = (">STEP", "CREATED", ">AGE", ">TENSORS", ">BYTES", ">RANKS", "ATTEMPT")

Tone = Literal["", "bad", "warning", "old"]
"""How a row or a note stands out."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The steps of a run that can be loaded, as a table for people, and notes on all steps."""

    columns: tuple[str, ...]
    """Headings. A column after `>` is aligned to the right."""

    rows: tuple[tuple[str, ...], ...]
    """Cells without control characters, one for each column."""

    tones: tuple[Tone, ...]
    """One for each row."""

    names: tuple[str, ...]
    """The name of the step of each row, by which the step is loaded."""

    notes: tuple[tuple[Tone, str], ...]
    """Remarks on the run and its steps, in one line each."""


def step_table(run: RunRecord) -> StepTable:
    """Return the words of `holdfast ls` for a run. Needs no torch.

    Example:
        table = holdfast.api.step_table(holdfast.api.list_steps("run-7"))
        print(table.columns, table.rows[-1], table.notes)
    """
    loadable = [record for record in run.steps if record.committed or record.superseded]
    now = datetime.now(UTC)
    extra = [(column, shown) for column, shown in _EXTRA if any(map(shown, loadable))]
    if any(record.shares_packs for record in loadable):
        # In every other run each step stands alone.
        extra.insert(0, ("ALONE", _alone))
    rows = tuple((*_row(record, now), *(shown(record) or "-" for _, shown in extra)) for record in loadable)
    names = tuple(record.name for record in loadable)
    columns = (*_COLUMNS, *(column for column, _ in extra))
    return StepTable(columns, rows, tuple(map(_tone, loadable)), names, tuple(_run_notes(run, loadable)))


def _row(record: StepRecord, now: datetime) -> list[str]:
    manifest = record.manifest
    if manifest is None:
        return [str(record.step), record.status, *["-"] * (len(_COLUMNS) - 2)]
    size = f"{manifest.tensors:,}", shown_bytes(manifest.tensor_bytes), str(manifest.world_size)
    return [record.name, shown_time(manifest.created), shown_age(manifest.created, now), *size, manifest.attempt]


def _timeline(record: StepRecord) -> str:
    number = 1 if record.manifest is None else record.manifest.timeline.number
    return f"{number} superseded" if record.superseded else str(number) if number > 1 else ""


def _alone(record: StepRecord) -> str:
    return "" if record.stands_alone is None else "yes" if record.stands_alone else "no"


def _health(record: StepRecord) -> str:
    healthy = None if record.manifest is None else record.manifest.healthy
    return "" if healthy is None else "healthy" if healthy else "unhealthy"


def _place(record: StepRecord) -> str:
    return f"draining {record.drained:.0%}" if record.drained else "+".join(record.places)


_EXTRA: tuple[tuple[str, Callable[[StepRecord], str]], ...] = (
    ("IN", _place),
    ("NEAR", lambda record: record.safety),
    ("TIMELINE", _timeline),
    ("HEALTH", _health),
    ("METRICS", lambda record: "" if record.manifest is None else shown_metrics(record.manifest.metrics)),
    ("TAGS", lambda record: printable(" ".join(record.tags))),
)
"""Columns that are shown if a step has a value in them."""


def _notes(record: StepRecord) -> Iterator[tuple[Tone, str]]:
    status = record.status
    if record.error:
        yield "bad", printable(str(record.error))
    elif record.fenced:
        yield "warning", "fenced: a newer writer did not accept it; not loaded"
    elif status == "removed":
        yield "", f"removed; holds packs of steps {first_three(record.holds_packs_of)}"
    elif status == "unfinished":
        yield "warning", "unfinished, no manifest (a save is running, or died)"
    elif record.quarantined is not None:
        yield "bad", f"under quarantine: {printable(record.quarantined)}"
    elif record.leftovers:
        yield "warning", f"holds {counted(len(record.leftovers), 'unfinished attempt')} beside the committed one"
    findings = () if record.manifest is None else record.manifest.findings
    if findings:
        more = f" (and {len(findings) - 1} more, see: holdfast inspect)" if len(findings) > 1 else ""
        yield "warning", f"unhealthy: {printable(findings[0])}{more}"


def _run_notes(run: RunRecord, loadable: Sequence[StepRecord]) -> Iterator[tuple[Tone, str]]:
    if run.error:
        problem = "is damaged" if isinstance(run.error, CorruptError) else "cannot be read"
        yield "bad", f"holdfast.json {problem}: {printable(str(run.error))}"
    for record in run.steps:
        yield from ((tone, f"step {record.step}: {text}") for tone, text in _notes(record))
    newest = max((record.step for record in loadable if record.committed and not record.quarantined), default=0)
    for log in run.logs[:1]:
        if log.steps and log.reach >= newest:
            segments = counted(len(log.segments), "segment")
            yield "", f"{log.base} + log to {log.reach}: {shown_bytes(log.bytes)} in {segments}"


def agent_notes(status: AgentStatus) -> Iterator[tuple[Tone, str]]:
    """Yield remarks on the agent of a near tier, in one line each. Needs no torch.

    Example:
        holdfast.api.agent("nvme/run-8", orphan_seconds=0, linger_seconds=0)
        print(list(holdfast.api.agent_notes(holdfast.api.agent_status("nvme/run-8"))))
    """
    state = status.state if status.is_running else f"does not run; was {status.state}"
    age = shown_age(datetime.fromtimestamp(status.since_unix_seconds, UTC).isoformat())
    limit = f" of {status.seconds:g} s" if status.seconds is not None and status.is_running else ""
    yield "", printable(f"agent of {status.near}: {state} for {age}{limit}, process {status.pid}; root {status.root}")
    if status.waiting:
        yield "warning", f"the root lacks steps [{first_three(status.waiting)}]"
    if status.error:
        yield "bad", f"the agent could not read the root, or drain: {printable(status.error)}"


def _tone(record: StepRecord) -> Tone:
    return "bad" if record.error else "old" if record.superseded else ""


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a step, for people: `loss=0.25 accuracy=0.9`."""
    return printable(" ".join(f"{name}={value:.6g}" for name, value in metrics.items()))


def shown_age(created: str, now: datetime | None = None) -> str:
    """Return the age of a step, for people: `12 min`; `-` if its time is malformed or in the future.

    Example:
        print(holdfast.api.shown_age("2026-01-01T00:00:00+00:00"))
    Args:
        created: The time of creation in a manifest.
        now: The time that counts as now; None for the clock.
    """
    try:
        seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(created)).total_seconds()
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
    """Return the creation time in a manifest, for people.

    Example:
        print(holdfast.api.shown_time("2026-01-01T00:00:00+00:00"))
    """
    return printable(created.removesuffix("+00:00").replace("T", " ")) + " UTC" * created.endswith("+00:00")

"""Trains, kills and resumes under Holdfast and under the framework's own checkpointing: one row for each kill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.integrations.kills import PHASES
from tests.integrations.world import Job, Kill, Outcome, bytes_in, copy_of, run

STEPS, EVERY, KILLED_SAVE = 6, 2, 2
"""Saves are due at steps 2, 4 and 6; the second is killed."""

RANKS_AFTER = (1, 3)
"""Other numbers of ranks on which a killed training goes on."""

_SHARES = dict(zip(PHASES, (0.02, 0.35, 0.7, 0.95, 1.0), strict=True))
"""How much of the second save lies in the folder when the framework's own is killed, for each phase of ours."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kill, and what resuming came to."""

    keeper: str
    phase: str
    killed: str
    """`one` or `all`."""

    resumed_from: int | None
    """Step of the resume; None: it began anew, or failed."""

    is_identical: bool
    """Whether all tensors and losses are those of the training that nobody killed."""

    error: str = ""
    """Of the resume."""


@dataclass(frozen=True, slots=True)
class References:
    """Trainings that nobody kills."""

    whole: Outcome
    first_save_bytes: int
    second_save_bytes: int


class Table:
    """All rows of one framework.

    Args:
        framework: Its name.
        scratch: A folder of its own; removed parts are made anew.
    """

    def __init__(self, framework: str, scratch: Path) -> None:
        self._framework, self._scratch = framework, scratch
        self._number = 0

    def rows(self, keeper: str, phases: tuple[str, ...]) -> Iterator[Row]:
        """Yield one row after the other."""
        reference = self._reference(keeper)
        for phase in phases:
            for killed in ("one", "all"):
                yield self._row(keeper, phase, killed, reference)

    def on_other_ranks(self) -> dict[str, object]:
        """Kill all ranks, go on with another number of ranks, and compare what was loaded with what two ranks load."""
        folder = self._folder("other-ranks")
        ended = self._run(self._job("holdfast", folder), kill=Kill((0, 1), "voting", KILLED_SAVE))
        assert ended.killed, f"no rank came to be killed: {ended.error or 'it ended'}"
        whole = self._run(self._job("holdfast", copy_of(folder, folder.with_name("on-2")), steps=EVERY), resume=True)
        assert not whole.error, whole.error
        found: dict[str, object] = {"resumed_from": whole.resumed_from}
        for ranks in RANKS_AFTER:
            copy = copy_of(folder, folder.with_name(f"on-{ranks}"))
            outcome = self._run(self._job("holdfast", copy, steps=EVERY, ranks=ranks), resume=True)
            found[f"resumed_on_{ranks}_from"] = None if outcome.error else outcome.resumed_from
            found[f"equal_on_{ranks}"] = not outcome.error and _digests(outcome) == _digests(whole)
            if outcome.error:
                found[f"error_on_{ranks}"] = outcome.error
        return found

    def _reference(self, keeper: str) -> References:
        outcomes, sizes = [], []
        for steps in (EVERY, 2 * EVERY, STEPS):
            folder = self._folder(f"{keeper}-reference-{steps}")
            outcomes.append(self._run(self._job(keeper, folder, steps=steps)))
            assert not outcomes[-1].error, f"{keeper}: a training that nobody kills failed: {outcomes[-1].error}"
            sizes.append(bytes_in(folder))
        return References(outcomes[-1], sizes[0], sizes[1] - sizes[0])

    def _row(self, keeper: str, phase: str, killed: str, reference: References) -> Row:
        folder = self._folder(f"{keeper}-{phase}-{killed}")
        ranks = (1,) if killed == "one" else (0, 1)
        if keeper == "holdfast":
            # The rank that voted last publishes: either may be the one.
            armed = (0, 1) if phase in ("publishing", "after") else ranks
            kill = Kill(armed, phase, KILLED_SAVE, takes_all=killed == "all")
        else:
            share = round(_SHARES[phase] * reference.second_save_bytes)
            kill = Kill(ranks, "bytes", folder_bytes=reference.first_save_bytes + max(1, share))
        ended = self._run(self._job(keeper, folder), kill=kill)
        if not ended.killed:
            return Row(keeper, phase, killed, None, False, f"no rank came to be killed: {ended.error or 'it ended'}")
        outcome = self._run(self._job(keeper, folder), resume=True)
        if outcome.error:
            return Row(keeper, phase, killed, None, False, outcome.error)
        resumed_from = outcome.resumed_from
        steps = STEPS - (resumed_from or 0)
        is_identical = _digests(outcome) == _digests(reference.whole) and losses_agree(outcome, reference.whole, steps)
        return Row(keeper, phase, killed, resumed_from, is_identical)

    def _job(self, keeper: str, folder: Path, *, steps: int = STEPS, ranks: int = 2) -> Job:
        return Job(self._framework, folder, keeper, steps, EVERY, ranks)

    def _run(self, job: Job, *, resume: bool = False, kill: Kill | None = None) -> Outcome:
        self._number += 1
        return run(replace(job, resume=resume, kill=kill), self._scratch / "logs" / f"{self._number:03d}")

    def _folder(self, name: str) -> Path:
        folder = self._scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def is_well(row: Row) -> bool:
    """Whether a row is what Holdfast promises: the last committed save, and bit for bit what would have been."""
    committed = KILLED_SAVE if row.phase == "after" else KILLED_SAVE - 1
    return not row.error and row.is_identical and row.resumed_from == committed * EVERY


def are_well(found: Mapping[str, object]) -> bool:
    """Whether a killed training went on from its last save on every other number of ranks, with equal tensors."""
    return found["resumed_from"] == (KILLED_SAVE - 1) * EVERY and all(
        found[f"resumed_on_{ranks}_from"] == found["resumed_from"] and found[f"equal_on_{ranks}"] is True
        for ranks in RANKS_AFTER
    )


def as_markdown(rows: list[dict[str, object]]) -> str:
    """Return the rows as a table."""
    lines = ["| checkpointing | killed in | ranks | resumes from | identical | |", "|-|-|-|-|-|-|"]
    for row in (Row(**each) for each in rows):  # type: ignore[arg-type]
        start = "anew" if row.resumed_from is None and not row.error else (row.resumed_from or "fails")
        error = row.error.replace("|", "/").replace("\n", " ")[:120]
        lines.append(
            f"| {row.keeper} | {row.phase} | {row.killed} | {start} | {'yes' if row.is_identical else 'no'} | {error} |"
        )
    return "\n".join(lines)


def to_json(row: Row) -> dict[str, object]:
    """Return a row as a JSON document."""
    return asdict(row)


def _digests(outcome: Outcome) -> dict[int, object]:
    every = [result["digests"] for _, result in sorted(outcome.results.items())]
    assert every, "no rank left a result"
    # Whole tensors are the same on all ranks.
    assert all(digests == every[0] for digests in every), "ranks left different tensors"
    return {0: every[0]}


def losses_agree(outcome: Outcome, whole: Outcome, steps: int) -> bool:
    """Whether each rank trained so many steps, and lost in them what the training lost that nobody killed."""
    for rank, result in outcome.results.items():
        losses, known = result["losses"], whole.results[rank]["losses"]
        assert isinstance(losses, list) and isinstance(known, list)
        if len(losses) != steps or losses != known[len(known) - steps :]:
            return False
    return True

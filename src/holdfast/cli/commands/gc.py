"""`holdfast gc`: removes steps that no retention rule keeps."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from holdfast import api, policies
from holdfast.cli.arguments import AsJson, Grace, Root, SingleWriter, say_grace, settings_with
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import InvalidError, counted, printable, shown_bytes

_COLUMNS = (">STEP", "STAYS BECAUSE")


def gc(
    root: Root,
    keep_last: Annotated[int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N steps.")] = None,
    keep_every: Annotated[
        str | None,
        typer.Option("--keep-every", metavar="N[:closest]", help="Keep steps divisible by N, or closest to multiples."),
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option("--keep-best", metavar="N:METRIC[:max]", help="Keep the N steps of the lowest (highest) METRIC."),
    ] = None,
    keep_per: Annotated[
        Literal["hour", "day"] | None, typer.Option("--keep-per", help="Keep the newest step of each hour or day.")
    ] = None,
    grace: Grace = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> None:
    """Remove the steps of a run that no rule keeps, and files of dead saves. Without a rule every step stays.

    The newest valid step, tagged steps and steps with readers always stay. So do packs that a kept step refers to.
    The command is refused while a job writes to the run; a job with keep= removes steps itself. An interruption leaves
    every step complete or gone; run the same command again.
    """
    with ended_well():
        policy = _policy(keep_last, keep_every, keep_best or [], keep_per)
        if not dry_run and not as_json:
            say_grace(grace)
        settings = settings_with(single_writer=single_writer)
        report = api.collect(root, keep=policy, dry_run=dry_run, grace_seconds=grace, settings=settings)
        print_result(report, partial(_show, dry_run), partial(_document, dry_run), as_json=as_json)


def _policy(
    last: int | None, every: str | None, best: list[str], per: Literal["hour", "day"] | None
) -> policies.KeepPolicy | None:
    rules: list[policies.KeepPolicy] = []
    if last is not None:
        rules.append(policies.LatestN(last))
    if every is not None:
        number, _, closest = every.partition(":")
        if not number.isdecimal() or closest not in ("", "closest"):
            raise InvalidError(f"--keep-every {every!r}; expected N or N:closest, as in 1000 or 1000:closest")
        rules.append(policies.EveryNth(int(number), closest=closest == "closest"))
    rules += map(_best, best)
    if per is not None:
        rules.append(policies.NewestPer(per))
    return policies.AnyOf(*rules, policies.Tagged()) if rules else None


def _best(text: str) -> policies.KeepPolicy:
    number, _, rest = text.partition(":")
    metric, _, mode = rest.partition(":")
    if not number.isdecimal() or not metric or mode not in ("", "min", "max"):
        raise InvalidError(f"--keep-best {text!r}; expected N:METRIC or N:METRIC:max, as in 3:loss or 1:accuracy:max")
    return policies.BestN(int(number), metric, "max" if mode == "max" else "min")


def _show(dry_run: bool, screen: Screen, report: api.CollectReport) -> None:
    if report.reasons:
        screen.table(_COLUMNS, [[str(step), printable(", ".join(why))] for step, why in report.reasons.items()])
    verb = "would be removed" if dry_run else "removed"
    names = [*map(str, report.steps), *report.superseded]
    steps = f"steps {', '.join(names)}" if names else "no step"
    uploads = f"; {counted(report.uploads, 'unfinished upload')}" if report.uploads else ""
    screen.line(f"{verb}: {steps}; {report.files} files, {shown_bytes(report.bytes)}{uploads}")


def _document(dry_run: bool, report: api.CollectReport) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "kept": {str(step): why for step, why in report.reasons.items()},
        "removed": attributes(report, "steps", "superseded", "files", "bytes", "uploads"),
    }

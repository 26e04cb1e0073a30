"""`holdfast alerts`: the findings that a person should look at, in one or more runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson
from holdfast.cli.exit_status import DAMAGED, ended_well
from holdfast.cli.screen import Screen, print_result
from holdfast.errors import CheckpointError, printable


def alerts(
    roots: Annotated[list[str], typer.Argument(metavar="ROOT…", help="Folders of runs.")],
    events: Annotated[
        list[str] | None, typer.Option("--events", metavar="FILE", help="Lines of observers.jsonl.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the alerts of runs: stalled, slow, failing, damaged and others. The exit status is 1 if there are any."""
    found, failure = list[tuple[str, api.Alert]](), None
    with ended_well():
        try:
            for root in roots:
                found += [(root, alert) for alert in api.alerts(root, events=events or ())]
        except CheckpointError as error:
            failure = error
        if found or failure is None:
            print_result(
                found, _show, lambda found: [{"root": root, **asdict(alert)} for root, alert in found], as_json=as_json
            )
        if failure is not None:
            raise failure
    if found:
        raise typer.Exit(DAMAGED)


def _show(screen: Screen, found: list[tuple[str, api.Alert]]) -> None:
    for root, alert in found:
        places = ("step", alert.step), ("rank", alert.rank), ("host", alert.host or None)
        where = "".join(f", {name} {value}" for name, value in places if value is not None)
        screen.line(printable(f"{root}: {alert.rule}{where}: {alert.text}"), style="red")
        screen.line(printable(f"    {alert.act}"), style="dim")
    if not found:
        screen.line("no alerts", style="green")

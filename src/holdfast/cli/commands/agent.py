"""`holdfast agent`: watches a near tier, and drains the tier when the job is dead."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import AsJson, Near, ToRoot
from holdfast.cli.commands.ls import shown_age
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, attributes, print_result
from holdfast.errors import first_three, printable


def agent(
    near: Near,
    to: ToRoot = None,
    orphan_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time without a job after which the steps are drained.")
    ] = 300.0,
    linger_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time after the drain for which the near tier stays.")
    ] = 1800.0,
    status: Annotated[bool, typer.Option("--status", help="Only print the state of the agent that runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a near tier; if its job is killed and no other comes, copy the due steps and the newest one to the root.

    A job with Tier(agent=True) starts an agent. SIGTERM ends the watch.
    """
    with ended_well():
        if status:
            print_result(api.agent_status(near), _show, _document, as_json=as_json)
        else:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
            api.agent(near, to, orphan_seconds=orphan_seconds, linger_seconds=linger_seconds)


def _show(screen: Screen, status: api.AgentStatus) -> None:
    since = datetime.fromtimestamp(status.since_unix_seconds, UTC).isoformat()
    state = status.state if status.is_running else f"does not run; was {status.state}"
    age = shown_age(since, datetime.now(UTC))
    screen.line(f"agent of {status.near}: {state} for {age}, process {status.pid}; root {status.root}")
    if status.waiting:
        screen.line(f"the root lacks steps [{first_three(status.waiting)}]", style="yellow")
    if status.error:
        screen.line(f"the last drain failed: {printable(status.error)}", style="red")


def _document(status: api.AgentStatus) -> dict[str, object]:
    document = attributes(status, "near", "root", "pid", "state", "since_unix_seconds", "error", "is_running")
    return {**document, "waiting": list(status.waiting)}

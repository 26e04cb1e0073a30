"""`holdfast agent`: watches a near tier, and drains the tier when the job is dead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from holdfast import api, policies
from holdfast.cli.arguments import AsJson, Near, ToRoot
from holdfast.cli.commands.ls import STYLES
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, print_result
from holdfast.errors import shown_bytes


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
        if status and near.startswith(policies.PEERS_SCHEME):
            print_result(api.nodes_status(near), _show_nodes, lambda nodes: [*map(asdict, nodes)], as_json=as_json)
        elif status:
            print_result(api.agent_status(near), _show, asdict, as_json=as_json)
        else:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
            api.agent(near, to, orphan_seconds=orphan_seconds, linger_seconds=linger_seconds)


def _show(screen: Screen, status: api.AgentStatus) -> None:
    for tone, text in api.agent_notes(status):
        screen.line(text, style=STYLES[tone])


def _show_nodes(screen: Screen, nodes: Sequence[api.NodeStatus]) -> None:
    columns = ("NODE", "DOMAIN", "GROUP", "KEEPER", "AGENT", "STATE", ">PACKS", ">PARITY")
    rows = [
        (
            node.node,
            node.domain,
            str(node.group) if node.group >= 0 else "former",
            "yes" if node.keeper else "-",
            node.address,
            node.state,
            shown_bytes(node.packs_bytes),
            shown_bytes(node.parity_bytes),
        )
        for node in nodes
    ]
    screen.table(columns, rows, [STYLES["bad" if node.error else ""] for node in nodes])
    for node in nodes:
        if node.error:
            screen.line(f"{node.node}: {node.error}", style=STYLES["bad"])

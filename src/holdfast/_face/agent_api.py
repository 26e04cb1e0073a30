"""The agent of a near tier: the public functions, and the entry of its process."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from holdfast._face import wiring
from holdfast.backends.stores.shelf import is_in_memory
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.engine.child_python import command_of, settings_in
from holdfast.errors import InvalidError, MissingError
from holdfast.policies import PEERS_SCHEME, Tier
from holdfast.settings import Settings
from holdfast.stored.peers.roster import ROSTER_FILE
from holdfast.stored.repository.catalog import read_run_id
from holdfast.training.runs.tiers.agent import Agent, Patience, run_agent
from holdfast.training.runs.tiers.agent_files import AgentStatus, NodeStatus, read_status
from holdfast.training.runs.tiers.offline_drain import NearDrain

_LOWEST_PRIORITY, _SERVING_PRIORITY = 19, 10
"""Training goes first. Other nodes wait for an agent that serves: it gets a tenth of a busy processor."""


def agent(
    near: str,
    root: wiring.Path | None = None,
    *,
    orphan_seconds: float = 300.0,
    linger_seconds: float = 1800.0,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> None:
    """Watch a near tier in this process; if no job comes back, drain as `drain` does. Returns at the end of the watch.

    `CheckpointManager(root, near=holdfast.Tier(…, agent=True))` starts such a process. SIGTERM ends it: at once while a
    job lives, else after a drain.

    Example:
        holdfast.api.agent("nvme/run-8", orphan_seconds=0, linger_seconds=0)
    Args:
        near: The folder of the near tier.
        root: The root; None for the one that the near tier names.
        orphan_seconds: Seconds without a job after which the steps are drained.
        linger_seconds: Seconds after the drain for which the near tier stays.
        settings: How to reach storage.
    Raises:
        MissingError: The folder is no near tier.
        InvalidError: The root is of another run, or the near tier is of peers.
        ConflictError: Another process watches it.
    """
    for name, value in (("orphan_seconds", orphan_seconds), ("linger_seconds", linger_seconds)):
        if not 0 <= value < float("inf"):
            raise InvalidError(f"agent({name}={value!r}): expected seconds, 0 or more")
    if near.startswith(PEERS_SCHEME) or os.path.exists(os.path.join(os.path.expanduser(near), ROSTER_FILE)):
        raise InvalidError(
            f"{near}: is a near tier of peers, or the folder of a node; expected a folder that all ranks see. "
            "The job starts the agents of its nodes. To look: holdfast agent peers://… --status. To bring steps to the "
            "root: holdfast drain peers://…"
        )
    run, clock = wiring.two_roots(near, root, settings), SystemClock()
    if read_run_id(run.near) is None:
        raise MissingError(f"{near}: no near tier of a run; expected a folder that holds holdfast.json")
    drain = NearDrain(run, clock, wiring.codecs())
    patience = Patience(orphan_seconds, linger_seconds)
    is_memory = is_in_memory(run.near.url)
    run_agent(run.near.url, Agent(drain, clock, settings.lease_seconds, patience, is_memory=is_memory))


def agent_status(near: str) -> AgentStatus:
    """Return the last state of the agent of a near tier, and whether the agent runs.

    Example:
        holdfast.api.agent("nvme/run-8", orphan_seconds=0, linger_seconds=0)
        print(holdfast.api.agent_status("nvme/run-8").state)
    Args:
        near: The folder of the near tier.
    Raises:
        MissingError: There was none.
    """
    path = os.path.realpath(os.path.expanduser(near))
    status = read_status(path)
    if status is None:
        raise MissingError(f"{path}: no agent has watched this folder; expected agent.json. Start one: holdfast agent")
    return status


def nodes_status(near: str, settings: Settings = wiring.DEFAULT_SETTINGS) -> tuple[NodeStatus, ...]:
    """Return the nodes of a near tier of peers: their groups, their agents, and what each holds.

    Example:
        with holdfast.CheckpointManager("run-9", near=holdfast.Tier("peers://nodes", every=1)):
            for node in holdfast.api.nodes_status("peers://nodes"):
                print(node.node, node.group, node.state, node.packs_bytes)
    Args:
        near: The near tier, as the job named it.
        settings: How to reach storage.
    Raises:
        MissingError: This host has no folder of a node.
    """
    from holdfast._face.peers import status

    return status.nodes_status(near, settings)


def agent_command(tier: Tier, near: str, root: Store, settings: Settings) -> Sequence[str]:
    """Return the command that a job starts its agent by.

    Raises:
        InvalidError: Another process cannot open the root.
    """
    if not wiring.is_named_by_url(root):
        raise InvalidError(
            f"Tier({near!r}, agent=True): no other process can open the root {root.url}; expected a path or a URL, or "
            "agent=False"
        )
    request = {
        "near": near,
        "root": root.url,
        "orphan_seconds": tier.orphan_seconds,
        "linger_seconds": tier.linger_seconds,
        "settings": asdict(settings),
    }
    return [*command_of("holdfast._face.agent_api:main"), json.dumps(request)]


def main() -> int:
    """Run the agent that a job has started: of a near tier, or of one node of peers."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    request = json.loads(sys.argv[2])
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _SERVING_PRIORITY if "node" in request else _LOWEST_PRIORITY)
    try:
        if "node" in request:
            from holdfast._face.peers.agent import NodeAgent

            root = wiring.store_at(request["root"], settings_in(request["settings"]))
            NodeAgent(request, root, wiring.codecs()).run()
            return 0
        agent(request.pop("near"), request.pop("root"), settings=settings_in(request.pop("settings")), **request)
    except MissingError as gone:  # The job was so short that its end came first.
        logging.getLogger("holdfast").info("the agent ends: %s", gone)
    except Exception as error:  # noqa: BLE001 - the log of the agent has it
        logging.getLogger("holdfast").error("the agent ends: %s: %s", type(error).__name__, error)
        return 1
    return 0

"""The process of the agent of one node of peers: serves the folder, makes parity, and drains if the job is dead."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from holdfast._face.near_folder import near_folder_at
from holdfast._face.peers.nodes import SECRET_BYTES, credentials_of, peer_at, read_secret, store_of
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.shelf import is_in_memory
from holdfast.base.clock import SystemClock
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.store import Store
from holdfast.base.wire.framing import Protection
from holdfast.core.engine.child_python import settings_in
from holdfast.errors import InvalidError, UnavailableError
from holdfast.stored.peers.parity_files import protect
from holdfast.stored.peers.roster import Roster, read_roster
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.tiers.agent import Agent, Patience, hurried_by_signals
from holdfast.training.runs.tiers.agent_files import (
    SERVING_FILE,
    NodeWatch,
    Serving,
    agent_lock,
    has_job_file,
    has_job_lock,
)
from holdfast.training.runs.tiers.offline_drain import NearDrain

_NODES_PER_POLL = 8
"""Each agent asks the keepers whether a job lives: the more nodes there are, the more seldom."""

_POLL_SECONDS = 0.1


class NodeAgent:
    """The agent of one node."""

    def __init__(self, request: dict[str, Any], root: Store, codecs: Codecs) -> None:
        """Do no I/O.

        Args:
            request: Made by `place.py`.
            root: The root of the run.
            codecs: Decode coded chunks.
        """
        self._root, self._codecs = root, codecs
        self._request, self._settings = request, settings_in(request["settings"])
        self._clock, self._node = SystemClock(), str(request["node"])
        self._folder = near_folder_at(request["folder"], self._settings)
        self._secret = read_secret(self._folder.url)

    def run(self) -> None:
        """Serve until no job needs the folder any more."""
        with agent_lock(self._folder.url):
            credentials = credentials_of(self._request["root"], self._secret, self._node)
            host, port = self._request["host"], self._request["port"]
            try:
                if not self._secret:
                    raise InvalidError(
                        f"{self._folder.url}: no secret of the run; expected a secret of {SECRET_BYTES} bytes. Nothing "
                        "is served. The next job puts one there"
                    )
                server = PeerServer(self._folder, credentials, host, port, protect=self._protect)
            except InvalidError as error:
                self._note(Serving(os.getpid(), error=str(error)))
                raise
            try:
                self._note(Serving(os.getpid(), *server.address))
                self._watch()
            finally:
                server.close()

    def _note(self, serving: Serving) -> None:
        self._folder.put(SERVING_FILE, json.dumps(asdict(serving)).encode(), durable=False)

    def _watch(self) -> None:
        """Watch as the agent of any near tier does, under the newest roster of the folder."""
        came, seen, ended = self._clock.monotonic_seconds(), None, None
        near: Store | None = None
        while True:
            roster, is_job_here = read_roster(self._folder), has_job_lock(self._folder.url)
            if not is_job_here and ended is not None and roster in (None, ended):
                return  # The watch has ended, and no job has come since.
            if roster != seen:
                came, seen = self._clock.monotonic_seconds(), roster
                near = None if roster is None else self._near_of(roster)
            if near is None or not (is_job_here or has_job_file(near)):
                if not is_job_here and self._clock.monotonic_seconds() - came > self._request["orphan_seconds"]:
                    return
                # The job that has started this process, or put the roster, comes.
                self._clock.sleep(_POLL_SECONDS * _polls_every(roster))
                continue
            assert roster is not None, "the nodes are those of a roster"
            agent = self._agent_of(roster, near)
            with hurried_by_signals(agent):
                agent.run()
            if agent.is_hurried:
                return
            ended = roster

    def _near_of(self, roster: Roster) -> Store:
        return store_of(self._request["url"], roster, self._node, {self._node: self._folder}, self._secret)

    def _agent_of(self, roster: Roster, near: Store) -> Agent:
        return Agent(
            NearDrain(TwoRoots(near, self._root), self._clock, self._codecs),
            self._clock,
            self._settings.lease_seconds,
            Patience(self._request["orphan_seconds"], self._request["linger_seconds"]),
            is_memory=is_in_memory(self._folder.url),
            node=NodeWatch(
                self._folder,
                lambda: read_roster(self._folder) == roster,
                lambda: has_job_lock(self._folder.url),
                _polls_every(roster),
            ),
        )

    def _protect(self, wanted: Protection) -> int:
        roster = read_roster(self._folder)
        if roster is None:
            raise UnavailableError(f"node {self._node}: the folder has no roster yet; retry")
        if self._node not in wanted.packs:
            raise InvalidError(
                f"node {self._node}: not in the group {[*wanted.packs]}; expected a group with this node"
            )
        group = {name: self._store_of(roster, name) for name in wanted.packs}
        return protect(group, self._node, wanted.attempt, wanted.packs, wanted.bytes_per_second)

    def _store_of(self, roster: Roster, name: str) -> Store:
        if name == self._node:
            return self._folder
        member = next((each for each in roster.members if each.name == name), None)
        if member is None:
            raise InvalidError(f"node {name}: not in the roster; expected one of {[e.name for e in roster.members]}")
        return peer_at(member, roster.run, self._secret)


def _polls_every(roster: Roster | None) -> int:
    return 1 + (0 if roster is None else len(roster.members)) // _NODES_PER_POLL

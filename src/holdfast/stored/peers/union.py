"""The folders of all nodes of a job as one store: the near tier of a run in the memory of its nodes.

A rank writes packs into the folder of the rank's node. A small object goes to the keepers, and is stored once two
keepers have the object, or the only one. A read of a small object asks the keepers, then all other nodes. A read of a
pack asks the own folder, then the node that has the pack. A pack of a lost node is read as the XOR of ranges that the
other nodes of the group hold (`parity_files.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TypeVar

from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.ranges import check_ranges
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, StoreEntry
from holdfast.base.ports.store import Store, Upload
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.names import PARITY_FOLDER
from holdfast.core.plan.keepers import quorum
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    InvalidError,
    MissingError,
    UnavailableError,
    first_three,
)
from holdfast.stored.peers.hedging import HedgedNode, MeasuredNode, Paces, rebuild_runs
from holdfast.stored.peers.keeping import put_on_keepers
from holdfast.stored.peers.parity_files import (
    AttemptPlaces,
    PackLostError,
    ParityTable,
    attempt_of,
    is_pack,
    packs_at,
    parity_keys,
    read_table,
    rebuild_into,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_SILENT = (UnavailableError, InvalidError)
"""Answers that say nothing of an object: none came, or the agent there is of another run or node."""


class _TakerError(Exception):
    """The caller of a read could not take a range."""


class PeerStore(Store):
    """The folders of all nodes. Any thread may make any call."""

    def __init__(
        self,
        url: str,
        nodes: Mapping[str, Store],
        own: str,
        keepers: Sequence[str],
        former: Collection[str] = frozenset(),
        clock: Clock | None = None,
    ) -> None:
        """Do no I/O.

        Args:
            url: Names the store for people.
            nodes: The folder of each node of the roster, by name.
            own: The node of this rank.
            keepers: Nodes that hold the small objects, in the order in which they are asked.
            former: Nodes that are no part of the job: they may hold steps of earlier jobs, and may be gone for good.
            clock: Measures how fast nodes answer; None: that of the machine.
        """
        self.url, self._nodes, self._own, self._keepers, self._former = url, nodes, nodes[own], keepers, former
        self._forgotten, self._is_rebuilt = set[str](), False
        # An agent may carry out a call after the caller has given the call up.
        self.traits = replace(self._own.traits, maps_files=False, failed_calls_are_over=False, has_parity=True)
        self._attempts: dict[str, AttemptPlaces] = {}
        """Attempts whose packs were looked for on other nodes: the packs of a committed attempt never move."""
        self._told: set[str] = set()
        self._paces = Paces(url, clock or SystemClock())
        # The own folder is as fast as memory, which is no measure for a node.
        self._sources = {own: self._own} | {
            name: MeasuredNode(store, name, self._paces) for name, store in nodes.items() if name != own
        }
        self.read_bytes = self._paces.read_bytes
        self.rebuilt = copy(self)
        self.rebuilt.url, self.rebuilt._is_rebuilt = f"parity of {url}", True

    def forget_former(self) -> bool:
        """Ask nodes that are no part of the job no more: a newer step is on the nodes of the job.

        Returns:
            Whether there were any.
        """
        former, self._former = self._former, frozenset[str]()
        self._forgotten.update(former)  # The store that reads through parity has this set too.
        return bool(former)

    # ------------------------------------------------------------------------------------------------- reads

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return self._first(key, lambda store: store.size(key), lambda found: found.bytes_of(key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        return self._first(key, lambda store: store.get(key, bytes_max), None)

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object; of a pack of a lost node, through parity."""
        given = 0

        def hand_on(number: int, view: memoryview) -> None:
            nonlocal given
            given = number + 1
            if on_range is not None:
                try:
                    on_range(number, view)
                except Exception as error:  # No answer of a node, so no other node is asked.
                    raise _TakerError from error

        def taker_from(first: int) -> OnRange | None:
            return None if on_range is None else lambda number, view: hand_on(first + number, view)

        def read(store: Store) -> None:
            first = given  # An earlier node may have died in between.
            store.read_into(key, ranges[first:], buffers[first:], taker_from(first))
            if store is self._own and is_pack(key):
                self._paces.count("own node", sum(stop - start for start, stop in ranges[first:]))

        def rebuild(found: AttemptPlaces) -> None:
            check_ranges(f"{self.url}/{key}", found.bytes_of(key), ranges, buffers)
            first, group = given, found.group_of(key)
            assert group is not None, "only a pack in a table is rebuilt"
            writer = group.table.nodes[group.number]

            def fill(wanted: ByteRanges, memory: memoryview) -> memoryview:
                rebuild_runs(partial(rebuild_into, self._sources, found, key), wanted, memory)
                if not self._is_rebuilt:
                    self._tell(writer, None)
                self._paces.count(f"parity of node {writer}", sum(stop - start for start, stop in wanted))
                return memory

            self._paces.read_by_windows(ranges[first:], buffers[first:], taker_from(first), fill)

        try:
            self._first(key, read, rebuild)
        except _TakerError as error:
            assert error.__cause__ is not None, "raised from an error"
            raise error.__cause__ from None

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read the bytes of a pack that the memory of the own node has; 0 of any other object."""
        if is_pack(key):
            with suppress(MissingError):
                return self._paces.count("own node", self._own.get_cached(key, start, buffers, on_bytes))
        return super().get_cached(key, start, buffers)

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders under a prefix, on any node that answers."""
        self.require_prefix(prefix)
        found = {name for names in self._of_all(lambda store: store.folders(prefix)) for name in names}
        return sorted(found if prefix else found - {PARITY_FOLDER[:-1]})

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix, on any node that answers. A lost pack is not listed."""
        self.require_prefix(prefix)
        listings = self._of_all(lambda store: [*store.list(prefix, after=after, up_to=up_to)])
        found = {entry.key: entry for entries in listings for entry in entries}
        return (found[key] for key in sorted(found) if prefix or not key.startswith(PARITY_FOLDER))

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share."""
        return self._first(key, lambda store: f"{store.url} {store.identity(key)}", None)

    def free_bytes(self) -> int | None:
        """Return the free space of the own node."""
        return self._own.free_bytes()

    # ------------------------------------------------------------------------------------------------ writes

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin a pack in the folder of the own node, or a small object."""
        if not is_pack(key):
            return super().upload(key, bytes_max, part_bytes)
        return self._own.upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole on the keepers, replacing an older one."""
        self.require_key(key)
        self._on_keepers(key, data, lambda store: store.put(key, data, durable=durable))

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object whole on the keepers, unless the first of them that answers has another one.

        Raises:
            ConflictError: Another object is there; nothing was stored.
            UnavailableError: Too few keepers answered, or a later keeper has another object: it may be stored or not.
        """
        self.require_key(key)
        self._on_keepers(key, data, lambda store: store.put_if_absent(key, data))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects from each node that answers, and the parity of each attempt that loses a pack."""
        listed = [*keys]
        if not listed:
            return
        for key in listed:
            self.require_key(key)
        packs = {key for key in listed if is_pack(key)}
        small, attempts = [key for key in listed if key not in packs], {attempt_of(key) or "" for key in packs}
        for attempt in attempts:
            self._attempts.pop(attempt, None)

        def remove(store: Store) -> None:
            # A pack is on one node of many, and an object of an earlier job may be on any.
            here = packs & {key for attempt in attempts for key in packs_at(store, attempt)}
            store.delete([*small, *here, *(key for attempt in attempts for key in parity_keys(attempt))])

        answers = self._answers(self._nodes, remove)
        self._require_enough(answers, "may still have objects that were removed")

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key, on each node that has the object and answers."""

        def moved(store: Store) -> bool:
            with suppress(MissingError):
                store.move(key, new_key)
                return True
            return False

        answers = self._answers(self._nodes, moved)
        self._require_enough(answers, f"may still have {key}")
        if not any(answer is True for answer in answers.values()):
            raise MissingError(f"{self.url}/{key}: no such object on any node")

    def sync(self, prefix: str) -> None:
        """Make durable the names of packs in a folder of the own node. A small object is durable on its keepers."""
        self.require_prefix(prefix)
        if any(self._own.list(prefix)):
            self._own.sync(prefix)

    # ------------------------------------------------------------------------------------------------ inside

    def _first(
        self, key: str, call: Callable[[Store], _Result], rebuild: Callable[[AttemptPlaces], _Result] | None
    ) -> _Result:
        """Return the answer of the first node that has an object; of a lost pack that of `rebuild`."""
        self.require_key(key)
        if is_pack(key):
            return self._of_pack(key, call, rebuild)
        silent, failure = set[str](), None
        for name in self._keepers:
            try:
                return call(self._nodes[name])
            except MissingError:
                continue
            except (CorruptError, InvalidError) as error:
                failure = error
            except UnavailableError as error:
                silent.add(name)
                self._tell(name, error)
        if failure is not None:
            raise failure
        others = {name: store for name, store in self._nodes.items() if name not in self._keepers}
        # An object of an earlier job lies on the keepers of that job.
        for name, answer in self._answers(others, lambda store: store.size(key)).items():
            if isinstance(answer, int):
                return call(self._nodes[name])
        if self._are_too_few(silent):
            raise UnavailableError(
                f"{self.url}/{key}: keepers {sorted(silent)} do not answer; expected {quorum(len(self._keepers))} of "
                f"{len(self._keepers)}. Start their agents again, or read from the root"
            )
        raise MissingError(f"{self.url}/{key}: no such object on any node")

    def _of_pack(
        self, key: str, call: Callable[[Store], _Result], rebuild: Callable[[AttemptPlaces], _Result] | None
    ) -> _Result:
        with suppress(MissingError):
            if not self._is_rebuilt:
                return call(self._own)
        for found in self._looks(attempt_of(key) or ""):
            failure = None
            reads: list[Callable[[AttemptPlaces], _Result]] = []
            if key in found.holders and not self._is_rebuilt:
                reads.append(partial(self._at, call, key))
            if rebuild is not None and found.group_of(key) is not None:
                reads.append(rebuild)
            for read in reads:
                try:
                    return read(found)
                except MissingError:
                    continue  # The step was collected since the look.
                except UnavailableError as error:
                    failure = error
        silent, why = sorted({*found.silent} - {*self._former}), failure or "no parity has the pack"
        if silent or not isinstance(failure, PackLostError | None):
            raise UnavailableError(
                f"{self.url}/{key}: cannot be read, and nodes {silent} do not answer; expected an answer or parity. "
                f"Start the agents there again, or read from the root: {why}"
            )
        # Nodes that are no part of the job are lost.
        raise MissingError(f"{self.url}/{key}: no node of the job has such a pack: {why}") from failure

    def _at(self, call: Callable[[Store], _Result], key: str, found: AttemptPlaces) -> _Result:
        name, group = found.holders[key], found.group_of(key)
        rebuild = None if group is None else partial(rebuild_into, self._sources, found)
        return call(HedgedNode(self._nodes[name], name, self._paces, rebuild))

    def _looks(self, attempt: str) -> Iterator[AttemptPlaces]:
        """Yield the places of packs as known, then as they are now: a node may be lost in between."""
        if (known := self._attempts.get(attempt)) is not None:
            yield known
        yield self.places_of(attempt)

    def places_of(self, attempt: str) -> AttemptPlaces:
        """Return where the packs and the parity of an attempt are now."""

        def look(store: Store) -> tuple[dict[str, int], ParityTable | None]:
            table = None
            try:
                table = read_table(store, attempt)
            except MissingError:
                pass
            except CorruptError as error:
                self._tell(store.url, error)
            return packs_at(store, attempt), table

        holders, tables, silent = dict[str, str](), dict[str, ParityTable](), list[str]()
        for name, answer in self._answers(self._nodes, look).items():
            if isinstance(answer, CheckpointError):
                silent.append(name)
                continue
            holders |= dict.fromkeys(answer[0], name)
            if answer[1] is not None:
                tables[name] = answer[1]
        found = self._attempts[attempt] = AttemptPlaces(holders, tables, silent)
        return found

    def _on_keepers(self, key: str, data: bytes, put: Callable[[Store], None]) -> None:
        keepers = {name: self._nodes[name] for name in self._keepers}
        put_on_keepers(f"{self.url}/{key}", key, data, keepers, put, self._answers)

    def _of_all(self, call: Callable[[Store], _Result]) -> Sequence[_Result]:
        """Return the answers of the nodes that answer, of which enough are keepers to know of each small object."""
        answers = self._answers(self._nodes, call)
        self._require_enough(answers, "may have objects that no other node has")
        return [answer for answer in answers.values() if not isinstance(answer, CheckpointError)]

    def _answers(
        self, nodes: Mapping[str, Store], call: Callable[[Store], _Result]
    ) -> dict[str, _Result | CheckpointError]:
        """Return the answer of each node; for one that does not answer, the error."""

        def ask(name: str) -> _Result | CheckpointError:
            try:
                return call(nodes[name])
            except MissingError as error:
                return error
            except _SILENT as error:
                self._tell(name, error)
                return error

        nodes = {name: store for name, store in nodes.items() if name not in self._forgotten}
        return dict(zip(nodes, ordered_parallel_map(ask, nodes), strict=True))

    def _are_too_few(self, silent: set[str]) -> bool:
        """Return whether too few keepers have answered to know of each small object."""
        return len({*self._keepers} - silent) < quorum(len(self._keepers))

    def _require_enough(self, answers: Mapping[str, object], consequence: str) -> None:
        """Require that enough keepers have answered. Another node may be lost for good.

        If a node comes back, the root's list says which of its manifests count; a collection removes the rest.
        """
        silent = [name for name, answer in answers.items() if isinstance(answer, _SILENT)]
        if self._are_too_few({*silent}):
            raise UnavailableError(
                f"{self.url}: nodes [{first_three(silent)}] do not answer, and {consequence}; expected an "
                f"answer. Start their agents again: {answers[silent[0]]}"
            )

    def _tell(self, name: str, error: CheckpointError | None) -> None:
        """Tell once of a node that does not answer, or whose packs are read through parity."""
        if name not in self._told:
            self._told.add(name)
            why = "is lost: its packs are read through the parity of its group" if error is None else f"silent: {error}"
            logger.warning("%s: node %s %s", self.url, name, why)

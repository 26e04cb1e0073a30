"""The parity that a node keeps for the other nodes of its group, as files in the folder of the node.

For each attempt there are two objects:

    parity/step-000000000020.09275fada9082aba/table.json   names of the nodes of the group; packs and bytes of each
    parity/step-000000000020.09275fada9082aba/xor          XOR of one segment of each other node

The table is put last: a node without a table protects none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import msgspec

from holdfast.base.clock import SystemClock
from holdfast.base.ports.readable import Buffers, OnRange
from holdfast.base.ports.store import Store
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.format.names import PARITY_FOLDER, is_attempt_folder, is_pack_name, step_of_folder
from holdfast.core.format.sealed_json import decode_sealed, header, sealed
from holdfast.core.plan.parity import PackStream, ParityInput, Stripe, xor_into
from holdfast.errors import CheckpointError, CorruptError, MissingError, UnavailableError, first_three
from holdfast.settings import KIB, MIB

PARITY_FILE = "xor"
WINDOW_BYTES = 8 * MIB
"""Bytes that are read, and held, at a time."""

_PIECE_BYTES = 512 * KIB
"""Bytes of a window that are taken at a time: they stay in the processor's cache."""

_TABLE_BYTES_MAX = 64 * MIB
_KIND = "parity"
_CLOCK = SystemClock()


class ParityTable(msgspec.Struct, frozen=True, dict=True):
    """The group of one node in one attempt."""

    number: int
    """The number of the node that keeps the table."""

    nodes: tuple[str, ...]
    """Names of the nodes of the group, by number."""

    packs: tuple[dict[str, int], ...]
    """Bytes of the packs of each node, by key from the root of the run."""

    @cached_property
    def stripe(self) -> Stripe:
        """The streams of the group."""
        return Stripe(tuple(map(PackStream.of, self.packs)))


def attempt_of(key: str) -> str | None:
    """Return the prefix of the attempt that a key belongs to, with the trailing slash; None for any other key."""
    step, attempt, *rest = key.split("/", 2) if key.count("/") > 1 else ("", "")
    return f"{step}/{attempt}/" if rest and step_of_folder(step) is not None and is_attempt_folder(attempt) else None


def is_pack(key: str) -> bool:
    """Return whether a key is that of a pack."""
    attempt = attempt_of(key)
    return attempt is not None and is_pack_name(key.removeprefix(attempt))


def parity_keys(attempt: str) -> tuple[str, str]:
    """Return the keys of the table and the parity of an attempt.

    Args:
        attempt: The prefix of the attempt.
    """
    folder = f"{PARITY_FOLDER}{attempt[:-1].replace('/', '.')}/"
    return f"{folder}table.json", folder + PARITY_FILE


def packs_at(node: Store, attempt: str) -> dict[str, int]:
    """Return the bytes of the packs of an attempt in the folder of one node, by key."""
    found = node.list(attempt)
    return {entry.key: entry.bytes for entry in found if is_pack_name(entry.key.removeprefix(attempt))}


def _whole_bytes(
    group: Mapping[str, Store], own: str, attempt: str, packs: Mapping[str, Mapping[str, int]]
) -> int | None:
    """Return the bytes of the parity that a node has of some packs; None if it is not whole."""
    with suppress(MissingError, CorruptError):
        table = read_table(group[own], attempt)
        if table.nodes == tuple(group) and table.nodes[table.number] == own:
            has_all = all(
                packs[name].items() <= of_node.items() for name, of_node in zip(group, table.packs, strict=True)
            )
            total_bytes = table.stripe.parity_bytes(table.number)
            if has_all and (not total_bytes or group[own].size(parity_keys(attempt)[1]) == total_bytes):
                return total_bytes
    return None


def _listed(name: str, store: Store, attempt: str, packs: Mapping[str, int]) -> dict[str, int]:
    """Return all packs of a node in an attempt, of which some must be there."""
    listed = packs_at(store, attempt)
    if lacking := packs.items() - listed.items():
        raise UnavailableError(
            f"{store.url}/{attempt}: node {name} lacks {len(lacking)} of {len(packs)} packs, or has another size: "
            f"{first_three(sorted(key for key, _ in lacking))}. Expected all. The step stays without parity; the next "
            "one gets parity"
        )
    return listed


def protect(
    group: Mapping[str, Store],
    own: str,
    attempt: str,
    packs: Mapping[str, Mapping[str, int]],
    bytes_per_second: float | None = None,
    pause: Callable[[float], None] = _CLOCK.sleep,
) -> int:
    """Keep the parity of an attempt for the other nodes of a group; return its bytes. Each node of the group does this.

    Parity that is whole already stays: a node that was lost since has no packs to make the parity from again. Parity of
    other attempts goes if no pack of theirs is left: a removal may have ended half way, or before the parity was made.

    Args:
        group: The folders of the nodes, by name, in the order that all of them use.
        own: The name of this node.
        attempt: The prefix of the attempt, whose manifest is published.
        packs: Packs of each node of the group that must be protected, with their bytes.
        bytes_per_second: Most bytes that are read a second; None for as many as there come.
        pause: Waits for some seconds after each read of a window.
    Raises:
        UnavailableError: A node does not answer or has other packs, or this node has no room. Older parity stays.
    """
    nodes, stores = tuple(group), [*group.values()]
    keys = _, xor_key = parity_keys(attempt)
    _drop_orphans(group, own, attempt)
    if (kept_bytes := _whole_bytes(group, own, attempt, packs)) is not None:
        return kept_bytes
    listed = [_listed(name, store, attempt, packs[name]) for name, store in group.items()]
    # All packs that are there, not only those that are asked for: a later step may refer to the others.
    table = ParityTable(nodes.index(own), nodes, tuple(listed))
    total_bytes, pulls = table.stripe.parity_bytes(table.number), table.stripe.pulls(table.number)
    group[own].delete(keys)  # An earlier call may have died in between.

    def read(part: ParityInput, buffers: Buffers, on_range: OnRange | None) -> None:
        assert part.key is not None, "parity is of packs"
        stores[part.member].read_into(part.key, _ranges_of(part, buffers), buffers, on_range)
        if bytes_per_second is not None:
            pause((part.stop - part.start) / bytes_per_second)

    if total_bytes:
        upload = group[own].upload(xor_key, total_bytes, WINDOW_BYTES, folders_durable=False)
        memory = allocate_aligned(min(total_bytes, WINDOW_BYTES))
        try:
            for start, part in xor_windows(
                pulls, total_bytes, lambda start, stop: upload.room(start, stop - start) or memory[: stop - start], read
            ):
                upload.write(start, part)
            upload.complete()
        except BaseException:
            upload.abort()
            raise
    fields = {"number": table.number, "nodes": [*nodes], "packs": [*table.packs]}
    group[own].put(keys[0], sealed({**header(_KIND), **fields}))
    return total_bytes


def _drop_orphans(group: Mapping[str, Store], own: str, but: str) -> None:
    for name in group[own].folders(PARITY_FOLDER):
        attempt = name.replace(".", "/", 1) + "/"
        with suppress(CheckpointError):  # Parity stays while a node is silent, or the table is damaged.
            if attempt != but and attempt_of(f"{attempt}table") == attempt and _is_orphan(group, own, attempt):
                group[own].delete(parity_keys(attempt))


def _is_orphan(group: Mapping[str, Store], own: str, attempt: str) -> bool:
    """Return whether parity of a node helps no read any more."""
    if packs_at(group[own], attempt):
        return False
    try:
        table = read_table(group[own], attempt)
    except MissingError:
        return True
    # With one writer, the parity may be all that is left of a lost node.
    writers = sum(any(packs.values()) for packs in table.packs)
    return writers > 1 and not any(name not in group or packs_at(group[name], attempt) for name in table.nodes)


def xor_windows(
    inputs: Sequence[ParityInput],
    total_bytes: int,
    room: Callable[[int, int], memoryview],
    read: Callable[[ParityInput, Buffers, OnRange | None], None],
) -> Iterator[tuple[int, memoryview]]:
    """Fill memory with the XOR of some ranges, a window at a time; yield start and memory of each window.

    Args:
        inputs: The ranges, each with a place in the whole.
        total_bytes: Bytes of the whole.
        room: Returns memory for the bytes from a start to a stop.
        read: Reads one range into consecutive buffers; hands each over before the next one is filled.
    """
    scratch = allocate_aligned(_PIECE_BYTES)[:_PIECE_BYTES]
    for start in range(0, total_bytes, WINDOW_BYTES):
        stop = min(start + WINDOW_BYTES, total_bytes)
        window, filled = room(start, stop), 0
        for each in inputs:
            first, last = max(each.at, start) - start, min(each.at + each.stop - each.start, stop) - start
            if first >= last:
                continue
            begin = each.start + start + first - each.at
            part = replace(each, start=begin, stop=begin + last - first, at=first)
            if first >= filled:  # No other range was there: neither zeros nor XOR.
                window[filled:first] = bytes(first - filled)
                read(part, [window[first:last]], None)
            else:
                window[filled:last] = bytes(max(last - filled, 0))
                pieces = [scratch[: last - at] for at in range(first, last, _PIECE_BYTES)]
                read(part, pieces, partial(_xor_piece, window, first))
            filled = max(filled, last)
        window[filled:] = bytes(stop - start - filled)
        yield start, window


def _xor_piece(window: memoryview, first: int, number: int, piece: memoryview) -> None:
    xor_into(window, first + number * _PIECE_BYTES, piece)


def _ranges_of(part: ParityInput, buffers: Buffers) -> list[tuple[int, int]]:
    return [*pairwise(accumulate(map(len, buffers), initial=part.start))]


def read_table(node: Store, attempt: str) -> ParityTable:
    """Return the table of an attempt in the folder of one node.

    Raises:
        MissingError: The node keeps no parity of the attempt.
        CorruptError: The table is damaged.
    """
    key = parity_keys(attempt)[0]
    where = f"{node.url}/{key}"
    table, _ = decode_sealed(node.get(key, _TABLE_BYTES_MAX), _KIND, ParityTable, where)
    if not 0 <= table.number < len(table.nodes) == len(table.packs):
        raise CorruptError(
            f"{where}: node {table.number} of {len(table.nodes)}, packs of {len(table.packs)}; expected one"
        )
    return table


class PackLostError(UnavailableError):
    """A pack cannot be rebuilt from the packs and the parity that there are."""


@dataclass(frozen=True, slots=True)
class PackGroup:
    """The group of the node that wrote a pack."""

    table: ParityTable
    """A table of the group."""

    number: int
    """The number of the node that wrote the pack."""

    nodes: Mapping[int, str]
    """By number, the nodes that have parity of the group."""


@dataclass(frozen=True)
class AttemptPlaces:
    """Where the packs of an attempt are."""

    holders: Mapping[str, str]
    """The node of each pack that is there."""

    tables: Mapping[str, ParityTable]
    """The table of each node that keeps parity."""

    silent: Sequence[str]
    """Nodes that did not answer."""

    def group_of(self, key: str) -> PackGroup | None:
        """Return the group of the node that wrote a pack; None if no table names the pack."""
        return self._groups.get(key)

    @cached_property
    def _groups(self) -> Mapping[str, PackGroup]:
        groups: dict[str, PackGroup] = {}
        for table in self.tables.values():
            if any(key not in groups for packs in table.packs for key in packs):
                kept = ((name, self.tables.get(name)) for name in table.nodes)
                same = {each.number: name for name, each in kept if each is not None and each.packs == table.packs}
                for number, packs in enumerate(table.packs):
                    groups |= dict.fromkeys(packs, PackGroup(table, number, same))
        return groups

    def bytes_of(self, key: str) -> int:
        """Return the bytes of a pack that a table names.

        Raises:
            PackLostError: The pack cannot be rebuilt, so no caller needs the bytes.
        """
        group, _ = self.inputs_of(key, 0, 0)
        pack_bytes = group.table.packs[group.number][key]
        self.inputs_of(key, 0, pack_bytes)
        return pack_bytes

    def inputs_of(self, key: str, start: int, stop: int) -> tuple[PackGroup, Sequence[ParityInput]]:
        """Return the group of a pack that a table names, and the ranges whose XOR is a range of the pack.

        Raises:
            PackLostError: A second node of the group is lost, or another one has no parity.
        """
        group = self.group_of(key)
        assert group is not None, "only a pack in a table is rebuilt"
        packs_of = enumerate(group.table.packs)
        lost = [at for at, packs in packs_of if any(packs[each] for each in packs if each not in self.holders)]
        try:
            inputs = group.table.stripe.rebuild(group.number, key, start, stop, lost)
        except UnavailableError as error:
            raise PackLostError(str(error)) from error
        if absent := {each.member for each in inputs if each.key is None} - group.nodes.keys():
            raise PackLostError(
                f"{key}: nodes {sorted(group.table.nodes[each] for each in absent)} have no parity of the pack; "
                "expected parity on each other node of the group. Read the step from the root"
            )
        return group, inputs


def rebuild_into(
    nodes: Mapping[str, Store], found: AttemptPlaces, key: str, start: int, stop: int, buffer: memoryview
) -> None:
    """Fill a buffer with a range of a pack, from the other nodes of the writer's group.

    Args:
        nodes: The folders of the nodes, by name.
        found: Where the packs of the attempt are; a table names the pack.
        key, start, stop: The range of the pack.
        buffer: Memory for the range.
    Raises:
        UnavailableError: A second node of the group is lost, has no parity or does not answer.
        CorruptError: The range is not within the pack.
    """
    group, inputs = found.inputs_of(key, start, stop)

    def read(part: ParityInput, buffers: Buffers, on_range: OnRange | None) -> None:
        at = parity_keys(attempt_of(key) or "")[1] if part.key is None else part.key
        node = group.nodes[part.member] if part.key is None else found.holders[at]
        try:
            nodes[node].read_into(at, _ranges_of(part, buffers), buffers, on_range)
        except MissingError as error:  # Not the pack that is asked for.
            raise UnavailableError(f"{key}: cannot be rebuilt: {error}") from error

    target = buffer.cast("B") if buffer.nbytes else buffer
    for _ in xor_windows(inputs, stop - start, lambda first, last: target[first:last], read):
        pass

"""The parity that a node keeps for the other nodes of its group, as files in the folder of the node.

For each attempt there are two objects:

    parity/step-000000000020.09275fada9082aba/table.json   names of the nodes of the group; packs and bytes of each
    parity/step-000000000020.09275fada9082aba/xor          XOR of one segment of each other node

The table is put last: a node without a table protects none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import msgspec

from holdfast.base.ports.store import Store
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.core.format.names import is_attempt_folder, is_pack_name, step_of_folder
from holdfast.core.plan.parity import PackStream, ParityInput, Stripe, xor_into
from holdfast.errors import CorruptError
from holdfast.settings import MIB

PARITY_FOLDER, PARITY_FILE = "parity/", "xor"
WINDOW_BYTES = 8 * MIB
"""Bytes that are read, and held, at a time."""

_TABLE_BYTES_MAX = 64 * MIB


class ParityTable(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
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


def protect(group: Mapping[str, Store], own: str, attempt: str) -> int:
    """Keep the parity of an attempt for the other nodes of a group; return its bytes. Each node of the group does this.

    Args:
        group: The folders of the nodes, by name, in the order that all of them use. Packs of the attempt are complete.
        own: The name of this node.
        attempt: The prefix of the attempt.
    Raises:
        UnavailableError: A node does not answer, or this node has no room.
        MissingError: A node lacks a pack that the node has listed.
    """
    nodes, stores = tuple(group), [*group.values()]
    table = ParityTable(nodes.index(own), nodes, tuple(packs_at(each, attempt) for each in stores))
    total_bytes, pulls = table.stripe.parity_bytes(table.number), table.stripe.pulls(table.number)
    keys = table_key, xor_key = parity_keys(attempt)
    group[own].delete(keys)  # An earlier call may have died in between.

    def read(pull: ParityInput, part: memoryview) -> None:
        assert pull.key is not None, "parity is of packs"
        stores[pull.member].read_into(pull.key, [(pull.start, pull.stop)], [part])

    if total_bytes:
        upload = group[own].upload(xor_key, total_bytes, WINDOW_BYTES, folders_durable=False)
        memory = allocate_aligned(min(total_bytes, WINDOW_BYTES))
        try:
            for start, part in xor_windows(pulls, total_bytes, memory, read):
                upload.write(start, part)
            upload.complete()
        except BaseException:
            upload.abort()
            raise
    group[own].put(table_key, msgspec.json.encode(table))
    return total_bytes


def xor_windows(
    inputs: Sequence[ParityInput],
    total_bytes: int,
    memory: memoryview,
    read: Callable[[ParityInput, memoryview], None],
) -> Iterator[tuple[int, memoryview]]:
    """Yield the XOR of some ranges a window at a time: start and bytes, which are valid until the next window.

    Args:
        inputs: The ranges, each with a place in the whole.
        total_bytes: Bytes of the whole.
        memory: Memory for a window.
        read: Reads one range into memory of its length.
    """
    scratch = allocate_aligned(memory.nbytes)
    for start in range(0, total_bytes, memory.nbytes):
        stop = min(start + memory.nbytes, total_bytes)
        window = memory[: stop - start]
        window[:] = bytes(window.nbytes)
        for each in inputs:
            first, last = max(each.at, start), min(each.at + each.stop - each.start, stop)
            if first < last:
                begin, part = each.start + first - each.at, scratch[: last - first]
                read(replace(each, start=begin, stop=begin + last - first, at=first - start), part)
                xor_into(window, first - start, part)
        yield start, window


def read_table(node: Store, attempt: str) -> ParityTable:
    """Return the table of an attempt in the folder of one node.

    Raises:
        MissingError: The node keeps no parity of the attempt.
        CorruptError: The table is damaged.
    """
    key = parity_keys(attempt)[0]
    data = node.get(key, _TABLE_BYTES_MAX)
    try:
        table = msgspec.json.decode(data, type=ParityTable)
        if not 0 <= table.number < len(table.nodes) == len(table.packs):
            raise ValueError("the numbers of nodes differ")
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{node.url}/{key}: {error}; expected a table of parity. Read the step from the root"
        ) from error
    return table

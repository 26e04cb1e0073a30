"""One pass through a pack in file order: windows are filled, and hashed in the same pass or in a later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.ports.framework import Source
from holdfast.repository.digest import digest_of, new_digest
from holdfast.spec.chunking import chunk_count, chunk_range
from holdfast.spec.plan import PackPlan


class Windows(Protocol):
    """The stream of one pack, cut into windows."""

    def room(self) -> memoryview:
        """Return the rest of the current window, never empty."""
        ...

    def advance(self, count: int) -> None:
        """Count bytes of `room` that are done with."""
        ...


def stream(
    header: bytes,
    pack: PackPlan,
    windows: Windows,
    chunk_bytes: int,
    sources: Sequence[Source] | None,
    *,
    digesting: bool,
) -> tuple[bytes, ...]:
    """Go through a pack in file order once; return the chunk digests of each item if they are asked for.

    Args:
        header, pack: The pack.
        windows: Where its bytes go, or where they are.
        chunk_bytes: What one digest is of.
        sources: What fills the windows; None if they are filled already.
        digesting: Whether chunks are hashed, each as soon as it is copied and still in the processor's cache. The
            digest is always of the copy, never of memory that training may change.
    """
    at = 0
    while at < len(header):
        room = windows.room()
        count = min(len(header) - at, len(room))
        if sources is not None:
            room[:count] = header[at : at + count]
        windows.advance(count)
        at += count
    found: list[bytes] = []
    for item in pack.items:
        digests: list[bytes] = []
        source = None if sources is None else sources[item.shard_number]
        for number in range(chunk_count(item.bytes, chunk_bytes)):
            start, stop = chunk_range(item.bytes, chunk_bytes, number)
            chunk = windows.room()[: stop - start]
            if len(chunk) == stop - start:
                if source is not None:
                    source.copy_into(item.region, start, stop, chunk).wait()
                if digesting:
                    digests.append(digest_of(chunk))
                windows.advance(stop - start)
                continue
            # Windows begin on whole pages, so that no element is cut in two.
            state = new_digest()
            while start < stop:
                part = windows.room()[: stop - start]
                if source is not None:
                    source.copy_into(item.region, start, start + len(part), part).wait()
                if digesting:
                    state.update(part)
                windows.advance(len(part))
                start += len(part)
            digests.append(state.digest())
        found.append(b"".join(digests))
    return tuple(found)

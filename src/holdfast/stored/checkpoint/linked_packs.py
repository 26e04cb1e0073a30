"""Packs of other steps: each is read at its own place in the run, or by its link in the folder of the step."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from holdfast.base.ports.forwarding import ForwardingReadable
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, Readable
from holdfast.errors import InvalidError, MissingError

_Result = TypeVar("_Result")


class LinkedPack(ForwardingReadable):
    """The root of a run, in which one pack is also found by its link: the step it is in may be gone or unreadable.

    Every call looks anew, so a pack that is removed during a load is read to its end.
    """

    def __init__(self, root: Readable, links: Readable, link_key: str) -> None:
        """Do no I/O.

        Args:
            root: The root of the run.
            links: The store of the step that refers to the pack.
            link_key: Key of the link there.
        """
        super().__init__(root)
        self.traits = replace(
            root.traits,
            read_alignment=max(root.traits.read_alignment, links.traits.read_alignment),
            maps_files=root.traits.maps_files and links.traits.maps_files,
        )
        self._links, self._link_key = links, link_key

    def size(self, key: str) -> int:
        """Return the bytes of the pack."""
        return self._at_either(key, lambda files, at: files.size(at))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return the pack whole."""
        return self._at_either(key, lambda files, at: files.get(at, bytes_max))

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of the pack."""
        self._at_either(key, lambda files, at: files.read_into(at, ranges, buffers, on_range))

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read the bytes of the pack that are in memory already."""
        return self._at_either(key, lambda files, at: files.get_cached(at, start, buffers, on_bytes))

    def _at_either(self, key: str, call: Callable[[Readable, str], _Result]) -> _Result:
        try:
            return call(self._inner, key)
        except (MissingError, InvalidError) as error:
            # Invalid: this user may not read the folder of the other step, or a symbolic link took its place.
            try:
                return call(self._links, self._link_key)
            except MissingError:
                raise error from None

    def mapped(self, key: str) -> mmap.mmap | None:
        """Map all bytes of the pack."""
        return self._at_either(key, lambda files, at: files.mapped(at))

"""A pack that is sent from where it lies in memory, so that nothing is copied first."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.buffers import QUARANTINED
from holdfast.engine.stream import Scratch, chunk_digests, copy_together_into
from holdfast.errors import InvalidError
from holdfast.geometry.chunking import TINY_BYTES_MAX
from holdfast.ports.framework import Source
from holdfast.ports.store import Upload
from holdfast.types.plan import PackItem, PackPlan


class LentMemory:
    """One pack as it lies in memory: large pieces where their sources have them, the rest copied, in file order.

    Its windows are pieces of memory. What lies in memory of the state may be changed by another thread, so it is hashed
    again once it has been sent.
    """

    @classmethod
    def of(cls, header: bytes, pack: PackPlan, sources: Sequence[Source]) -> LentMemory | None:
        """Return a pack, with copies of its small pieces; None if most of it would have to be copied.

        Args:
            header, pack: The pack.
            sources: Where the bytes come from, by shard number.
        """
        memories = [
            sources[item.shard_number].memory(item.region) if item.bytes > TINY_BYTES_MAX else None
            for item in pack.items
        ]
        if 2 * sum(memory.nbytes for memory in memories if memory is not None) <= pack.data_bytes:
            return None
        return cls(header, pack, memories, sources)

    def __init__(
        self, header: bytes, pack: PackPlan, memories: Sequence[memoryview | None], sources: Sequence[Source]
    ) -> None:
        """Copy what is not lent."""
        self.parts: list[memoryview] = []
        """All bytes of the pack."""
        self._lent: list[tuple[int, memoryview]] = []
        """Number and bytes of each piece that is not copied."""
        self._items = pack.items
        before, copied = header, list[PackItem]()
        for number, memory in enumerate(memories):
            if memory is None:
                copied.append(pack.items[number])
                continue
            self._add_copies(before, copied, sources)
            before, copied = b"", []
            self.parts.append(memory)
            self._lent.append((number, memory))
        self._add_copies(before, copied, sources)
        self._number = self._used = 0

    def _add_copies(self, before: bytes, items: Sequence[PackItem], sources: Sequence[Source]) -> None:
        items = [item for item in items if item.bytes]
        if not before and not items:
            return
        memory = memoryview(bytearray(len(before) + sum(item.bytes for item in items)))
        memory[: len(before)] = before
        if items:
            try:
                copy_together_into(items, memory[len(before) :], sources).wait()
            except BaseException:
                QUARANTINED.append(memory)  # A device may still be copying into it.
                raise
        self.parts.append(memory)

    def room(self) -> memoryview:
        """Return the rest of the current piece of memory."""
        return self.parts[self._number][self._used :]

    def advance(self, count: int) -> None:
        """Go on behind the first bytes of `room`."""
        self._used += count
        if self._used == len(self.parts[self._number]):
            self._number, self._used = self._number + 1, 0

    def require_unchanged(self, digests: Sequence[bytes], chunk_bytes: int) -> None:
        """Require that the pieces which were not copied are still those that were hashed.

        Args:
            digests: What `stream` returned for the pack.
            chunk_bytes: As for `stream`.
        Raises:
            InvalidError: Another thread or process has changed one.
        """
        for number, memory in self._lent:
            item = self._items[number]
            if b"".join(chunk_digests(item, Scratch(memory), chunk_bytes, None, None)) != digests[number]:
                raise InvalidError(
                    f"{item.tensor.fqn}: changed while it was saved; expected no change before save() returns. Nothing "
                    "was committed. Let no other thread or process write to it meanwhile, or save with async_save and "
                    "staging='copy', which copies it first"
                )

    def forget(self) -> None:
        """Refer to no memory any more."""
        self.parts.clear()
        self._lent.clear()


class LentUpload:
    """An upload out of the memory of a state. What was sent must be what was hashed."""

    def __init__(self, inner: Upload, memory: LentMemory, digests: Sequence[bytes], chunk_bytes: int) -> None:
        self._inner, self._memory, self._digests, self._chunk_bytes = inner, memory, digests, chunk_bytes

    def complete(self, total_bytes: int | None = None) -> None:
        """Send the pack, and require that what was sent is what was hashed."""
        self._inner.complete(total_bytes)
        self._memory.require_unchanged(self._digests, self._chunk_bytes)
        self._memory.forget()

    def abort(self) -> None:
        """End the upload, and refer to no memory any more."""
        self._inner.abort()
        self._memory.forget()

"""The stack, the memo and the plain values of the machine that reads pickles.

Opcodes that every tensor needs are methods without further calls: a checkpoint of a hundred thousand tensors has
millions of them.
"""

from __future__ import annotations

import codecs

from holdfast.backends.foreign.pickles.objects import UnsupportedPickle

_PROTOCOL_MAX = 5
CONTAINERS_MAX = 8 << 20
"""Most containers and objects of one pickle, and most memo entries. 300,000 tensors need a fraction of it."""

_MARKS_MAX = 100_000
"""Most open marks. Each is a level of nesting."""

_INT_BYTES_MAX = 8192
_DIGITS_MAX = 4300


class PickleStack:
    """The position, the stack and the memo of one pickle."""

    def __init__(self, data: bytes) -> None:
        """Start at the first byte."""
        self.data = data
        self.at = 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        """The stack below each open mark."""
        self.memo: dict[int, object] = {}
        self._containers_left = CONTAINERS_MAX

    # -- bytes

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start = self.at
        stop = self.at = start + count
        if stop > len(self.data):
            raise ValueError(f"{count} bytes are stated, {len(self.data) - start} are left")
        return self.data[start:stop]

    def number(self, width: int) -> int:
        """Return the next unsigned number of some bytes."""
        return int.from_bytes(self.take(width), "little")

    def signed(self, width: int) -> int:
        """Return the next signed number of some bytes."""
        return int.from_bytes(self.take(width), "little", signed=True)

    def line(self) -> bytes:
        """Return the rest of the line."""
        stop = self.data.find(b"\n", self.at)
        if stop < 0:
            raise ValueError("a line without an end")
        line = self.data[self.at : stop]
        self.at = stop + 1
        return line

    # -- stack

    def push_container(self, value: object) -> None:
        """Push a container or an object, and count it."""
        self.count_container()
        self.stack.append(value)

    def count_container(self) -> None:
        """Count a container or an object that is about to be made, and refuse the first one over the limit."""
        self._containers_left -= 1
        if self._containers_left < 0:
            raise UnsupportedPickle(f"over {CONTAINERS_MAX} containers and objects; use tensors or several files")

    def mark(self) -> None:
        """Open a mark."""
        if len(self.below) >= _MARKS_MAX:
            raise ValueError(f"over {_MARKS_MAX} open marks")
        self.below.append(self.stack)
        self.stack = []

    def marked(self) -> list[object]:
        """Pop all values above the last mark, and the mark."""
        if not self.below:
            raise ValueError("it returns to a mark that it has not set")
        items = self.stack
        self.stack = self.below.pop()
        return items

    def pop(self) -> None:
        """Pop the top, which may be a mark."""
        if self.stack:
            self.stack.pop()
        else:
            self.marked()

    # -- memo

    def remember(self, index: int) -> None:
        """Store the top in the memo under an index."""
        # Picklers number memo entries from 0, so a larger index is damage.
        if not 0 <= index <= len(self.data):
            raise ValueError(f"memo index {index}; expected less than the bytes of the pickle")
        if len(self.memo) >= CONTAINERS_MAX:
            raise UnsupportedPickle(f"over {CONTAINERS_MAX} memo entries; save them as tensors or in several files")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push a value of the memo."""
        if index not in self.memo:
            raise ValueError(f"memo index {index}, which it has not set")
        self.stack.append(self.memo[index])

    def short_put(self) -> None:
        """Store the top under an index of one byte."""
        self.memo[self.data[self.at]] = self.stack[-1]
        self.at += 1

    def short_get(self) -> None:
        """Recall by an index of one byte."""
        self.recall(self.data[self.at])
        self.at += 1

    # -- values

    def proto(self) -> None:
        """Read the version of the protocol."""
        version = self.number(1)
        if version > _PROTOCOL_MAX:
            raise UnsupportedPickle(f"pickle protocol {version}; expected {_PROTOCOL_MAX} at most")

    def frame(self) -> None:
        """Read the length of a frame, which has no effect on the value."""
        length = self.number(8)
        if length > len(self.data) - self.at:
            raise ValueError(f"a frame of {length} bytes, {len(self.data) - self.at} are left")

    def integer_text(self) -> None:
        """Push an integer in decimal, or a bool."""
        line = self.line()
        self.stack.append(line == b"01" if line in (b"00", b"01") else decimal(line))

    def byte(self) -> None:
        """Push an integer of one byte."""
        self.stack.append(self.data[self.at])
        self.at += 1

    def long(self, width: int) -> None:
        """Push an integer whose length is stated in `width` bytes."""
        count = self.number(width)
        if count > _INT_BYTES_MAX:
            raise ValueError(f"an integer of {count} bytes; expected {_INT_BYTES_MAX} at most")
        self.stack.append(self.signed(count))

    def string_text(self) -> None:
        """Push text or bytes of Python 2, stored as a literal."""
        line = self.line().strip()
        if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":
            raise ValueError("text without quotes")
        content, _ = codecs.escape_decode(line[1:-1])
        self.stack.append(_old_text(content))

    def push_string(self, width: int) -> None:
        """Push text or bytes of Python 2 whose length is stated in `width` bytes."""
        self.stack.append(_old_text(self.take(self.number(width))))

    def push_unicode(self, width: int) -> None:
        """Push text whose length is stated in `width` bytes."""
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def push_tuple(self, count: int) -> None:
        """Replace the top values by a tuple of them."""
        if count > len(self.stack):
            raise IndexError
        self.count_container()
        self.stack[-count:] = [tuple(self.stack[-count:])]


def decimal(line: bytes) -> int:
    """Return an integer in decimal."""
    text = line.strip()
    if len(text) > _DIGITS_MAX:
        raise ValueError(f"an integer of {len(text)} digits; expected {_DIGITS_MAX} at most")
    return int(text)


def _old_text(content: bytes) -> str | bytes:
    """Return text of Python 2, which had one type for text and bytes: text if it is ASCII, else bytes."""
    return content.decode("ascii") if content.isascii() else content

"""The plain half of the machine that reads pickles: bytes, stack, memo, and values that are no containers.

Codes of which every tensor takes several are spelled out: a checkpoint of a hundred thousand has millions of them.
"""

from __future__ import annotations

import codecs
import struct

from holdfast.foreign.pickles.objects import UnsupportedPickle

_PROTOCOL_MAX = 5
CONTAINERS_MAX = 8 << 20
"""Containers and objects of one pickle, and what it keeps to recall: several times what 300,000 tensors take."""

_MARKS_MAX = 100_000
"""Open at a time; each is a level of nesting."""

_INT_BYTES_MAX = 8192
_DIGITS_MAX = 4300
_DOUBLE = struct.Struct(">d")


class PickleStack:
    """Where the reading of one pickle stands."""

    def __init__(self, data: bytes) -> None:
        """Begin at the first byte."""
        self.data = data
        self.at = 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        """What lay on the stack at each mark that is still open."""
        self.memo: dict[int, object] = {}
        self._containers_left = CONTAINERS_MAX
        self._kept_max = CONTAINERS_MAX

    # -- bytes

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start = self.at
        stop = self.at = start + count
        if stop > len(self.data):
            raise ValueError(f"{count} bytes are stated, {len(self.data) - start} are left")
        return self.data[start:stop]

    def number(self, width: int) -> int:
        """Return the next unsigned number."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        """Return what is left of the line."""
        stop = self.data.find(b"\n", self.at)
        if stop < 0:
            raise ValueError("a line without an end")
        line = self.data[self.at : stop]
        self.at = stop + 1
        return line

    # -- stack

    def push(self, value: object) -> None:
        """Put a value on top."""
        self.stack.append(value)

    def push_container(self, value: object) -> None:
        """Put a container or an object on top, of which there may be so many."""
        self.count_container()
        self.stack.append(value)

    def count_container(self) -> None:
        """Take note that a container or an object is about to be made."""
        self._containers_left -= 1
        if self._containers_left < 0:
            raise UnsupportedPickle(
                f"over {CONTAINERS_MAX} containers and objects; save them as tensors or in several files"
            )

    def mark(self) -> None:
        """Begin a run of items."""
        if len(self.below) >= _MARKS_MAX:
            raise ValueError(f"over {_MARKS_MAX} marks that are open")
        self.below.append(self.stack)
        self.stack = []

    def marked(self) -> list[object]:
        """Take everything since the last mark."""
        if not self.below:
            raise ValueError("it goes back to a mark that it has not set")
        items = self.stack
        self.stack = self.below.pop()
        return items

    def pop(self) -> None:
        """Drop the top, which may be a mark."""
        if self.stack:
            self.stack.pop()
        else:
            self.marked()

    def pop_mark(self) -> None:
        """Drop everything since the last mark."""
        self.marked()

    def dup(self) -> None:
        """Put the top there twice."""
        self.stack.append(self.stack[-1])

    # -- memo

    def remember(self, index: int) -> None:
        """Keep the top under an index."""
        if not 0 <= index <= len(self.data):
            raise ValueError(f"memo index {index}; expected less than the bytes of the pickle")
        self._keep(index)

    def _keep(self, index: int) -> None:
        if len(self.memo) >= self._kept_max:
            raise UnsupportedPickle(
                f"over {CONTAINERS_MAX} values kept to be recalled; save them as tensors or in several files"
            )
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Put what was kept on top."""
        if index not in self.memo:
            raise ValueError(f"memo index {index}, which it has not set")
        self.stack.append(self.memo[index])

    def put(self) -> None:
        """Keep the top under an index in decimal."""
        self.remember(_decimal(self.line()))

    def get(self) -> None:
        """Recall by an index in decimal."""
        self.recall(_decimal(self.line()))

    def short_put(self) -> None:
        """Keep the top under an index of one byte."""
        self.memo[self.data[self.at]] = self.stack[-1]
        self.at += 1

    def short_get(self) -> None:
        """Recall by an index of one byte."""
        self.recall(self.data[self.at])
        self.at += 1

    def memoize(self) -> None:
        """Keep the top under the next index."""
        self._keep(len(self.memo))

    # -- values

    def proto(self) -> None:
        """Read the version of the protocol."""
        version = self.number(1)
        if version > _PROTOCOL_MAX:
            raise UnsupportedPickle(f"pickle protocol {version}; expected {_PROTOCOL_MAX} at most")

    def frame(self) -> None:
        """Read how long a frame is; nothing follows from it."""
        length = self.number(8)
        if length > len(self.data) - self.at:
            raise ValueError(f"a frame of {length} bytes, {len(self.data) - self.at} are left")

    def integer_text(self) -> None:
        """Read an integer in decimal, or a bool."""
        line = self.line()
        self.push(line == b"01" if line in (b"00", b"01") else _decimal(line))

    def long_text(self) -> None:
        """Read an integer in decimal as Python 2 wrote long ones."""
        self.push(_decimal(self.line().removesuffix(b"L")))

    def byte(self) -> None:
        """Read an integer of one byte."""
        self.stack.append(self.data[self.at])
        self.at += 1

    def signed(self) -> None:
        """Read an integer of four bytes."""
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long(self, width: int) -> None:
        """Read an integer that says how long it is."""
        count = self.number(width)
        if count > _INT_BYTES_MAX:
            raise ValueError(f"an integer of {count} bytes; expected {_INT_BYTES_MAX} at most")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def double(self) -> None:
        """Read a float."""
        self.stack += _DOUBLE.unpack(self.take(8))

    def double_text(self) -> None:
        """Read a float in decimal."""
        self.push(float(self.line().decode("ascii")))

    def string_text(self) -> None:
        """Read text as Python 2 wrote it: the way it stands in a program."""
        line = self.line().strip()
        if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":
            raise ValueError("text without quotes")
        content, _ = codecs.escape_decode(line[1:-1])
        self.push(_old_text(content))

    def push_string(self, width: int) -> None:
        """Read text or bytes of Python 2."""
        self.push(_old_text(self.take(self.number(width))))

    def unicode_text(self) -> None:
        """Read text in ASCII with escapes."""
        self.push(self.line().decode("raw-unicode-escape"))

    def push_unicode(self, width: int) -> None:
        """Read text."""
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def push_bytes(self, width: int) -> None:
        """Read bytes."""
        self.push(self.take(self.number(width)))

    def push_bytearray(self) -> None:
        """Read a bytearray."""
        self.push(bytearray(self.take(self.number(8))))

    def push_tuple(self, count: int) -> None:
        """Make a tuple of what lies on top."""
        if count > len(self.stack):
            raise IndexError
        self.count_container()
        self.stack[-count:] = [tuple(self.stack[-count:])]


def _decimal(line: bytes) -> int:
    text = line.strip()
    if len(text) > _DIGITS_MAX:
        raise ValueError(f"an integer of {len(text)} digits; expected {_DIGITS_MAX} at most")
    return int(text)


def _old_text(content: bytes) -> str | bytes:
    """Return text of Python 2, which kept text and bytes as one, as text where it can be."""
    return content.decode("ascii") if content.isascii() else content

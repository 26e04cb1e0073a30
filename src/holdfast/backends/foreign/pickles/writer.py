"""Writes pickles of protocol 2 for a closed set of types, as torch.save writes them.

The standard library's pickler calls methods of the values. This writer looks nothing up and executes nothing: only
`GlobalName` and `Made` state what the reader imports and calls.
"""

from __future__ import annotations

import datetime
import pathlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from holdfast.backends.foreign.pickles.objects import GlobalName
from holdfast.errors import InvalidError

DEPTH_MAX = 250
"""Largest depth. Readers may use recursion."""

_BATCH = 1000
"""Items that are set or appended at once. A reader holds them on its stack."""

_PYTHON_2 = {"builtins": "__builtin__"}
"""Modules that protocol 2 names as in Python 2. Every reader knows these names."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """An object that the reader makes by a call."""

    function: GlobalName
    """The function; with `new`, the class of an object that is made without a call."""

    args: tuple[object, ...] = ()
    """Arguments of the call."""

    state: object = None
    """Attributes of the object by name, or the argument of its `__setstate__`; None for neither."""

    items: Iterable[tuple[object, object]] = ()
    """Items of the object, if it is a dict."""

    new: bool = False
    """Whether the object is made by `cls.__new__`, without a call."""

    shared: bool = False
    """Whether the value occurs in several places and is the same object in each."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A dict by its items, which may be generated while they are written."""

    items: Iterable[tuple[object, object]]
    """Its items; no key is repeated."""


@dataclass(frozen=True, slots=True)
class PersistentId:
    """A reference to an object outside the pickle."""

    content: tuple[object, ...]
    """The identifier that the reader resolves."""


StandIn = Callable[[object], object]
"""Called for a value of any other type; returns the value that is written instead.

Raises `TypeError` if there is none."""


def pickled(value: object, stand_in: StandIn | None = None) -> bytes:
    """Return the pickle of a value.

    Args:
        value: Plain values, numpy arrays, dates, paths, and instances of the classes above, nested.
        stand_in: Returns the substitute for a value of another type.
    Raises:
        InvalidError: The value is nested too deep.
        TypeError: A value is of another type, and there is no `stand_in`.
    """
    pickler = _Pickler(stand_in)
    pickler.write(value, 0)
    return b"\x80\x02" + pickler.out + b"."


class _Pickler:
    """The bytes of one pickle, and its memo."""

    def __init__(self, stand_in: StandIn | None) -> None:
        self.out = bytearray()
        self._stand_in = stand_in
        self._known: dict[object, int] = {}

    def write(self, value: object, depth: int) -> None:
        """Write opcodes that push a value on the reader's stack."""
        if depth > DEPTH_MAX:
            raise InvalidError(f"a value nests deeper than {DEPTH_MAX} levels; flatten it, or leave it out")
        kind = type(value)
        if kind in _WRITERS:
            _WRITERS[kind](self, value, depth)
        elif kind in _STAND_INS:
            self.write(_STAND_INS[kind](value), depth + 1)
        elif isinstance(value, np.generic | pathlib.PurePath):
            self.write(_reduced(value), depth)
        elif self._stand_in is None:
            raise TypeError(f"a {type(value).__name__} cannot be pickled")
        else:
            self.write(self._stand_in(value), depth + 1)

    def put_simple(self, value: bool | None, depth: int) -> None:
        self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]

    def put_int(self, value: int, depth: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + value.to_bytes(1, "little")
        elif 0 <= value < 1 << 16:
            self.out += b"M" + value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            head = bytes((0x8A, len(data))) if len(data) < 1 << 8 else b"\x8b" + struct.pack("<i", len(data))
            self.out += head + data

    def put_float(self, value: float, depth: int) -> None:
        self.out += b"G" + struct.pack(">d", value)

    def put_str(self, value: str, depth: int) -> None:
        # Names repeat in every tensor, so text goes through the memo.
        if not self._recall(value):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
            self._remember(value)

    def put_tuple(self, value: tuple[object, ...], depth: int) -> None:
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.write(item, depth + 1)
        self.out += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"

    def put_list(self, value: list[object], depth: int) -> None:
        self.out += b"]"
        self._fill(((item,) for item in value), b"e", depth)

    def put_dict(self, items: Iterable[tuple[object, object]], depth: int) -> None:
        self.out += b"}"
        self._fill(items, b"u", depth)

    def put_named(self, value: GlobalName, depth: int) -> None:
        if not self._recall(value):
            module, _, name = value.qualname.rpartition(".")
            self.out += f"c{_PYTHON_2.get(module, module)}\n{name}\n".encode()
            self._remember(value)

    def put_persistent(self, value: PersistentId, depth: int) -> None:
        self.put_tuple(value.content, depth + 1)
        self.out += b"Q"

    def put_made(self, value: Made, depth: int) -> None:
        if value.shared and self._recall(value):
            return
        self.put_named(value.function, depth)
        self.put_tuple(value.args, depth + 1)
        self.out += b"\x81" if value.new else b"R"
        if value.shared:
            self._remember(value)
        self._fill(value.items, b"u", depth)
        if value.state is not None:
            self.write(value.state, depth + 1)
            self.out += b"b"

    def _fill(self, entries: Iterable[tuple[object, ...]], code: bytes, depth: int) -> None:
        rest = iter(entries)
        while batch := list(islice(rest, _BATCH)):
            self.out += b"("
            for part in chain.from_iterable(batch):
                self.write(part, depth + 1)
            self.out += code

    def _recall(self, value: object) -> bool:
        """Push a value from the memo; return False if it is not there."""
        at = self._known.get(value)
        if at is None:
            return False
        self.out += b"h" + at.to_bytes(1, "little") if at < 1 << 8 else b"j" + struct.pack("<I", at)
        return True

    def _remember(self, value: object) -> None:
        at = self._known[value] = len(self._known)
        self.out += b"q" + at.to_bytes(1, "little") if at < 1 << 8 else b"r" + struct.pack("<I", at)


def _called(qualname: str, *args: object) -> Made:
    return Made(GlobalName(qualname), args)


def _reduced(value: Any) -> Made:
    """Return the call that numpy, dates and paths state for themselves."""
    function, args, *rest = value.__reduce_ex__(2)
    module = "pathlib" if isinstance(value, pathlib.PurePath) else function.__module__
    return Made(GlobalName(f"{module}.{function.__qualname__}"), args, rest[0] if rest else None)


def _ordered(value: OrderedDict[object, object]) -> Made:
    """Return the call for an ordered dict. The attributes of a module's state dict (its versions) are kept."""
    return Made(GlobalName("collections.OrderedDict"), (), vars(value) or None, value.items())


_STAND_INS: dict[type, Callable[[Any], object]] = {
    bytes: lambda value: _called("_codecs.encode", value.decode("latin-1"), "latin1"),
    bytearray: lambda value: _called("builtins.bytearray", value.decode("latin-1"), "latin-1"),
    complex: lambda value: _called("builtins.complex", value.real, value.imag),
    set: lambda value: _called("builtins.set", list(value)),
    frozenset: lambda value: _called("builtins.frozenset", list(value)),
    Counter: lambda value: _called("collections.Counter", dict(value)),
    OrderedDict: _ordered,
    datetime.timezone: lambda value: _called("datetime.timezone", *value.__getinitargs__()),
    **dict.fromkeys((datetime.date, datetime.datetime, datetime.time, datetime.timedelta, np.ndarray), _reduced),
    **dict.fromkeys({type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSUMmV"}, _reduced),
    type: lambda value: GlobalName(f"{value.__module__}.{value.__qualname__}"),
}


_WRITERS: dict[type, Callable[[_Pickler, Any, int], None]] = {
    type(None): _Pickler.put_simple,
    bool: _Pickler.put_simple,
    int: _Pickler.put_int,
    float: _Pickler.put_float,
    str: _Pickler.put_str,
    tuple: _Pickler.put_tuple,
    list: _Pickler.put_list,
    dict: lambda pickler, value, depth: pickler.put_dict(value.items(), depth),
    GlobalName: _Pickler.put_named,
    Made: _Pickler.put_made,
    Pairs: lambda pickler, value, depth: pickler.put_dict(value.items, depth),
    PersistentId: _Pickler.put_persistent,
}

"""Pickles read without running anything: a machine of our own for protocols 0 to 5.

It makes plain values, `OpaqueObject` for objects of classes we do not have, and calls only functions of our own
(`formats.allowed`). What it makes is in proportion to the bytes it reads, and containers, objects and what it keeps to
recall are `CONTAINERS_MAX` at most: they take far more memory than the codes that make them.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection

import numpy as np

from holdfast.errors import CorruptError, InvalidError
from holdfast.foreign.pickles.allowlist import KNOWN_CALLS, resolved
from holdfast.foreign.pickles.constructors import require_keys
from holdfast.foreign.pickles.limits import DEPTH_MAX, require_walkable
from holdfast.foreign.pickles.numpy_constructors import DTypeInPickle, fill
from holdfast.foreign.pickles.objects import DTypeRef, GlobalName, OpaqueObject, UnsupportedPickle
from holdfast.foreign.pickles.opcodes import PickleStack
from holdfast.foreign.pickles.tensors import StoredTensor

__all__ = ["DEPTH_MAX", "DTypeRef", "GlobalName", "OpaqueObject", "UnsupportedPickle", "unpickled"]

_SAME_HASH_MAX = 64
"""Keys of one dict that may have the same hash: more are chosen to take time."""

_COPIED_BYTES_PER_BYTE = 64
_COPIED_BYTES_MIN = 1 << 20


def unpickled(
    data: bytes,
    where: str,
    *,
    persistent: Callable[[object], object] | None = None,
    also: Collection[str] = (),
) -> object:
    """Return the value of a pickle; nothing is imported or run.

    Lists, dicts, tuples and sets in it hold no cycle, nest at most `DEPTH_MAX` deep, and a walk that enters what is
    shared ever again ends soon; what an `OpaqueObject` holds is bounded likewise, but a walk from one into the next may
    come back to where it began.

    Args:
        data: The pickle; bytes after its end are ignored.
        where: Its file, for messages.
        persistent: Returns what stands for a persistent id; raises ValueError for one that cannot be, and
            `UnsupportedPickle` for one that is not read.
        also: Names of classes, as `module.name`, that become an `OpaqueObject` beside those that are known.
    Raises:
        CorruptError: It is damaged, or no pickle.
        InvalidError: It names what is not on the list, or nests too deep; the message names it.
    """
    machine = _Machine(data, where, persistent, also)
    value = machine.run()
    machine.memo.clear()
    require_walkable(value, machine.instances, where, machine.at)
    return value


class _Machine(PickleStack):
    """One reading of one pickle: its stack, what it has set marks at, and its memo."""

    def __init__(
        self, data: bytes, where: str, persistent: Callable[[object], object] | None, also: Collection[str]
    ) -> None:
        super().__init__(data)
        self._where, self._persistent, self._also = where, persistent, also
        self._left = _COPIED_BYTES_MIN + _COPIED_BYTES_PER_BYTE * len(data)
        self._hashes: dict[int, tuple[object, dict[int, int]]] = {}
        self.instances: list[OpaqueObject] = []

    def run(self) -> object:
        """Return the value that the pickle ends with."""
        data, begun = self.data, 0
        try:
            while True:
                begun = self.at
                self.at = begun + 1
                code = data[begun]
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                operation = _OPERATIONS[code]
                if operation is None:
                    raise ValueError(f"code {code:#04x}; expected one of a pickle's")
                operation(self)
        except UnsupportedPickle as refusal:
            raise InvalidError(f"{self._where}, byte {begun}: {refusal}") from refusal
        except IndexError:
            problem = "ends too early" if self.at >= len(data) else "takes from an empty stack"
            raise CorruptError(f"{self._where}, byte {begun}: the pickle {problem}; expected a whole one") from None
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise CorruptError(f"{self._where}, byte {begun}: the pickle is damaged: {error}") from error

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise UnsupportedPickle("it copies the same content ever again; expected values in proportion to the file")

    # -- containers

    def append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def appends(self) -> None:
        self._extend(self.marked())

    def _extend(self, items: list[object]) -> None:
        into = self.stack[-1]
        if isinstance(into, OpaqueObject):
            if into.items is None:
                into.items = []
            into = into.items
        if type(into) is not list:
            raise ValueError(f"it appends to {type(into).__name__}; expected a list")
        into += items

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def setitems(self) -> None:
        self._update(self.marked())

    def make_dict(self) -> None:
        items = self.marked()
        self.push_container({})
        self._update(items)

    def _update(self, items: list[object]) -> None:
        if len(items) % 2:
            raise ValueError("a key without a value")
        into = self.stack[-1]
        if isinstance(into, OpaqueObject):
            if into.items is None:
                into.items = {}
            into = into.items
        if not isinstance(into, dict):
            raise ValueError(f"it sets items of {type(into).__name__}; expected a dict")
        keys = items[::2]
        self._require_keys(into, keys)
        update = dict.update if type(into) is Counter else type(into).update  # That of a Counter would add.
        update(into, zip(keys, items[1::2], strict=True))

    def additems(self) -> None:
        items = self.marked()
        into = self.stack[-1]
        if type(into) is not set:
            raise ValueError(f"it adds to {type(into).__name__}; expected a set")
        self._require_keys(into, items)
        into.update(items)

    def empty_set(self) -> None:
        self._spend(256)
        self.push_container(set())

    def make_frozenset(self) -> None:
        items = self.marked()
        self._spend(256)
        self._require_keys(items, items)
        self.push_container(frozenset(items))

    def _require_keys(self, into: object, keys: list[object]) -> None:
        """Refuse keys that take long to hash, or that were made to have one hash."""
        for key in require_keys(keys):
            kind = type(key)
            if kind in _WELL_HASHED or (kind is int and -_SMALL < key < _SMALL):
                continue
            if id(into) not in self._hashes:
                self._spend(512)
                self._hashes[id(into)] = (into, {})
            _, counts = self._hashes[id(into)]
            seen = counts[hash(key)] = counts.get(hash(key), 0) + 1
            if seen > _SAME_HASH_MAX:
                raise ValueError(f"over {_SAME_HASH_MAX} keys with one hash in one container")

    # -- what would be code elsewhere

    def global_(self) -> None:
        module, name = self.line().decode("utf-8"), self.line().decode("utf-8")
        self.push(resolved(module, name, self._also))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global whose name is no text")
        self.push(resolved(module, name, self._also))

    def extension(self) -> None:
        raise UnsupportedPickle("a class by its number in the registry of another program; save it as plain values")

    def out_of_band(self) -> None:
        raise UnsupportedPickle("a buffer kept outside the pickle; save it without buffer_callback")

    def persid(self) -> None:
        self.push(self._persisted(self.line().decode("ascii")))

    def binpersid(self) -> None:
        self.push(self._persisted(self.stack.pop()))

    def _persisted(self, identifier: object) -> object:
        if self._persistent is None:
            raise UnsupportedPickle("a tensor or another object kept outside the pickle; expected values alone")
        return self._persistent(identifier)

    def inst(self) -> None:
        arguments = tuple(self.marked())
        self.global_()
        self.push(self._called(self.stack.pop(), arguments))

    def obj(self) -> None:
        kind, *arguments = self.marked()
        self.push(self._called(kind, tuple(arguments)))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.push(self._called(function, arguments))

    def newobj_ex(self) -> None:
        keywords = self.stack.pop()
        if type(keywords) is not dict:
            raise ValueError("keywords of a call that are no dict")
        self.reduce()
        made = self.stack[-1]
        if keywords and not isinstance(made, OpaqueObject):
            raise ValueError("a plain value made with keywords")
        if isinstance(made, OpaqueObject):
            made.state = keywords or None

    def _called(self, function: object, arguments: object) -> object:
        """Return what stands for the result of a call."""
        if not isinstance(function, GlobalName) or type(arguments) is not tuple:
            raise ValueError(f"it calls {type(function).__name__} with {type(arguments).__name__}")
        self.count_container()
        call = KNOWN_CALLS.get(function.qualname)
        if call is not None:
            made = call(arguments, self._spend)
        elif function.qualname == "copyreg._reconstructor":
            made = self._reconstructed(arguments)
        else:
            made = OpaqueObject(function.qualname, arguments)
        if isinstance(made, OpaqueObject):
            self.instances.append(made)
        return made

    def _reconstructed(self, arguments: tuple[object, ...]) -> OpaqueObject:
        """Stand in for the function by which protocols 0 and 1 make objects."""
        if len(arguments) != 3 or not isinstance(arguments[0], GlobalName):
            raise ValueError("an object without class, base and state")
        made = OpaqueObject(arguments[0].qualname)
        if type(arguments[2]) is list or type(arguments[2]) is dict:
            self._spend(64 * len(arguments[2]))
            made.items = arguments[2].copy()
        elif arguments[2] is not None:
            made.args = (arguments[2],)
        return made

    def build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, DTypeInPickle):
            made.build(state)
        elif isinstance(made, np.ndarray):
            fill(made, state, self._spend)
        elif isinstance(made, OpaqueObject):
            made.state = self._attributes(state, made.state)
        elif not isinstance(made, OrderedDict | StoredTensor):
            raise ValueError(f"it sets attributes of {type(made).__name__}")

    def _attributes(self, state: object, present: object) -> object:
        """Return attributes by name where they are given so: a dict, or one and another for slots."""
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        named = [each for each in parts if type(each) is dict]
        if len(named) + parts.count(None) != len(parts) or not named:
            return state
        if present is None and len(named) == 1:
            return named[0]
        merged: dict[object, object] = {}
        for each in (*([present] if type(present) is dict else ()), *named):
            self._spend(128 * len(each))
            merged |= each
        return merged


_SMALL = 1 << 60
"""Integers below it are their own hash."""

_WELL_HASHED = frozenset({str, bytes, OpaqueObject, bool, type(None)})
"""Types of which nobody chooses values that have one hash."""

_Operation = Callable[[_Machine], None]


def _operations() -> list[_Operation | None]:
    """Return what each code of protocols 0 to 5 does, but STOP."""
    machine = _Machine
    named: dict[bytes, _Operation] = {
        b"(": machine.mark, b"0": machine.pop, b"1": machine.pop_mark, b"2": machine.dup,
        b"F": machine.double_text, b"I": machine.integer_text, b"L": machine.long_text, b"J": machine.signed,
        b"K": machine.byte, b"M": lambda m: m.stack.append(m.number(2)), b"G": machine.double,
        b"\x8a": lambda m: m.long(1), b"\x8b": lambda m: m.long(4),
        b"N": lambda m: m.stack.append(None), b")": lambda m: m.stack.append(()),
        b"\x88": lambda m: m.stack.append(True), b"\x89": lambda m: m.stack.append(False),
        b"]": lambda m: m.push_container([]), b"}": lambda m: m.push_container({}), b"\x8f": machine.empty_set,
        b"P": machine.persid, b"Q": machine.binpersid, b"R": machine.reduce, b"b": machine.build,
        b"S": machine.string_text, b"T": lambda m: m.push_string(4), b"U": lambda m: m.push_string(1),
        b"V": machine.unicode_text, b"X": lambda m: m.push_unicode(4), b"\x8c": lambda m: m.push_unicode(1),
        b"\x8d": lambda m: m.push_unicode(8), b"B": lambda m: m.push_bytes(4), b"C": lambda m: m.push_bytes(1),
        b"\x8e": lambda m: m.push_bytes(8), b"\x96": machine.push_bytearray,
        b"a": machine.append, b"e": machine.appends, b"s": machine.setitem, b"u": machine.setitems,
        b"d": machine.make_dict, b"l": lambda m: m.push_container(m.marked()),
        b"t": lambda m: m.push_container(tuple(m.marked())),
        b"\x85": lambda m: m.push_tuple(1), b"\x86": lambda m: m.push_tuple(2), b"\x87": lambda m: m.push_tuple(3),
        b"\x90": machine.additems, b"\x91": machine.make_frozenset,
        b"c": machine.global_, b"\x93": machine.stack_global, b"i": machine.inst, b"o": machine.obj,
        b"\x81": machine.reduce, b"\x92": machine.newobj_ex,
        b"g": machine.get, b"h": machine.short_get, b"j": lambda m: m.recall(m.number(4)),
        b"p": machine.put, b"q": machine.short_put, b"r": lambda m: m.remember(m.number(4)), b"\x94": machine.memoize,
        b"\x80": machine.proto, b"\x95": machine.frame,
        b"\x82": machine.extension, b"\x83": machine.extension, b"\x84": machine.extension,
        b"\x97": machine.out_of_band, b"\x98": machine.out_of_band,
    }  # fmt: skip
    return [named.get(bytes([code])) for code in range(256)]


_OPERATIONS = _operations()

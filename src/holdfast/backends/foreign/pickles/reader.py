"""Reads pickles of protocols 0 to 5 without executing anything.

The machine makes plain values, and `OpaqueObject` for objects of unknown classes. It calls only functions of Holdfast
(`pickles.allowlist`). Its memory is in proportion to the bytes of the pickle: a container takes far more memory than
its opcode, so containers, objects and memo entries are limited to `CONTAINERS_MAX`.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection

import numpy as np

from holdfast.backends.foreign.pickles.allowlist import KNOWN_CALLS, resolved
from holdfast.backends.foreign.pickles.constructors import require_keys
from holdfast.backends.foreign.pickles.limits import require_walkable
from holdfast.backends.foreign.pickles.numpy_constructors import DTypeInPickle, fill
from holdfast.backends.foreign.pickles.objects import GlobalName, OpaqueObject, UnsupportedPickle
from holdfast.backends.foreign.pickles.opcodes import PickleStack, decimal
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.errors import CorruptError, InvalidError

_SAME_HASH_MAX = 64
"""Most keys with one hash in one dict. A hostile pickle uses more to make lookups slow."""

_COPIED_BYTES_PER_BYTE = 64
_COPIED_BYTES_MIN = 1 << 20
"""A pickle may copy this much, and 64 bytes for each of its own. Memo entries let it copy the same content often."""


def unpickled(
    data: bytes,
    where: str,
    *,
    persistent: Callable[[object], object] | None = None,
    also: Collection[str] = (),
) -> object:
    """Return the value of a pickle. Nothing is imported or executed.

    Lists, dicts, tuples and sets in the value have no cycles and nest at most `DEPTH_MAX` deep. A walk that visits
    shared containers again each time is bounded. The content of each `OpaqueObject` is bounded likewise, but objects
    may refer to each other in a cycle.

    Args:
        data: The pickle; bytes after its end are ignored.
        where: The file, for messages.
        persistent: Returns the object of a persistent id. It raises ValueError for an impossible id, and
            `UnsupportedPickle` for one that is not supported.
        also: Names (`module.name`) of classes that become an `OpaqueObject`, besides those of the allowlist.
    Raises:
        CorruptError: The bytes are damaged, or not a pickle.
        InvalidError: A name is not on the allowlist, or values nest too deep; the message says which.
    """
    machine = _Machine(data, where, persistent, also)
    value = machine.run()
    machine.memo.clear()  # The memo may hold values that the result does not contain; free them before the walk.
    require_walkable(value, machine.objects, where, machine.at)
    return value


class _Machine(PickleStack):
    """Executes the opcodes of one pickle."""

    def __init__(
        self, data: bytes, where: str, persistent: Callable[[object], object] | None, also: Collection[str]
    ) -> None:
        super().__init__(data)
        self._where, self._persistent, self._also = where, persistent, also
        self._copied_bytes_left = _COPIED_BYTES_MIN + _COPIED_BYTES_PER_BYTE * len(data)
        self._hashes: dict[int, tuple[object, dict[int, int]]] = {}
        self.objects: list[OpaqueObject] = []
        """All opaque objects, whose content is checked one by one."""

    def run(self) -> object:
        """Return the value on the stack at the end of the pickle."""
        data, start = self.data, 0
        try:
            while True:
                start = self.at
                self.at = start + 1
                code = data[start]
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                operation = _OPERATIONS[code]
                if operation is None:
                    raise ValueError(f"opcode {code:#04x} is not one of a pickle")
                operation(self)
        except UnsupportedPickle as error:
            raise InvalidError(f"{self._where}, byte {start}: {error}") from error
        except IndexError:
            problem = "ends too early" if self.at >= len(data) else "takes from an empty stack"
            raise CorruptError(f"{self._where}, byte {start}: the pickle {problem}. Read another copy") from None
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise CorruptError(f"{self._where}, byte {start}: damaged pickle: {error}. Read another copy") from error

    def _charge(self, count: int) -> None:
        self._copied_bytes_left -= count
        if self._copied_bytes_left < 0:
            raise UnsupportedPickle("it copies the same content many times; expected values in proportion to the file")

    # -- containers

    def extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, OpaqueObject):
            if target.items is None:
                target.items = []
            target = target.items
        if type(target) is not list:
            raise ValueError(f"it appends to {type(target).__name__}; expected a list")
        target += items

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def make_dict(self) -> None:
        items = self.marked()
        self.push_container({})
        self.update(items)

    def update(self, items: list[object]) -> None:
        if len(items) % 2:
            raise ValueError("a key without a value")
        target = self.stack[-1]
        if isinstance(target, OpaqueObject):
            if target.items is None:
                target.items = {}
            target = target.items
        if not isinstance(target, dict):
            raise ValueError(f"it sets items of {type(target).__name__}; expected a dict")
        # Check the keys first: hashing a hostile key is what costs time.
        keys = items[::2]
        self._require_keys(target, keys)
        update = dict.update if type(target) is Counter else type(target).update  # Counter.update would add counts.
        update(target, zip(keys, items[1::2], strict=True))

    def additems(self) -> None:
        items = self.marked()
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError(f"it adds to {type(target).__name__}; expected a set")
        self._require_keys(target, items)
        target.update(items)

    def empty_set(self) -> None:
        self._charge(256)
        self.push_container(set())

    def make_frozenset(self) -> None:
        items = self.marked()
        self._charge(256)
        self._require_keys(items, items)
        self.push_container(frozenset(items))

    def _require_keys(self, container: object, keys: list[object]) -> None:
        """Refuse keys that take long to hash, or that are chosen to have one hash."""
        for key in require_keys(keys):
            kind = type(key)
            if kind in _WELL_HASHED or (kind is int and -_SMALL < key < _SMALL):
                continue
            if id(container) not in self._hashes:
                self._charge(512)
                self._hashes[id(container)] = (container, {})  # A reference, so that the id stays its own.
            _, counts = self._hashes[id(container)]
            seen = counts[hash(key)] = counts.get(hash(key), 0) + 1
            if seen > _SAME_HASH_MAX:
                raise ValueError(f"over {_SAME_HASH_MAX} keys with one hash in one container")

    # -- globals and calls, which another reader would import and execute

    def global_name(self) -> None:
        module, name = self.line().decode("utf-8"), self.line().decode("utf-8")
        self.stack.append(resolved(module, name, self._also))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global whose name is not text")
        self.stack.append(resolved(module, name, self._also))

    def extension(self) -> None:
        raise UnsupportedPickle("a class by its number in another program's registry; save it as plain values")

    def out_of_band(self) -> None:
        raise UnsupportedPickle("a buffer stored outside the pickle; save it without buffer_callback")

    def push_persistent(self, identifier: object) -> None:
        if self._persistent is None:
            raise UnsupportedPickle("a tensor or another object stored outside the pickle; expected values only")
        self.stack.append(self._persistent(identifier))

    def inst(self) -> None:
        arguments = tuple(self.marked())
        self.global_name()
        self.stack.append(self._called(self.stack.pop(), arguments))

    def obj(self) -> None:
        kind, *arguments = self.marked()
        self.stack.append(self._called(kind, tuple(arguments)))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._called(function, arguments))

    def newobj_ex(self) -> None:
        # Keywords of the constructor are kept as attributes; BUILD merges further ones into them.
        keywords = self.stack.pop()
        if type(keywords) is not dict:
            raise ValueError("the keywords of a call are not a dict")
        self.reduce()
        result = self.stack[-1]
        if isinstance(result, OpaqueObject):
            result.state = keywords or None
        elif keywords:
            raise ValueError("keywords in the call of a plain value")

    def _called(self, function: object, arguments: object) -> object:
        """Return the substitute for the result of a call."""
        if not isinstance(function, GlobalName) or type(arguments) is not tuple:
            raise ValueError(f"it calls {type(function).__name__} with {type(arguments).__name__}")
        # Count before the call: one opcode makes an object of hundreds of bytes.
        self.count_container()
        call = KNOWN_CALLS.get(function.qualname)
        if call is not None:
            result = call(arguments, self._charge)
        elif function.qualname == "copyreg._reconstructor":
            result = self._reconstructed(arguments)
        else:
            result = OpaqueObject(function.qualname, arguments)
        if isinstance(result, OpaqueObject):
            self.objects.append(result)
        return result

    def _reconstructed(self, arguments: tuple[object, ...]) -> OpaqueObject:
        """Substitute the function with which protocols 0 and 1 make objects."""
        if len(arguments) != 3 or not isinstance(arguments[0], GlobalName):
            raise ValueError("an object without class, base and state")
        result = OpaqueObject(arguments[0].qualname)
        if type(arguments[2]) is list or type(arguments[2]) is dict:
            self._charge(64 * len(arguments[2]))
            result.items = arguments[2].copy()
        elif arguments[2] is not None:
            result.args = (arguments[2],)
        return result

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, DTypeInPickle):
            target.build(state)
        elif isinstance(target, np.ndarray):
            fill(target, state, self._charge)
        elif isinstance(target, OpaqueObject):
            target.state = self._attributes(state, target.state)
        # The attributes of a module's state dict (versions) and of a tensor (Python attributes) are dropped.
        elif not isinstance(target, OrderedDict | StoredTensor):
            raise ValueError(f"it sets attributes of {type(target).__name__}")

    def _attributes(self, state: object, present: object) -> object:
        """Return attributes by name if the state is a dict, or a pair of dicts (the second for slots)."""
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        named = [part for part in parts if type(part) is dict]
        if len(named) + parts.count(None) != len(parts) or not named:
            return state
        if present is None and len(named) == 1:
            return named[0]
        merged: dict[object, object] = {}
        for attributes in (*([present] if type(present) is dict else ()), *named):
            self._charge(128 * len(attributes))
            merged |= attributes
        return merged


_SMALL = 1 << 60
"""Integers below this limit are their own hash, so distinct ones never collide."""

_WELL_HASHED = frozenset({str, bytes, OpaqueObject, bool, type(None)})
"""Types whose hash an attacker cannot choose: it is random, or that of an identity, or there are two values."""

_Operation = Callable[[_Machine], object]


_NAMED: dict[bytes, _Operation] = {
    b"(": _Machine.mark, b"0": _Machine.pop, b"1": _Machine.marked, b"2": lambda m: m.stack.append(m.stack[-1]),
    b"N": lambda m: m.stack.append(None), b")": lambda m: m.stack.append(()),
    b"\x88": lambda m: m.stack.append(True), b"\x89": lambda m: m.stack.append(False),
    b"I": _Machine.integer_text, b"L": lambda m: m.stack.append(decimal(m.line().removesuffix(b"L"))),
    b"K": _Machine.byte, b"M": lambda m: m.stack.append(m.number(2)),
    b"J": lambda m: m.stack.append(m.signed(4)),
    b"\x8a": lambda m: m.long(1), b"\x8b": lambda m: m.long(4),
    b"F": lambda m: m.stack.append(float(m.line().decode("ascii"))),
    b"G": lambda m: m.stack.extend(struct.unpack(">d", m.take(8))),
    b"S": _Machine.string_text, b"T": lambda m: m.push_string(4), b"U": lambda m: m.push_string(1),
    b"V": lambda m: m.stack.append(m.line().decode("raw-unicode-escape")), b"X": lambda m: m.push_unicode(4),
    b"\x8c": lambda m: m.push_unicode(1), b"\x8d": lambda m: m.push_unicode(8),
    b"B": lambda m: m.stack.append(m.take(m.number(4))), b"C": lambda m: m.stack.append(m.take(m.number(1))),
    b"\x8e": lambda m: m.stack.append(m.take(m.number(8))),
    b"\x96": lambda m: m.stack.append(bytearray(m.take(m.number(8)))),
    b"]": lambda m: m.push_container([]), b"}": lambda m: m.push_container({}), b"\x8f": _Machine.empty_set,
    b"l": lambda m: m.push_container(m.marked()), b"t": lambda m: m.push_container(tuple(m.marked())),
    b"\x85": lambda m: m.push_tuple(1), b"\x86": lambda m: m.push_tuple(2), b"\x87": lambda m: m.push_tuple(3),
    b"a": lambda m: m.extend([m.stack.pop()]), b"e": lambda m: m.extend(m.marked()),
    b"s": _Machine.setitem, b"u": lambda m: m.update(m.marked()), b"d": _Machine.make_dict,
    b"\x90": _Machine.additems, b"\x91": _Machine.make_frozenset,
    b"P": lambda m: m.push_persistent(m.line().decode("ascii")), b"Q": lambda m: m.push_persistent(m.stack.pop()),
    b"c": _Machine.global_name, b"\x93": _Machine.stack_global, b"i": _Machine.inst, b"o": _Machine.obj,
    b"R": _Machine.reduce, b"\x81": _Machine.reduce, b"\x92": _Machine.newobj_ex, b"b": _Machine.build,
    b"g": lambda m: m.recall(decimal(m.line())), b"h": _Machine.short_get, b"j": lambda m: m.recall(m.number(4)),
    b"p": lambda m: m.remember(decimal(m.line())), b"q": _Machine.short_put,
    b"r": lambda m: m.remember(m.number(4)), b"\x94": lambda m: m.remember(len(m.memo)),
    b"\x80": _Machine.proto, b"\x95": _Machine.frame,
    b"\x82": _Machine.extension, b"\x83": _Machine.extension, b"\x84": _Machine.extension,
    b"\x97": _Machine.out_of_band, b"\x98": _Machine.out_of_band,
}  # fmt: skip
"""The operation of each opcode of protocols 0 to 5, except STOP."""

_OPERATIONS = [_NAMED.get(bytes([code])) for code in range(256)]

"""Non-tensor state as tagged JSON: a closed set of types, each decoded to exactly the type it had.

`encode` and `decode` convert between values and documents, `dumps` and `loads` between documents and JSON text.
docs/values.md specifies the encoding. Containers are handled here, scalars in `format.values.scalars`, numpy in
`format.values.arrays`, JSON text in `format.values.json_text`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import numpy as np

from holdfast.base.types.values import FrameworkValue, Group, GroupKind, PerRankRef, Skipped, TensorRef
from holdfast.core.format.values.arrays import decode_array, decode_scalar, encode_array, encode_scalar, exact_fields
from holdfast.core.format.values.json_text import dumps, is_json_scalar, loads
from holdfast.core.format.values.scalars import SCALAR_CODECS, ScalarCodec, text_document, text_value
from holdfast.core.format.values.unsupported_values import way_out
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import MIB

__all__ = ["DEPTH_MAX", "ENCODED_BYTES_MAX", "decode", "dumps", "encode", "is_json_scalar", "loads"]

DEPTH_MAX = 200
"""Nested arrays and objects around one value. Leaves room for the manifest around it within `TEXT_DEPTH_MAX`."""

ENCODED_BYTES_MAX = 64 * MIB
"""Total content of one encoded value. Every load reads the whole document, so larger data must be a tensor."""

_VALUE_BYTES = 8
"""Charge for each value besides its content, which bounds the output of a container that is shared many times."""

_CODECS: dict[type, ScalarCodec] = {
    **SCALAR_CODECS,
    np.ndarray: ScalarCodec("$ndarray", encode_array, decode_array),
    TensorRef: ScalarCodec("$tensor", lambda ref: _name(ref.fqn), lambda content: TensorRef(text_value(content))),
    PerRankRef: ScalarCodec("$per_rank", lambda ref: _name(ref.path), lambda content: PerRankRef(text_value(content))),
    Skipped: ScalarCodec("$skipped", lambda gap: _name(gap.path), lambda content: Skipped(text_value(content))),
}
_NUMPY_SCALAR = ScalarCodec("$scalar", encode_scalar, decode_scalar)
_CODEC_OF_TAG = {codec.tag: codec for codec in (*_CODECS.values(), _NUMPY_SCALAR)}
_GROUP_KINDS: tuple[GroupKind, ...] = get_args(GroupKind)
_KEY_TYPES = (str, int, float, bool, type(None))


def encode(value: object, path: str, refused: list[str] | None = None, *, entries_are_whole: bool = False) -> object:
    """Return the document of a value: dicts, lists and plain scalars that share no container with it.

    Args:
        value: A value of the types in docs/values.md, nested at will.
        path: Dotted name of the value, for errors.
        refused: Receives a message for each value and key of a type that cannot be saved, in place of an error at the
            first. If it receives any, the document is of no use.
        entries_are_whole: Whether the value is a dict of which `skip` leaves out an entry whole or not at all.
    Raises:
        InvalidError: A nested value has another type, contains itself or nests deeper than `DEPTH_MAX`, or the
            total exceeds `ENCODED_BYTES_MAX`. The message names path, type and what to do.
    """
    try:
        return _Encoder(path, refused, entries_are_whole).encode(value, path, 0)
    except RecursionError as error:
        raise InvalidError(f"{path}: nested too deeply for the remaining stack. Flatten it") from error


def decode(document: object, path: str) -> object:
    """Return the value of a document, with the type that every nested value had.

    Args:
        document: A result of `encode`, or of `loads` from stored text.
        path: Dotted name of the value, for errors.
    Raises:
        CorruptError: No value encodes to this document; the message names the path of the wrong part.
    """
    try:
        return _decode(document, path, 0)
    except RecursionError as error:
        raise CorruptError(f"{path}: nested too deeply for the remaining stack. Read another copy") from error


class _Encoder:
    """The state of one `encode` call: the remaining byte budget, and the containers around the current value."""

    def __init__(self, root: str, refused: list[str] | None, entries_are_whole: bool) -> None:
        self._root, self._refused, self._entries_are_whole = root, refused, entries_are_whole
        self._whole: str | None = None
        """Name of the value around the current one that `skip` leaves out as a whole; None if it takes each entry."""
        self._object: tuple[GroupKind, str] = "dict", ""
        """Kind and path of the module, optimizer or object around the current value."""
        self._bytes_left = ENCODED_BYTES_MAX
        self._open: set[int] = set()
        self._containers: dict[type, Callable[[Any, str, int], object]] = {
            list: self._list,
            dict: self._dict,
            tuple: lambda items, path, depth: {"$tuple": self._list(items, path, depth + 1)},
            set: lambda members, path, depth: {"$set": self._members(members, path, depth + 2)},
            frozenset: lambda members, path, depth: {"$frozenset": self._members(members, path, depth + 2)},
            OrderedDict: self._ordered_dict,
            Counter: self._counter,
            Group: self._group,
            FrameworkValue: self._framework_value,
        }

    def encode(self, value: object, path: str, depth: int) -> object:
        kind = type(value)
        if is_json_scalar(value):
            self._charge(value, path)
            return value
        if depth > DEPTH_MAX:
            raise InvalidError(f"{path}: nested deeper than {DEPTH_MAX} levels of JSON; flatten it")
        container = self._containers.get(kind)
        if container is None:
            codec = _NUMPY_SCALAR if isinstance(value, np.generic) else _CODECS.get(kind)
            if codec is None:
                self._refuse(path, f"a value of type {_type_name(value)} cannot be saved", way_out(value))
                return None
            self._charge(value, path)
            try:
                return {codec.tag: codec.encode(value)}
            except ValueError as error:
                self._refuse(path, f"{_type_name(value)} cannot be saved: {error}", way_out(value))
                return None
        self._bytes_left -= _VALUE_BYTES
        if id(value) in self._open:
            raise InvalidError(
                f"{path}: this {_type_name(value)} contains itself. Make it a tree, or {self._leave_out(path)}"
            )
        self._open.add(id(value))
        document = container(value, path, depth)
        self._open.remove(id(value))
        return document

    def _refuse(self, path: str, problem: str, advice: str) -> None:
        """Note a value that cannot be saved, or raise if the caller notes none."""
        message = f"{self._shown(path)}: {problem}. {advice}, or {self._leave_out(path)}"
        if self._refused is None:
            raise InvalidError(message)
        if message not in self._refused:  # Groups of parameters share most hyperparameters.
            self._refused.append(message)

    def _shown(self, path: str) -> str:
        """Return a path as the caller knows it, without the names that an encoded object has inside."""
        kind, above = self._object
        below = path.removeprefix(above)
        if kind == "stateful":
            below = below.removeprefix(".state")
        elif kind == "optimizer":
            below = re.sub(r"^\.hyperparameters\.[0-9a-f]+", ".param_groups", below)
        return above + below

    def _leave_out(self, path: str) -> str:
        name = path if self._whole is None else self._whole
        # A pattern: brackets and wildcards of a name stand for themselves.
        pattern = re.sub(r"([*?[])", r"[\1]", name)
        return f"leave it out with skip=[{pattern!r}]"

    def _charge(self, value: object, path: str) -> None:
        self._bytes_left -= _VALUE_BYTES + _content_bytes(value)
        if self._bytes_left < 0:
            raise InvalidError(
                f"{path}: with this value of {_content_bytes(value)} bytes, {self._root or 'the state'} exceeds "
                f"{ENCODED_BYTES_MAX} bytes of values; expected a tensor for data of this size. "
                f"Make it a tensor, or {self._leave_out(path)}"
            )

    def _list(self, items: Iterable[object], path: str, depth: int) -> list[object]:
        outer = self._enter_whole(path)
        documents = [self.encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]
        self._whole = outer
        return documents

    def _members(self, members: Iterable[object], path: str, depth: int) -> list[object]:
        # The order of a set differs between processes, but equal states must give equal bytes.
        outer = self._enter_whole(path)
        documents = sorted((self.encode(member, _below(path, member), depth) for member in members), key=dumps)
        self._whole = outer
        return documents

    def _enter_whole(self, path: str) -> str | None:
        """Take a container for one that `skip` leaves out as a whole; return what `_whole` becomes after it."""
        outer = self._whole
        if outer is None:
            self._whole = path
        return outer

    def _dict(self, content: Mapping[object, object], path: str, depth: int) -> dict[str, object]:
        if all(type(key) is str and is_json_scalar(key) and not key.startswith("$") for key in content):
            document = {}
            for key, value in content.items():
                assert isinstance(key, str)
                self._charge(key, path)
                below = _below(path, key)
                outer = self._enter_whole(below) if self._entries_are_whole else self._whole
                document[key] = self.encode(value, below, depth + 1)
                self._whole = outer
            return document
        return {"$dict": self._pairs(content, path, depth + 3)}

    def _pairs(self, content: Mapping[object, object], path: str, depth: int) -> list[object]:
        pairs: list[object] = []
        is_named = type(content) is not Counter and all(type(key) is str for key in content)
        outer = self._whole if is_named else self._enter_whole(path)
        for key, value in content.items():
            below = _below(path, key)
            if _is_key(key):
                pairs.append([self.encode(key, below, depth), self.encode(value, below, depth)])
            else:
                problem = (
                    f"a key of type {_type_name(key)} cannot be saved; expected str, int, float, bool, None or a tuple "
                    "of these"
                )
                self._refuse(below, problem, "Use other keys")
        self._whole = outer
        return pairs

    def _ordered_dict(self, content: OrderedDict[object, object], path: str, depth: int) -> object:
        pairs = self._pairs(content, path, depth + 4)
        # torch.nn.Module.state_dict() stores its version numbers in an attribute of the dict.
        attributes = self._attributes(content, path, allowed={"_metadata"})
        if "_metadata" not in attributes:
            return {"$ordered_dict": pairs}
        metadata = self.encode(attributes["_metadata"], f"{path}._metadata", depth + 2)
        return {"$ordered_dict": {"items": pairs, "metadata": metadata}}

    def _counter(self, content: Counter[object], path: str, depth: int) -> object:
        self._attributes(content, path, allowed=set())
        return {"$counter": self._pairs(content, path, depth + 3)}

    def _attributes(self, content: object, path: str, *, allowed: set[str]) -> Mapping[str, object]:
        attributes = vars(content)
        lost = sorted(attributes.keys() - allowed)
        if lost:
            problem = f"this {_type_name(content)} carries attributes {lost}, which would be lost"
            self._refuse(path, problem, "Pass them as values of their own")
        return attributes

    def _group(self, group: Group, path: str, depth: int) -> object:
        if group.kind not in _GROUP_KINDS or type(group.items) is not dict:
            raise InvalidError(f"{path}: Group of kind {group.kind!r:.80}; expected one of {_GROUP_KINDS} and a dict")
        for name in group.items:
            if type(name) is not str:
                raise InvalidError(f"{path}: the children of a Group are named by str, not {_type_name(name)}")
        outer = self._whole, self._entries_are_whole, self._object
        if group.kind in ("optimizer", "stateful"):
            self._enter_whole(path)
        self._entries_are_whole = group.kind == "module"
        if group.kind != "dict":
            self._object = group.kind, path
        items = self.encode(group.items, path, depth + 2)
        self._whole, self._entries_are_whole, self._object = outer
        return {"$group": {"kind": group.kind, "items": items}}

    def _framework_value(self, value: FrameworkValue, path: str, depth: int) -> object:
        if type(value.kind) is not str:
            raise InvalidError(f"{path}: the kind of a FrameworkValue is a str, not {_type_name(value.kind)}")
        return {"$framework": {"kind": text_document(value.kind), "value": self.encode(value.value, path, depth + 2)}}


def _name(name: object) -> object:
    if type(name) is not str:
        raise ValueError(f"its name is a str, not {_type_name(name)}")
    return text_document(name)


def _content_bytes(value: object) -> int:
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.nbytes
    return value.bit_length() // 8 if type(value) is int else 0


def _is_key(key: object) -> bool:
    return type(key) in _KEY_TYPES or (type(key) is tuple and all(_is_key(part) for part in key))


def _below(path: str, key: object) -> str:
    """Return the path of the value under a key: `x.name`, or `x{(1, 2)}` if the key is not a name."""
    if type(key) is str and len(key) <= 200 and key.isprintable():
        return f"{path}.{key}" if path else key
    # Only known types have a repr that is cheap and cannot raise.
    try:
        shown = f"{key[:200]!r}" if type(key) is str else f"{key!r:.200}" if _is_key(key) else f"<{_type_name(key)}>"
    except ValueError:
        shown = "<a huge integer>"  # Python refuses to write one in decimal.
    return f"{path}{{{shown}}}"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _decode(document: object, path: str, depth: int) -> object:
    if is_json_scalar(document):
        return document
    if depth > DEPTH_MAX:
        raise CorruptError(f"{path}: nested deeper than {DEPTH_MAX} levels of JSON")
    if type(document) is list:
        return _decode_list(document, path, depth)
    if type(document) is not dict or not all(type(key) is str and is_json_scalar(key) for key in document):
        raise CorruptError(f"{path}: {document!r:.80} of type {_type_name(document)}; expected an encoded value")
    if not any(key.startswith("$") for key in document):
        return {key: _decode(item, _below(path, key), depth + 1) for key, item in document.items()}
    if len(document) != 1:
        raise CorruptError(f"{path}: an object with a tag has one key, found {[key[:40] for key in document][:10]}")
    [(tag, content)] = document.items()
    if tag not in _CONTAINER_OF_TAG and tag not in _CODEC_OF_TAG:
        raise CorruptError(f"{path}: unknown tag {tag[:80]!r}. Read it with a later version of Holdfast")
    try:
        if tag in _CONTAINER_OF_TAG:
            return _CONTAINER_OF_TAG[tag](content, path, depth)
        return _CODEC_OF_TAG[tag].decode(content)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise CorruptError(f"{path}: {tag}: {error}") from error


def _items(content: object) -> list[object]:
    if type(content) is not list:
        raise ValueError(f"expected a list, got {_type_name(content)}")
    return content


def _decode_list(content: object, path: str, depth: int) -> list[object]:
    return [_decode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(_items(content))]


def _decode_set(content: object, path: str, depth: int) -> set[object]:
    items = _decode_list(content, path, depth + 1)
    members = set(items)
    if len(members) != len(items):
        raise ValueError(f"a set of {len(items)} members repeats one")
    return members


def _decode_pairs(content: object, path: str, depth: int, into: dict[object, Any]) -> dict[object, Any]:
    items = _items(content)
    for index, pair in enumerate(items):
        if type(pair) is not list or len(pair) != 2:
            raise ValueError(f"item {index} is not a pair of key and value")
        key = _decode(pair[0], f"{path}{{key {index}}}", depth)
        if not _is_key(key):
            raise ValueError(f"key {index} is of type {_type_name(key)}")
        if key in into:
            raise CorruptError(f"{_below(path, key)}: the key is repeated")
        into[key] = _decode(pair[1], _below(path, key), depth)
    return into


def _decode_ordered_dict(content: object, path: str, depth: int) -> object:
    result: OrderedDict[object, object] = OrderedDict()
    if type(content) is not dict:
        return _decode_pairs(content, path, depth + 4, result)
    fields = exact_fields(content, {"items", "metadata"})
    _decode_pairs(fields["items"], path, depth + 4, result)
    vars(result)["_metadata"] = _decode(fields["metadata"], f"{path}._metadata", depth + 2)
    return result


def _decode_group(content: object, path: str, depth: int) -> Group:
    fields = exact_fields(content, {"kind", "items"})
    items = _decode(fields["items"], path, depth + 2)
    kind = next((known for known in _GROUP_KINDS if known == fields["kind"]), None)
    if kind is None:
        raise ValueError(f"unknown kind of group {fields['kind']!r:.80}")
    if type(items) is not dict or not all(type(name) is str for name in items):
        raise ValueError("the children of a group are not named by text")
    return Group(kind, items)


def _decode_framework_value(content: object, path: str, depth: int) -> FrameworkValue:
    fields = exact_fields(content, {"kind", "value"})
    return FrameworkValue(text_value(fields["kind"]), _decode(fields["value"], path, depth + 2))


_CONTAINER_OF_TAG: dict[str, Callable[[object, str, int], object]] = {
    "$tuple": lambda content, path, depth: tuple(_decode_list(content, path, depth + 1)),
    "$set": _decode_set,
    "$frozenset": lambda content, path, depth: frozenset(_decode_set(content, path, depth)),
    "$dict": lambda content, path, depth: _decode_pairs(content, path, depth + 3, {}),
    "$ordered_dict": _decode_ordered_dict,
    "$counter": lambda content, path, depth: _decode_pairs(content, path, depth + 3, Counter()),
    "$group": _decode_group,
    "$framework": _decode_framework_value,
}

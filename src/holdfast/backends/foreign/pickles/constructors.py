"""Substitutes for the functions that a pickle may call: each returns a plain value and calls nothing."""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from holdfast.backends.foreign.pickles.objects import GlobalName, OpaqueObject, UnsupportedPickle, is_dtype
from holdfast.backends.foreign.pickles.tensors import StoredTensor, view_of
from holdfast.base.types.values import FrameworkValue

Charge = Callable[[int], None]
"""Called with the bytes that are about to be copied; refuses copies out of proportion to the pickle."""

Call = Callable[[tuple[Any, ...], Charge], object]
"""Substitute for a class or function: checks the arguments and returns a plain value.

Raises ValueError or TypeError for arguments that the original refuses, `UnsupportedPickle` for those that Holdfast does
not support."""

DTYPE_OF_STORAGE = {
    "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Untyped": "",
}  # fmt: skip
"""Element type by class name of a storage, without the suffix `Storage`; empty for an untyped storage."""

STORAGE_DTYPES = {
    f"{module}.{name}Storage": dtype
    for name, dtype in DTYPE_OF_STORAGE.items()
    for module in ("torch", "torch.cuda", "torch.storage")
}
"""Element type by module and class of a storage."""

_PLAIN_TENSORS = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
_ENCODINGS = {"latin1", "latin-1", "iso-8859-1"}


def _bytes_of(args: tuple[Any, ...], charge: Charge) -> bytes:
    """Substitute `_codecs.encode`, with which protocols before 3 write bytes."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in _ENCODINGS:
        raise ValueError("_codecs.encode; expected text and latin1")
    charge(len(args[0]))
    return args[0].encode("latin-1")


def _bytearray(args: tuple[Any, ...], charge: Charge) -> bytearray:
    if args and type(args[0]) is str:
        return bytearray(_bytes_of(args, charge))
    (content,) = args or (b"",)
    if type(content) not in (list, bytes):
        raise ValueError(f"a bytearray of {type(content).__name__}; expected bytes")
    charge(len(content))
    return bytearray(content)


def _exactly(kind: Callable[..., object], *types: type) -> Call:
    """Return a substitute that calls a plain type with arguments of exactly these types."""

    def make(args: tuple[Any, ...], charge: Charge) -> object:
        if tuple(map(type, args)) != types:
            expected = ", ".join(argument.__name__ for argument in types) or "none"
            raise ValueError(f"the arguments of a {kind.__name__}; expected {expected}")
        return kind(*args)

    return make


def _members(kind: type, args: tuple[Any, ...], charge: Charge) -> Any:
    (members,) = args or ([],)
    if type(members) not in (list, tuple, set, frozenset):
        raise ValueError(f"a {kind.__name__} of {type(members).__name__}; expected a list")
    charge(256 + 64 * len(members))
    return kind(require_keys(members))


def _pairs(args: tuple[Any, ...], charge: Charge) -> Iterable[tuple[Any, Any]]:
    (content,) = args or ([],)
    charge(128 + 64 * len(content))
    if isinstance(content, dict):
        return content.items()
    if type(content) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in content):
        raise ValueError(f"a dict of {type(content).__name__}; expected pairs")
    require_keys(key for key, _ in content)
    return content


def _counter(args: tuple[Any, ...], charge: Charge) -> Counter[object]:
    counter: Counter[Any] = Counter()
    # Counter.update would add counts, and a saved Counter may hold any values.
    dict.update(counter, _pairs(args, charge))
    return counter


def _moment(kind: type[datetime.datetime] | type[datetime.date] | type[datetime.time], length: int) -> Call:
    def moment(args: tuple[Any, ...], charge: Charge) -> object:
        if len(args) == 2 and isinstance(args[1], OpaqueObject) and length != 4:
            return OpaqueObject(f"datetime.{kind.__name__}", args)  # Only the class of its time zone can interpret it.
        zoned = len(args) == 2 and isinstance(args[1], datetime.timezone) and length != 4
        if not (len(args) == 1 or zoned) or type(args[0]) is not bytes or len(args[0]) != length:
            raise UnsupportedPickle(f"a {kind.__name__} of another kind than fixed offsets; save it as text")
        return kind(*args)

    return moment


def _timezone(args: tuple[Any, ...], charge: Charge) -> datetime.timezone:
    if not 1 <= len(args) <= 2 or type(args[0]) is not datetime.timedelta or any(type(x) is not str for x in args[1:]):
        raise ValueError("a timezone; expected its offset")
    return datetime.timezone(args[0])  # Values do not store the name of a time zone.


def _path(kind: type[pathlib.PurePath]) -> Call:
    def path(args: tuple[Any, ...], charge: Charge) -> pathlib.PurePath:
        if any(type(part) is not str for part in args):
            raise ValueError("a path; expected its parts as text")
        charge(sum(map(len, args)) + len(args))
        return kind(*args)

    return path


def _size(args: tuple[Any, ...], charge: Charge) -> tuple[object, ...]:
    if len(args) != 1 or type(args[0]) not in (tuple, list):
        raise ValueError("a torch.Size; expected its lengths")
    charge(8 * len(args[0]))
    return tuple(args[0])


def _device(args: tuple[Any, ...], charge: Charge) -> FrameworkValue:
    if not 1 <= len(args) <= 2 or type(args[0]) is not str or any(type(index) is not int for index in args[1:]):
        raise ValueError("a torch.device; expected its type and index")
    return FrameworkValue("torch.device", ":".join(map(str, args)))


def _tensor(args: tuple[Any, ...], charge: Charge) -> StoredTensor:
    """Substitute `_rebuild_tensor_v2`, and `_rebuild_tensor`, which has its first four arguments."""
    if not 4 <= len(args) <= 7:
        raise ValueError(f"a tensor of {len(args)} arguments; expected storage, offset, shape and strides")
    _require_plain_bits(args[6] if len(args) == 7 else None)
    return view_of(*args[:4])


def _typed_tensor(args: tuple[Any, ...], charge: Charge) -> StoredTensor:
    """Substitute `_rebuild_tensor_v3`, for types whose storage is untyped."""
    if not 7 <= len(args) <= 8 or not is_dtype(args[6]):
        raise ValueError(f"a tensor of {len(args)} arguments; expected storage, offset, shape, strides and dtype")
    _require_plain_bits(args[7] if len(args) == 8 else None)
    return view_of(args[0], args[1], args[2], args[3], str(args[6].value))


def _require_plain_bits(marks: object) -> None:
    """Refuse a view that is the conjugate or negative of the stored values."""
    if isinstance(marks, dict) and any(marks.get(mark) for mark in ("conj", "neg")):
        raise UnsupportedPickle(
            "a tensor stored as the conjugate or negative of its values; save .resolve_conj().resolve_neg()"
        )


def _parameter(args: tuple[Any, ...], charge: Charge) -> object:
    if not args or not isinstance(args[0], StoredTensor):
        raise ValueError("a parameter; expected a tensor")
    return args[0]


def _of_type(args: tuple[Any, ...], charge: Charge) -> object:
    """Substitute `_rebuild_from_type_v2`: a tensor of a subclass, or with attributes, which are left out."""
    if len(args) != 4 or not all(isinstance(name, GlobalName) for name in args[:2]) or type(args[2]) is not tuple:
        raise ValueError("a tensor of a subclass; expected function, type, arguments and state")
    # Only the class of a tensor can say what its data means: a DTensor holds a shard, a quantized tensor integers.
    function, kind = args[0].qualname, args[1].qualname
    if function not in _TENSORS or kind not in _PLAIN_TENSORS:
        raise UnsupportedPickle(
            f"a tensor of class {kind}, which only that class can interpret; save plain tensors (a DTensor's "
            ".full_tensor()), or a sharded state with torch.distributed.checkpoint"
        )
    return _TENSORS[function](args[2], charge)


_MEMBER_CHARACTERS_MAX = 500


def _member(args: tuple[Any, ...], charge: Charge) -> GlobalName:
    """Substitute `getattr`, which names enum members and methods."""
    if len(args) != 2 or not isinstance(args[0], GlobalName) or type(args[1]) is not str:
        raise UnsupportedPickle("getattr of an object that is not a known class; save plain values instead")
    # An attribute of a builtin may be any function, e.g. `str.format`; no training state needs one.
    if args[0].qualname.startswith("builtins."):
        raise UnsupportedPickle(f"getattr of {args[0].qualname}; save plain values instead")
    characters = len(args[0].qualname) + 1 + len(args[1])
    if characters > _MEMBER_CHARACTERS_MAX:
        raise ValueError(f"a member whose name has {characters} characters; expected {_MEMBER_CHARACTERS_MAX} at most")
    charge(128 + characters)
    return GlobalName(f"{args[0].qualname}.{args[1]}")


_KEY_VALUES_MAX = 64
_KEY_BITS_MAX = 1024
_KEY_CHARACTERS_MAX = 4096
"""Longest text and bytes in a key. Equal keys that are distinct objects are compared byte by byte."""


def require_keys(keys: Iterable[object]) -> Any:
    """Return keys as a list, after checking that each is fast to hash.

    Raises:
        ValueError: A key has no hash, or is too large.
    """
    checked = list(keys)
    for key in checked:
        if type(key) is not str or len(key) > _KEY_CHARACTERS_MAX:
            _require_key(key)
    return checked


def _require_key(key: object) -> None:
    waiting, count, characters = [key], 0, 0
    while waiting:
        part = waiting.pop()
        count += 1
        if count > _KEY_VALUES_MAX:
            raise ValueError(f"a key of over {_KEY_VALUES_MAX} values")
        if isinstance(part, tuple | frozenset):
            count += max(len(part) - _KEY_VALUES_MAX, 0)
            waiting += list(part)[:_KEY_VALUES_MAX]
        elif isinstance(part, str | bytes):
            characters += len(part)
            if characters > _KEY_CHARACTERS_MAX:
                raise ValueError(f"a key of over {_KEY_CHARACTERS_MAX} characters")
        elif isinstance(part, int):
            if part.bit_length() > _KEY_BITS_MAX:
                raise ValueError(f"a key of over {_KEY_BITS_MAX} bits")
        elif type(part) not in _KEY_TYPES and not isinstance(part, np.generic):
            raise ValueError(f"a key of type {type(part).__name__}")


_KEY_TYPES = {
    float, complex, type(None), OpaqueObject, GlobalName, datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, datetime.timezone, pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath,
    FrameworkValue,
}  # fmt: skip

_TENSORS: Mapping[str, Call] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}

_PATHS: Mapping[str, type[pathlib.PurePath]] = {
    "PosixPath": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}

CALLS: Mapping[str, Call] = {
    "_codecs.encode": _bytes_of,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _exactly(bytes),
    "builtins.complex": _exactly(complex, float, float),
    "builtins.getattr": _member,
    "builtins.set": lambda args, charge: _members(set, args, charge),
    "builtins.frozenset": lambda args, charge: _members(frozenset, args, charge),
    "collections.Counter": _counter,
    "collections.OrderedDict": lambda args, charge: OrderedDict(_pairs(args, charge)),
    "collections.defaultdict": lambda args, charge: dict(_pairs(args[1:], charge)),
    "datetime.date": _moment(datetime.date, 4),
    "datetime.datetime": _moment(datetime.datetime, 10),
    "datetime.time": _moment(datetime.time, 6),
    "datetime.timedelta": _exactly(datetime.timedelta, int, int, int),
    "datetime.timezone": _timezone,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.torch_version.TorchVersion": _exactly(str, str),
    "torch._tensor._rebuild_from_type_v2": _of_type,
    **_TENSORS,
    **{f"{module}.{name}": _path(kind) for name, kind in _PATHS.items() for module in ("pathlib", "pathlib._local")},
}
"""Substitutes by module and name."""

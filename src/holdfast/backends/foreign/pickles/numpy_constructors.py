"""Substitutes for numpy's functions in a pickle: they make arrays and scalars of plain types from checked bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.backends.foreign.pickles.constructors import Call, Charge
from holdfast.backends.foreign.pickles.objects import GlobalName, OpaqueObject, UnsupportedPickle

_PLAIN = re.compile(r"(b1|i[1248]|u[1248]|f[248]|c8|c16|[SU][1-9][0-9]{0,8})")
_OTHER = re.compile(r"(M8|m8|O8|V[0-9]{1,9}|[fc][0-9]{1,2})")
_KINDS = {"M": "datetime64", "m": "timedelta64", "O": "object_", "f": "longdouble", "c": "clongdouble"}
_LEFT_OUT = np.dtype("V1")
"""Type of the array that replaces one of an unsupported type."""

_DIMENSIONS_MAX = 32


class DTypeInPickle:
    """A numpy dtype. A pickle states its byte order in a second step."""

    def __init__(self, text: str) -> None:
        """Start from the name of the type, e.g. `f8`."""
        self._text = text
        self._order = "<"

    def build(self, state: object) -> None:
        """Set the byte order, from the argument of `__setstate__`."""
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise ValueError("a numpy dtype whose state has no byte order")
        self._order = "<" if state[1] == "=" else state[1]

    def numpy(self) -> np.dtype[Any]:
        """Return the dtype of numpy."""
        return np.dtype(f"{self._order}{self._text}")

    @property
    def is_plain(self) -> bool:
        """Whether it is a type of numbers or text. Values of other types are left out."""
        return _PLAIN.fullmatch(self._text) is not None

    @property
    def qualname(self) -> str:
        """Name of its values in a remark."""
        return f"numpy.{_KINDS.get(self._text[0], 'void')}"


def fill(array: np.ndarray[Any, Any], state: object, charge: Charge) -> None:
    """Fill an array that a pickle made, from the argument of `__setstate__`.

    Raises:
        ValueError: The bytes do not fill the shape.
    """
    if type(state) is not tuple or len(state) != 5:
        raise ValueError("a numpy array without version, shape, dtype, order and bytes")
    _, shape, dtype, is_fortran, data = state
    if isinstance(dtype, DTypeInPickle) and not dtype.is_plain:
        array.__setstate__((1, (0,), _LEFT_OUT, False, b""))  # type: ignore[arg-type]
        return
    kind = _required_kind(data, dtype, shape, charge)
    array.__setstate__((1, shape, kind, is_fortran is True, bytes(data)))  # type: ignore[arg-type]


def _array(data: Any, dtype: object, shape: Any, order: Any, charge: Charge) -> np.ndarray[Any, Any]:
    kind = _required_kind(data, dtype, shape, charge)
    flat = np.frombuffer(data, kind) if data else np.empty(0, kind)
    return np.array(flat.reshape(shape, order=order))


def _required_kind(data: object, dtype: object, shape: object, charge: Charge) -> np.dtype[Any]:
    """Return the type of an array, after checking that its bytes fill its shape."""
    if not isinstance(dtype, DTypeInPickle) or type(shape) is not tuple or len(shape) > _DIMENSIONS_MAX:
        raise ValueError("a numpy array without dtype and shape")
    if type(data) not in (bytes, bytearray) or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"a numpy array of {type(data).__name__}; expected bytes, and counts as its shape")
    assert isinstance(data, bytes | bytearray)
    kind = dtype.numpy()
    if math.prod(shape) * kind.itemsize != len(data) or math.prod(length or 1 for length in shape) >= 1 << 40:
        raise ValueError(f"a numpy array of {kind} {list(shape)} in {len(data)} bytes")
    charge(len(data) + 128)
    return kind


def _dtype(args: tuple[Any, ...], charge: Charge) -> DTypeInPickle:
    if not args or type(args[0]) is not str:
        raise ValueError("a numpy dtype; expected its text")
    if not _PLAIN.fullmatch(args[0]) and not _OTHER.fullmatch(args[0]):
        raise UnsupportedPickle(f"a numpy dtype {args[0][:40]!r}; expected numbers or text. Save those, or a tensor")
    return DTypeInPickle(args[0])


def _scalar(args: tuple[Any, ...], charge: Charge) -> object:
    if len(args) != 2:
        raise ValueError("a numpy scalar; expected dtype and bytes")
    if isinstance(args[0], DTypeInPickle) and not args[0].is_plain:
        return OpaqueObject(args[0].qualname)
    return _array(args[1], args[0], (), "C", charge)[()]


def _reconstruct(args: tuple[Any, ...], charge: Charge) -> np.ndarray[Any, Any]:
    if not args or args[0] != GlobalName("numpy.ndarray"):
        raise UnsupportedPickle("a subclass of numpy's array; save numpy.asarray(value) instead")
    return np.empty(0)


def _from_buffer(args: tuple[Any, ...], charge: Charge) -> object:
    if len(args) != 4 or args[3] not in ("C", "F"):
        raise ValueError("a numpy array; expected buffer, dtype, shape and order")
    if isinstance(args[1], DTypeInPickle) and not args[1].is_plain:
        return OpaqueObject(f"numpy.ndarray of {args[1].qualname}")
    return _array(*args, charge)


NUMPY_CALLS: Mapping[str, Call] = {
    "numpy.dtype": _dtype,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy._core.numeric._frombuffer": _from_buffer,
}
"""Substitutes by module (as numpy 2 names it) and name."""

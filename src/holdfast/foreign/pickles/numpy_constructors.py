"""What stands in for numpy's own functions in a pickle: arrays and scalars of plain types, made of bytes at hand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.foreign.pickles.constructors import Call, Charge
from holdfast.foreign.pickles.objects import GlobalName, OpaqueObject, UnsupportedPickle

_PLAIN = re.compile(r"(b1|i[1248]|u[1248]|f[248]|c8|c16|[SU][1-9][0-9]{0,8})")
_OTHER = re.compile(r"(M8|m8|O8|V[0-9]{1,9}|[fc][0-9]{1,2})")
_KINDS = {"M": "datetime64", "m": "timedelta64", "O": "object_", "f": "longdouble", "c": "clongdouble"}
_LEFT_OUT = np.dtype("V1")
"""Type of an array that stands for one which is not read."""

_DIMENSIONS_MAX = 32


class DTypeInPickle:
    """A numpy dtype; a pickle tells its byte order after it has named it."""

    def __init__(self, text: str) -> None:
        """Take the text it is named by, e.g. `f8`."""
        self._text = text
        self._order = "<"

    def build(self, state: object) -> None:
        """Take byte order from `__setstate__`."""
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise ValueError("a numpy dtype whose state tells no byte order")
        self._order = "<" if state[1] == "=" else state[1]

    def numpy(self) -> np.dtype[Any]:
        """Return it as numpy's."""
        return np.dtype(f"{self._order}{self._text}")

    @property
    def is_plain(self) -> bool:
        """Whether it is of numbers or text; others are named, and what is of them is left out."""
        return _PLAIN.fullmatch(self._text) is not None

    @property
    def qualname(self) -> str:
        """What a value of it is called in a remark."""
        return f"numpy.{_KINDS.get(self._text[0], 'void')}"


def fill(array: np.ndarray[Any, Any], state: object, spend: Charge) -> None:
    """Fill an array that a pickle has begun, from what `__setstate__` would get.

    Raises:
        ValueError: Its bytes do not fill its shape.
    """
    if type(state) is not tuple or len(state) != 5:
        raise ValueError("a numpy array whose state is not version, shape, dtype, order and bytes")
    _, shape, dtype, is_fortran, data = state
    if isinstance(dtype, DTypeInPickle) and not dtype.is_plain:
        array.__setstate__((1, (0,), _LEFT_OUT, False, b""))  # type: ignore[arg-type]
        return
    kind = _required_kind(data, dtype, shape, spend)
    array.__setstate__((1, shape, kind, is_fortran is True, bytes(data)))  # type: ignore[arg-type]


def _array(data: Any, dtype: object, shape: Any, order: Any, spend: Charge) -> np.ndarray[Any, Any]:
    kind = _required_kind(data, dtype, shape, spend)
    flat = np.frombuffer(data, kind) if data else np.empty(0, kind)
    return np.array(flat.reshape(shape, order=order))


def _required_kind(data: object, dtype: object, shape: object, spend: Charge) -> np.dtype[Any]:
    """Return the type of an array once its bytes are known to fill it."""
    if not isinstance(dtype, DTypeInPickle) or type(shape) is not tuple or len(shape) > _DIMENSIONS_MAX:
        raise ValueError("a numpy array without dtype and shape")
    if type(data) not in (bytes, bytearray) or any(type(each) is not int or each < 0 for each in shape):
        raise ValueError(f"a numpy array of {type(data).__name__}; expected bytes, and counts as its shape")
    assert isinstance(data, bytes | bytearray)
    kind = dtype.numpy()
    if math.prod(shape) * kind.itemsize != len(data) or math.prod(each or 1 for each in shape) >= 1 << 40:
        raise ValueError(f"a numpy array of {kind} {list(shape)} in {len(data)} bytes")
    spend(len(data) + 128)
    return kind


def _dtype(args: tuple[Any, ...], spend: Charge) -> DTypeInPickle:
    if not args or type(args[0]) is not str:
        raise ValueError("a numpy dtype; expected its text")
    if not _PLAIN.fullmatch(args[0]) and not _OTHER.fullmatch(args[0]):
        raise UnsupportedPickle(
            f"a numpy dtype {args[0][:40]!r}; expected plain numbers or text. Save those, or a tensor"
        )
    return DTypeInPickle(args[0])


def _scalar(args: tuple[Any, ...], spend: Charge) -> object:
    if len(args) != 2:
        raise ValueError("a numpy scalar; expected dtype and bytes")
    if isinstance(args[0], DTypeInPickle) and not args[0].is_plain:
        return OpaqueObject(args[0].qualname)
    return _array(args[1], args[0], (), "C", spend)[()]


def _begun(args: tuple[Any, ...], spend: Charge) -> np.ndarray[Any, Any]:
    if not args or args[0] != GlobalName("numpy.ndarray"):
        raise UnsupportedPickle("a subclass of numpy's array; save numpy.asarray(value) instead")
    return np.empty(0)


def _from_buffer(args: tuple[Any, ...], spend: Charge) -> object:
    if len(args) != 4 or args[3] not in ("C", "F"):
        raise ValueError("a numpy array; expected buffer, dtype, shape and order")
    if isinstance(args[1], DTypeInPickle) and not args[1].is_plain:
        return OpaqueObject(f"numpy.ndarray of {args[1].qualname}")
    return _array(*args, spend)


NUMPY_CALLS: Mapping[str, Call] = {
    "numpy.dtype": _dtype,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.multiarray._reconstruct": _begun,
    "numpy._core.numeric._frombuffer": _from_buffer,
}
"""What may be called, by module (as numpy 2 names it) and name."""

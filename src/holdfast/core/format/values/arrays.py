"""numpy arrays and scalars as documents: dtype, shape and row-major bytes, checked before memory is allocated."""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt

from holdfast.core.format.values.json_text import is_json_scalar
from holdfast.core.format.values.scalars import base64_document, base64_value, text_document, text_value

_DTYPE = re.compile(r"[<>|][biufcSUV][1-9]\d{0,9}|[<>][mM]8(\[([1-9]\d{0,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_CODE_POINT_MAX = 0x10FFFF


def encode_array(array: npt.NDArray[np.generic]) -> object:
    """Return the content of `$ndarray`: dtype text, shape, base64 of the elements in C order.

    Raises:
        ValueError: Its dtype has no meaning on another machine.
    """
    dtype = _dtype_text(array.dtype)
    data = array.tobytes(order="C")
    _check_characters(dtype, data)
    return {"dtype": dtype, "shape": list(array.shape), "data": base64_document(data)}


def decode_array(content: object) -> npt.NDArray[np.generic]:
    """Return a writable array that owns its memory.

    Raises:
        ValueError: The content is no result of `encode_array`. This is checked before the elements are allocated.
    """
    fields = exact_fields(content, {"dtype", "shape", "data"})
    dtype = _dtype(fields["dtype"])
    shape = fields["shape"]
    # With at most 64 extents, even their exact product stays small enough to compute.
    if type(shape) is not list or len(shape) > 64 or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError("expected a shape of at most 64 extents, none negative")
    data = base64_value(fields["data"], math.prod(shape) * dtype.itemsize)
    _check_characters(dtype.str, data)
    view: npt.NDArray[np.generic] = np.ndarray(tuple(shape), dtype, buffer=data)
    return view.copy()


def encode_scalar(scalar: np.generic) -> object:
    """Return the content of `$scalar`: dtype text, and the number if JSON holds it exactly, else its bytes.

    Raises:
        ValueError: Its type has no meaning on another machine.
    """
    # Most numpy conversions, str() included, drop trailing NULs of strings. The base classes' methods do not.
    if type(scalar) is np.str_:
        return {"dtype": "U", "value": text_document(str.__str__(scalar))}
    if type(scalar) is np.bytes_:
        return {"dtype": "S", "data": base64_document(bytes(scalar))}
    if type(scalar) is not scalar.dtype.type:
        raise ValueError("it is a subclass of a numpy scalar; convert it to the base type")
    dtype = _dtype_text(scalar.dtype)
    number: object = scalar.item() if scalar.dtype.kind in "biuf" else None
    if number is not None and is_json_scalar(number):
        return {"dtype": dtype, "value": number}
    return {"dtype": dtype, "data": base64_document(scalar.tobytes())}


def decode_scalar(content: object) -> np.generic:
    """Return the scalar of a content.

    Raises:
        ValueError, OverflowError: The content is no result of `encode_scalar`.
    """
    if type(content) is not dict or content.keys() not in ({"dtype", "value"}, {"dtype", "data"}):
        raise ValueError("expected the fields dtype and either value or data")
    if content["dtype"] == "U" and "value" in content:
        return np.str_(text_value(content["value"]))
    if content["dtype"] == "S" and "data" in content:
        return np.bytes_(base64_value(content["data"]))
    dtype = _dtype(content["dtype"])
    if "value" in content:
        return _number(dtype, content["value"])
    data = base64_value(content["data"], dtype.itemsize)
    if dtype.kind in "SU":
        raise ValueError(f"dtype {dtype.str} belongs to arrays only")
    scalar: object = np.ndarray((), dtype, buffer=data)[()]
    assert isinstance(scalar, np.generic)
    return scalar


def _number(dtype: np.dtype[np.generic], value: object) -> np.generic:
    if type(value) is not {"b": bool, "i": int, "u": int, "f": float}.get(dtype.kind):
        raise ValueError(f"value of type {type(value).__name__} does not fit dtype {dtype.str}")
    with np.errstate(all="ignore"):
        scalar: object = dtype.type(value)
    assert isinstance(scalar, np.generic)
    if scalar.item() != value:
        raise ValueError(f"{value!r:.40} is not a number of dtype {dtype.str}")
    return scalar


def _dtype_text(dtype: np.dtype[np.generic]) -> str:
    """Return a dtype's text. Raises ValueError for structured, object, extension and long double dtypes."""
    text = dtype.str
    try:
        same = _dtype(text) == dtype
    except ValueError:
        same = False
    if not same or dtype.metadata is not None:
        raise ValueError(f"dtype {dtype!r:.80} is not supported; view or convert it as plain numbers first")
    return text


def _dtype(text: object) -> np.dtype[np.generic]:
    if type(text) is not str or not _DTYPE.fullmatch(text):
        raise ValueError(f"unknown dtype {text!r:.80}")
    try:
        dtype: np.dtype[np.generic] = np.dtype(text)
    except TypeError as error:
        raise ValueError(f"unknown dtype {text!r:.80}") from error
    # Long doubles have one name but several layouts: on another machine the same bytes are other numbers.
    if dtype.type in (np.longdouble, np.clongdouble) or dtype.str != text:
        raise ValueError(f"unknown dtype {text!r:.80}")
    return dtype


def _check_characters(dtype: str, data: bytes) -> None:
    if dtype[1] == "U" and np.frombuffer(data, f"{dtype[0]}u4").max(initial=0) > _CODE_POINT_MAX:
        raise ValueError("a character is beyond Unicode")


def exact_fields(content: object, names: set[str]) -> dict[str, object]:
    """Return a JSON object that has exactly these fields.

    Raises:
        ValueError: It is no object, or has other fields.
    """
    if type(content) is not dict or content.keys() != names:
        raise ValueError(f"expected the fields {', '.join(sorted(names))}")
    return content

"""The element types Holdfast stores, by their safetensors names and by what numpy can hold."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    """The name torch and numpy use, without a module: `float32`, `bfloat16`, `float8_e4m3fn`."""

    safetensors: str
    """The name in a safetensors header: `F32`, `BF16`, `F8_E4M3`; empty for a type safetensors lacks."""

    itemsize: int
    """Bytes of one element."""

    numpy: str
    """The numpy dtype that holds the same bits; an unsigned integer where numpy lacks the type."""

    floating: bool = False
    """Whether it is a floating or complex type, so that replicas of it are expected to agree."""


_ALL = (
    DType("bool", "BOOL", 1, "bool"),
    DType("uint8", "U8", 1, "uint8"),
    DType("int8", "I8", 1, "int8"),
    DType("uint16", "U16", 2, "uint16"),
    DType("int16", "I16", 2, "int16"),
    DType("uint32", "U32", 4, "uint32"),
    DType("int32", "I32", 4, "int32"),
    DType("uint64", "U64", 8, "uint64"),
    DType("int64", "I64", 8, "int64"),
    DType("float16", "F16", 2, "float16", floating=True),
    DType("bfloat16", "BF16", 2, "uint16", floating=True),
    DType("float32", "F32", 4, "float32", floating=True),
    DType("float64", "F64", 8, "float64", floating=True),
    DType("complex64", "C64", 8, "complex64", floating=True),
    DType("complex32", "", 4, "uint32", floating=True),
    DType("complex128", "", 16, "complex128", floating=True),
    DType("float8_e4m3fn", "F8_E4M3", 1, "uint8", floating=True),
    DType("float8_e5m2", "F8_E5M2", 1, "uint8", floating=True),
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 1, "uint8", floating=True),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 1, "uint8", floating=True),
    DType("float8_e8m0fnu", "F8_E8M0", 1, "uint8", floating=True),
    DType("float4_e2m1fn_x2", "", 1, "uint8", floating=True),
)

DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
"""Every stored element type by name."""

BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _ALL if dtype.safetensors}
"""Every stored element type by its name in a safetensors header."""

PAIRS = "float4_e2m1fn_x2"
"""The type whose elements are two numbers of 4 bits. Nothing converts it."""

_SINGLE = "F4"
"""Its numbers one by one, as safetensors counts them: there the last dimension is twice as long."""

NEWER_TYPES = frozenset({"float8_e8m0fnu", PAIRS})
"""Element types that format 1.5 added."""


def as_safetensors(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape of a tensor in a safetensors file; an empty name if safetensors lacks the type."""
    if dtype == PAIRS and shape:
        return _SINGLE, (*shape[:-1], 2 * shape[-1])
    return DTYPES[dtype].safetensors, shape


def of_safetensors(name: str, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]] | None:
    """Return the element type and shape of a tensor of a safetensors file; None if Holdfast does not store it."""
    if name == _SINGLE and shape and shape[-1] % 2 == 0:
        return DTYPES[PAIRS], (*shape[:-1], shape[-1] // 2)
    known = BY_SAFETENSORS.get(name)
    return None if known is None else (known, shape)


def are_floats_and_integers(first: str, second: str) -> bool:
    """Return whether one of two element types holds floats and the other integers; a bool is neither."""
    return "bool" not in (first, second) and DTYPES[first].floating != DTYPES[second].floating


def dtype_named(name: str, where: str) -> DType:
    """Return the element type called `name`.

    Args:
        name: A name such as `float32`.
        where: What carries it, for the message.
    Raises:
        InvalidError: Holdfast does not store this type.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise InvalidError(
            f"{where}: dtype {name} cannot be stored; expected one of {', '.join(DTYPES)}. "
            "Convert the tensor, or leave it out with skip="
        ) from None


WEIGHT_TYPES = ("bfloat16", "float16")
"""Element types of weights that are kept in 16 bits."""

BFLOAT16_NAN = 0x7FC0
"""The bits of the NaN that a cast to bfloat16 gives."""

MASTER_TYPE = "float32"
"""Element type of the masters that such weights are rounded from."""

"""Lists the names that a pickle may use, and the substitute of each. Every other name is refused."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.backends.foreign.pickles.constructors import CALLS, STORAGE_DTYPES
from holdfast.backends.foreign.pickles.numpy_constructors import NUMPY_CALLS
from holdfast.backends.foreign.pickles.objects import GlobalName, UnsupportedPickle
from holdfast.base.types.values import FrameworkValue

KNOWN_CALLS = {**CALLS, **NUMPY_CALLS}
"""Substitutes for functions and classes, by module and name."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DTYPES = _names(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 "
    "qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 "
    "int3 int4 int5 int6 int7"
)
"""torch's element types. A tensor of a type that Holdfast does not store is refused."""

_SHORT_DTYPES = {
    "half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32",
}  # fmt: skip

NAME_CHARACTERS_MAX = 500
"""Longest module or name."""

_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}
"""Modules of Python 2, which protocols before 3 use."""

_RENAMED_BUILTINS = {"long": "int", "unicode": "str", "xrange": "range"}
"""Names of Python 2, which protocols before 3 use."""

_OPAQUE_PACKAGES = _names(
    "accelerate apex argparse bitsandbytes collections datasets deepspeed diffusers enum fairscale fractions hydra "
    "lightning lightning_fabric megatron nemo omegaconf pathlib peft pytorch_lightning timm torchao torchtitan "
    "transformer_engine transformers trl uuid zoneinfo"
)
"""Packages whose classes occur in training states. Their objects become an `OpaqueObject`."""

_OPAQUE_PREFIXES = (
    "numpy.random.", "torch.distributed.", "torch.nn.", "torch.optim.", "torch.serialization.", "torch.utils.",
    "torch.amp.", "torch.cuda.amp.", "torch.ao.",
)  # fmt: skip

_KNOWN_NAMES = _names(
    "builtins.Ellipsis builtins.bool builtins.dict builtins.float builtins.int builtins.list builtins.object "
    "builtins.range builtins.slice builtins.str builtins.tuple copyreg._reconstructor dataclasses.MISSING "
    "decimal.Decimal functools.partial numpy.ndarray torch.Tensor torch._tensor.Tensor "
    "torch._utils._rebuild_wrapper_subclass "
    "torch.layout torch.memory_format torch.per_tensor_affine torch.strided types.SimpleNamespace typing.Any"
).union(KNOWN_CALLS, STORAGE_DTYPES)
"""Further names that the reader accepts, outside the opaque packages and prefixes."""

_REFUSED = {
    "torch.storage._load_from_bytes": "a tensor pickled outside torch.save; save the state with torch.save",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor; save .to_dense()",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor; save .to_dense()",
    "torch._utils._rebuild_nested_tensor": "a nested tensor; save .unbind()",
    "torch._utils._rebuild_qtensor": "a quantized tensor; save .dequantize(), or .int_repr() with its scale",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values; leave it out",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device without storages; save .cpu()",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device without storages; save .cpu()",
}


def resolved(module: str, name: str, also: Collection[str]) -> GlobalName | FrameworkValue:
    """Return the substitute for a global of a pickle.

    Args:
        module, name: As the pickle states them.
        also: Names (`module.name`) of further classes that become an `OpaqueObject`.
    Raises:
        ValueError: The name is too long.
        UnsupportedPickle: The name is not on the list.
    """
    if max(len(module), len(name)) > NAME_CHARACTERS_MAX:
        raise ValueError(f"a global whose name has {len(module)} + {len(name)} characters")
    if module == "__builtin__":
        name = _RENAMED_BUILTINS.get(name, name)
    module = _RENAMED_MODULES.get(module, module)
    if module.startswith("numpy.core."):
        module = "numpy._core." + module.removeprefix("numpy.core.")
    if module == "torch" and _SHORT_DTYPES.get(name, name) in _DTYPES:
        return FrameworkValue("torch.dtype", _SHORT_DTYPES.get(name, name))
    qualname = f"{module}.{name}"
    if qualname in _REFUSED:
        raise UnsupportedPickle(f"{qualname}: {_REFUSED[qualname]}")
    is_package_known = qualname.partition(".")[0] in _OPAQUE_PACKAGES or qualname.startswith(_OPAQUE_PREFIXES)
    if is_package_known or qualname in _KNOWN_NAMES or qualname in also:
        return GlobalName(qualname)
    raise UnsupportedPickle(
        f"{qualname!r}: not on the list of names that Holdfast reads; expected plain values, tensors, or types of a "
        "known training system. Nothing was imported. Save it as plain values"
    )

"""What to pass in place of a value that cannot be saved, by its type: a sentence for the error.

Nothing of the value is called: its type decides, and properties of the value might run any code.
"""

from __future__ import annotations

import decimal
import enum
import functools
import types
import uuid
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from datetime import date, time
from numbers import Number

import numpy as np

from holdfast.base.geometry.sharded import Sharded
from holdfast.base.types.per_rank import PerRank, RngState

_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.ModuleType,
    type,
    np.ufunc,
)
_METHODS = ("to_dict", "model_dump", "as_dict", "asdict", "get_state", "getstate")
"""Methods that return plain values by convention: of configurations of Transformers and pydantic, and of random
generators."""

_BASES = {
    kind: kind.__name__ for kind in (str, int, float, complex, bytes, bytearray, tuple, list, dict, set, frozenset)
}

_IN_THE_STATE = "Pass it as an entry of a dict with str keys, of a list or of a tuple in the state"
_ANY = "Convert it to plain values, or give the object that holds it state_dict() and load_state_dict()"


def way_out(value: object) -> str:
    """Return what to pass instead of a value: a sentence without its full stop."""
    kind = type(value)
    for of_kind in (_of_object, _of_code, _of_record, _of_plain_kind):
        text = of_kind(value, kind)
        if text is not None:
            return text
    if isinstance(value, Namespace | types.SimpleNamespace):
        return "Pass vars(value)"
    if getattr(kind, "__dictoffset__", 0):
        # A load replaces the dict in the state, not the attributes: so vars alone would resume an object that is new.
        return (
            "Give its class state_dict() and load_state_dict(), or pass vars(value) and set the attributes after a load"
        )
    return _ANY


def _of_object(value: object, kind: type) -> str | None:
    """Return the way out for what is saved as an object elsewhere in the state."""
    if isinstance(value, Sharded):
        return "Pass it as an entry of a dict with str keys in the state"
    if isinstance(value, PerRank | RngState):
        return _IN_THE_STATE
    if isinstance(value, type) or not _has(kind, "state_dict"):
        return None
    return _IN_THE_STATE if _has(kind, "load_state_dict") else "Pass value.state_dict()"


def _of_code(value: object, kind: type) -> str | None:
    if isinstance(value, functools.partial):
        return "It is code: make it again after a load, and pass its arguments, value.args and value.keywords"
    if isinstance(value, types.FunctionType) and value.__name__ == "<lambda>":
        return "It is code without a name: make it again after a load"
    if isinstance(value, _CODE):
        return "It is code: pass its name, value.__name__, and look it up after a load"
    return None


def _of_record(value: object, kind: type) -> str | None:
    """Return the way out for what has fields, or a method that returns them."""
    base = _base_of(value, kind)
    if isinstance(value, enum.Enum):
        return f"Pass value.name ({kind.__name__}[name] is the member)" + (f" or {base}(value)" if base else "")
    if base is not None and _has(kind, "_asdict"):
        return f"Pass value._asdict() or {base}(value)"
    if is_dataclass(kind):
        return "Pass dataclasses.asdict(value)"
    if _has(kind, "__attrs_attrs__"):
        return "Pass attrs.asdict(value)"
    if kind.__module__.partition(".")[0] == "omegaconf":
        return "Pass OmegaConf.to_container(value)"
    if isinstance(value, np.random.Generator):
        return "Pass value.bit_generator.state"
    if isinstance(value, np.random.BitGenerator):
        return "Pass value.state"
    return next((f"Pass value.{method}()" for method in _METHODS if _has(kind, method)), None)


def _of_plain_kind(value: object, kind: type) -> str | None:
    """Return the conversion to a type that is saved."""
    if isinstance(value, np.ndarray):
        return "Pass value.tolist()" if kind is np.ndarray else "Pass numpy.asarray(value)"
    if (base := _base_of(value, kind)) is not None:
        return f"Pass {base}(value)"
    if isinstance(value, date | time):
        return "Pass value.isoformat()"
    if isinstance(value, range | slice):
        return "Pass (value.start, value.stop, value.step)"
    if isinstance(value, Number | decimal.Decimal | uuid.UUID | np.dtype):
        return "Pass str(value)"
    for abstract, plain in ((Mapping, "dict"), (AbstractSet, "set"), (Sequence, "list"), (Collection, "list")):
        if isinstance(value, abstract):
            return f"Pass {plain}(value)"
    return None


def _base_of(value: object, kind: type) -> str | None:
    """Return the name of the type that is saved, for a value of a subclass of it."""
    return next((name for each, name in _BASES.items() if isinstance(value, each) and kind is not each), None)


def _has(kind: type, name: str) -> bool:
    return any(name in vars(each) for each in kind.__mro__)

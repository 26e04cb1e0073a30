"""Substitutes for the names and objects of a pickle, which are neither imported nor called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from holdfast.base.types.values import FrameworkValue


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function that a pickle names."""

    qualname: str
    """Module and name, e.g. `torch.FloatStorage`."""


@dataclass(slots=True, eq=False)
class OpaqueObject:
    """An object of an unknown class, or the result of an unknown function: only what the pickle states about it.

    Equality is identity, so an object can be a key of a dict.
    """

    qualname: str
    """Module and name of the class or function, e.g. `deepspeed.runtime.fp16.loss_scaler.LossScaler`."""

    args: tuple[object, ...] = ()
    """Arguments of the call, e.g. the value of an enum member or the fields of a named tuple."""

    state: object = None
    """Attributes by name, if the pickle states them so; else the argument of `__setstate__`."""

    items: list[object] | dict[object, object] | None = None
    """Its items, if the class is a kind of list or dict."""

    def attribute(self, name: str) -> object:
        """Return an attribute by name; None if there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def __repr__(self) -> str:
        return f"OpaqueObject({self.qualname})"


def is_dtype(value: object) -> TypeGuard[FrameworkValue]:
    """Return whether a value is an element type of torch."""
    return isinstance(value, FrameworkValue) and value.kind == "torch.dtype"


class UnsupportedPickle(Exception):
    """A pickle uses an unsupported feature. The message says which, and what to do; the reader adds the place."""

"""What a pickle names and we neither import nor call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function that a pickle names."""

    qualname: str
    """Module and name, e.g. `torch.FloatStorage`."""


@dataclass(frozen=True, slots=True)
class DTypeRef:
    """An element type of torch."""

    name: str
    """Its name without a module, e.g. `float32`; not every one is stored (`holdfast.geometry.dtype.DTYPES`)."""


@dataclass(slots=True, eq=False)
class OpaqueObject:
    """An object of a class we do not have, or what a function would have returned: only what the pickle says of it.

    Two are equal only if they are one, so an object may serve as a key.
    """

    qualname: str
    """Module and name of the class or function, e.g. `deepspeed.runtime.fp16.loss_scaler.LossScaler`."""

    args: tuple[object, ...] = ()
    """What it would have been called with: the value of an enum member, the fields of a named tuple."""

    state: object = None
    """Its attributes, as a dict by name wherever they are given by name; else what `__setstate__` would have got."""

    items: list[object] | dict[object, object] | None = None
    """What it contains as a list or as a dict, where it does."""

    def attribute(self, name: str) -> object:
        """Return an attribute by name, None where there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def __repr__(self) -> str:
        return f"Instance({self.qualname})"


class UnsupportedPickle(Exception):
    """What a pickle asks for is known and not given; says what and what to do. The reader adds the place."""

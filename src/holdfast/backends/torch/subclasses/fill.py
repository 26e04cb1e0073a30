"""Fills tensor subclasses: compares the record of a checkpoint with the tensor here, and asks for its inner tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.local_shards import Ranks
from holdfast.backends.torch.private_layout import local_tensor
from holdfast.backends.torch.subclasses.context import qualified
from holdfast.backends.torch.subclasses.flatten import Inner, flattened, is_subclass, references_of
from holdfast.backends.torch.subclasses.known import known_class
from holdfast.backends.torch.tensors import dtype_name
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.ports.framework import Catalog
from holdfast.base.types.values import FrameworkValue, Group, TensorRef, Value, is_subclass_record
from holdfast.errors import CorruptError, InvalidError, first_three


class InnerTaker(Protocol):
    """The load that fills inner tensors."""

    def want(self, fqn: str, tensor: torch.Tensor, declared: Sharded | None = None) -> bool:
        """Ask for a tensor to be filled; return whether the checkpoint has it."""
        ...

    def takes_part(self, name: str) -> bool:
        """Return whether `only` and `skip` select a name; record it as skipped if not."""
        ...


class SubclassFilling:
    """The tensor subclasses of one load."""

    def __init__(self, taker: InnerTaker, catalog: Catalog, ranks: Ranks, finishes: list[Callable[[], object]]) -> None:
        """Read nothing yet.

        Args:
            taker: The load.
            catalog: The checkpoint's tensors and values.
            ranks: This rank and the others.
            finishes: Receives what must run once all tensors are filled.
        """
        self._taker, self._ranks, self._finishes = taker, ranks, finishes
        self.catalog = catalog
        """The checkpoint's tensors and values; another one if the load finds further names."""

    @cached_property
    def _records(self) -> Mapping[str, FrameworkValue]:
        """Record by the name of each of its inner tensors. Found when first asked for: few states need them."""
        return {fqn: record for record in _records_in(self.catalog.tree) for _, fqn in references_of(record)}

    def want(self, fqn: str, tensor: torch.Tensor, declared: Sharded | None) -> bool:
        """Ask for the inner tensors of a subclass; return whether the checkpoint has it.

        Raises:
            InvalidError: The checkpoint has a plain tensor there, or another class, context, shape or split.
        """
        here = flattened(fqn, tensor, declared, self._ranks)
        record = next(filter(None, (self._record_of(f"{fqn}.{inner.name}") for inner in here.inner)), None)
        if record is None:
            if self.catalog.stored_fqn(fqn) in self.catalog.tensors:
                raise InvalidError(
                    f"{fqn}: is a plain tensor in the checkpoint and a {_class_here(tensor)} here; expected the same. "
                    "Load it into a plain tensor first and convert that, or leave it out with skip="
                )
            return False
        require_same(fqn, record, here.record)
        chosen = [inner for inner in here.inner if self._taker.takes_part(f"{fqn}.{inner.name}")]
        if chosen and len(chosen) < len(here.inner):
            raise InvalidError(
                f"{fqn}: only= and skip= select {first_three(inner.name for inner in chosen)} of its inner tensors "
                f"and leave others out; expected all or none. Name {fqn!r} itself"
            )
        for inner in chosen:
            self._want_inner(fqn, inner)
        if chosen:
            self._finishes.append(partial(_drop_caches, tensor))
        return True

    def take(self, record: FrameworkValue, current: Mapping[str, object]) -> torch.Tensor:
        """Return the present tensor for a record in a container, and ask for it.

        Args:
            record: The record.
            current: The tensors of the state there, by name.
        Raises:
            InvalidError: The state has no such tensor: a checkpoint chooses no class to make.
        """
        fqn = name_of(record)
        present = current.get(fqn)
        if isinstance(present, torch.Tensor) and (not self._taker.takes_part(fqn) or self._wants(fqn, present)):
            return present
        raise InvalidError(
            f"{fqn}: is a tensor subclass in the checkpoint, and the state has none to fill; expected a tensor of the "
            "same class. Build it before the load, or leave it out with skip="
        )

    def _wants(self, fqn: str, tensor: torch.Tensor) -> bool:
        return is_subclass(tensor) and self.want(fqn, tensor, None)

    def _want_inner(self, fqn: str, inner: Inner) -> None:
        self._require_form(f"{fqn}.{inner.name}", inner)
        if not self._taker.want(f"{fqn}.{inner.name}", inner.tensor, inner.declared):
            raise CorruptError(
                f"{fqn}: the checkpoint lacks the inner tensor {inner.name} that its record states; read another copy"
            )

    def _require_form(self, name: str, inner: Inner) -> None:
        """Refuse an inner tensor of another shape or dtype, whatever `partial` and `cast` say: they mean elements.

        Raises:
            InvalidError: Names what differs.
        """
        spec = self.catalog.tensors.get(self.catalog.stored_fqn(name))
        if spec is None:
            return
        shape = tuple(inner.tensor.shape) if inner.declared is None else tuple(inner.declared.global_shape)
        saved, here = f"{spec.dtype} {spec.global_shape}", f"{dtype_name(inner.tensor.dtype)} {shape}"
        if saved != here:
            raise InvalidError(
                f"{name}: this inner tensor of a tensor subclass is {saved} in the checkpoint and {here} here; "
                "expected the same, which partial= and cast= do not change. Build what was saved, or leave all of it "
                "out with skip="
            )

    def _record_of(self, fqn: str) -> FrameworkValue | None:
        return self._records.get(fqn) or self._records.get(self.catalog.stored_fqn(fqn))


def require_same(fqn: str, saved: FrameworkValue, here: FrameworkValue) -> None:
    """Refuse a record that differs from that of the tensor to fill.

    Raises:
        InvalidError: Names what differs.
    """
    stated = saved.value if isinstance(saved.value, dict) else {}
    own = here.value
    assert isinstance(own, dict), "the record of a tensor here is a dict"
    for key, what in _FIELDS.items():
        first, second = _comparable(key, stated.get(key)), _comparable(key, own.get(key))
        if first != second and key == "grid":
            raise other_grid(fqn, str(own["class"]), first, second)
        if first != second:
            raise InvalidError(
                f"{fqn}: {what} of this {own['class']} differs: {_shown(first)} in the checkpoint, {_shown(second)} "
                f"here. Build what was saved, or leave it out with skip="
            )


def other_grid(fqn: str, class_name: str, saved: str, here: str) -> InvalidError:
    """Return the error of inner tensors that were stored part by part, and are split otherwise here."""
    return InvalidError(
        f"{fqn}: the number of parts in each dimension of this {class_name} differs: {saved[:300]} in the checkpoint, "
        f"{here[:300]} here (None: one part). Holdfast does not know how to split its inner tensors anew. Load it on "
        "as many ranks, sharded as it was saved, or leave it out with skip="
    )


_FIELDS = {
    "class": "the class",
    "shape": "the shape",
    "dtype": "the dtype",
    "grid": "the grid",
    "context": "the context",
    "tensors": "the list of inner tensors",
}
"""Fields of a record, each as messages name it."""


def _comparable(key: str, value: Value) -> str:
    """Return a field as text: unlike `==`, it distinguishes `1` from `True`."""
    if key == "tensors" and isinstance(value, dict):
        value = {name: _without_names(inner) for name, inner in value.items()}
    return text_of(value)


def text_of(value: Value) -> str:
    """Return the `repr` of what a record states, by which two are compared. Integers that are too long equal none."""
    try:
        return repr(value)
    except ValueError:
        return f"an integer that is too long for Python to convert to decimal (object {id(value)})"


def _without_names(inner: Value) -> Value:
    """Return a nested record without the names of its tensors, which a load may change."""
    if not is_subclass_record(inner):
        return None if isinstance(inner, TensorRef) else "no tensor"
    fields = inner.value if isinstance(inner.value, dict) else {}
    return {key: _comparable(key, value) for key, value in fields.items()}


def _shown(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


def name_of(record: FrameworkValue) -> str:
    """Return the name of the tensor that a record stands for.

    Raises:
        CorruptError: It states no inner tensor.
    """
    for name, fqn in references_of(record):
        if fqn.endswith(f".{name}"):
            return fqn.removesuffix(f".{name}")
    raise CorruptError("the record of a tensor subclass states no inner tensor; read another copy")


def _class_here(tensor: torch.Tensor) -> str:
    return qualified(type(local_tensor(tensor) if isinstance(tensor, DTensor) else tensor))


def _drop_caches(tensor: torch.Tensor) -> None:
    """Forget what follows from elements that will be filled."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    known = known_class(type(local))
    for name in () if known is None else known.caches:
        setattr(local, name, None)


def _records_in(value: Value) -> Iterator[FrameworkValue]:
    """Yield every record in a tree of values."""
    if is_subclass_record(value):
        yield value
        return
    items: Mapping[object, Value] | Value = value.items if isinstance(value, Group) else value
    inner = items.values() if isinstance(items, Mapping) else items if isinstance(items, list | tuple) else ()
    for each in inner:
        yield from _records_in(each)

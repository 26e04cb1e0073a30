"""A checkpoint seen under other names and shapes: the elements of its tensors that make each tensor asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.geometry.value_class import value_class


@value_class
class Along:
    """Elements along one dimension. Number k is at `start + k * step` on each side.

    Source: the two strided sides of DeepSpeed's affine maps.
    """

    source_dim: int | None
    """Dimension of the source; None if the target alone has it. Then there is one element."""

    target_dim: int | None
    """Dimension of the target; None if the source alone has it. Then there is one element."""

    source_start: int
    """Coordinate of the first element in the source."""

    source_step: int
    """Distance of the elements in the source, from 1 on."""

    target_start: int
    """Coordinate of the first element in the target."""

    target_step: int
    """Distance of the elements in the target, from 1 on."""

    count: int
    """Elements."""

    def reversed(self) -> Along:
        """Return the same elements with the sides swapped."""
        return Along(
            self.target_dim, self.source_dim, self.target_start, self.target_step,
            self.source_start, self.source_step, self.count,
        )  # fmt: skip


Alongs = tuple[Along, ...]
"""One for each dimension of the source and of the target; a grid of elements that both share."""


Terms = Callable[[], Sequence[tuple[int, Alongs]]]
"""Returns the terms of one target: the number of a source, and the elements that the source gives. Made when asked."""


@value_class
class ViewedTensor:
    """A tensor that a view makes."""

    spec: TensorSpec
    """Name, dtype and shape."""

    sources: tuple[str, ...]
    """Stored names of the tensors that it is made of."""

    terms: Terms | None
    """The terms. None: the tensor is the only source, unchanged."""

    rule: str = ""
    """Name of the rule, for messages."""

    open_dim: int | None = None
    """A dimension along which a state may be longer: the rest is padding, and keeps its values."""

    def listed_terms(self) -> Sequence[tuple[int, Alongs]]:
        """Return the terms; none if the tensor is the only source."""
        return () if self.terms is None else self.terms()


@dataclass(frozen=True, slots=True)
class View:
    """Everything that a layout makes of a checkpoint."""

    tensors: Mapping[str, ViewedTensor]
    """The tensors that can be asked for, by name."""

    aliases: Mapping[str, str]
    """Tied names: alias to a name in `tensors`."""

    made: Mapping[str, tuple[str, ...]]
    """The targets that each source is part of, by name of the source."""

    parameters: Mapping[str, tuple[str, ...]]
    """The parameters that each parameter becomes, by names as optimizers list them."""

    skipped: Mapping[str, str]
    """Stored tensors that are left out, each with the reason."""

    keys: tuple[str, str] = ("", "")
    """Keys at the top of the state below which parameters are, before and after; empty: at the top."""

    equal: Sequence[tuple[str, str]] = ()
    """Pairs of stored tensors of one element, of which the view keeps the first: the bytes of both must be equal."""

    sizes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """The sizes that were used: the number, and the place."""

    def made_of(self, source: str) -> tuple[str, ...]:
        """Return the names of the tensors that a source is part of."""
        return self.made.get(source, ())

"""The differences between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.base.geometry.value_class import value_class


@value_class
class Change:
    """How much a tensor differs, over the bytes that were read; bytes with equal digests are not read.

    Maxima and norms cover finite elements, in 64-bit floats; integers are subtracted exactly.
    """

    changed: int
    """Elements that differ in a bit; if the dtypes differ, in their value."""

    unmeasured: int
    """Changed elements without a difference, since one side is infinite or NaN."""

    max_absolute: float
    """Largest |a − b|."""

    max_relative: float
    """Largest |a − b| / max(|a|, |b|)."""

    norm_a: float
    """Euclidean norm of the elements read from A."""

    norm_b: float
    """Euclidean norm of the elements read from B."""

    norm_difference: float
    """Euclidean norm of a − b; elements with equal digests add 0."""

    nan: tuple[int, int]
    """NaNs among the elements read from A, from B."""

    inf: tuple[int, int]
    """Infinities among the elements read from A, from B."""

    @property
    def relative(self) -> float:
        """Norm of a − b by the larger norm of both sides, over the elements read; 0 without a difference."""
        return self.norm_difference / max(self.norm_a, self.norm_b) if self.norm_difference else 0.0


class Verdict(Enum):
    """The result of comparing a tensor."""

    EQUAL = "equal"
    """Equal bit by bit; by value, if the dtypes differ."""

    CHANGED = "changed"
    """Elements differ."""

    DTYPE = "dtype"
    """The dtypes differ, and values were not compared: not asked for, or no dtype holds both exactly."""

    SHAPE = "shape"
    """The shapes differ."""


@value_class
class TensorDiff:
    """One tensor that both checkpoints have."""

    fqn: str
    """Its name."""

    verdict: Verdict
    """The result."""

    dtype: tuple[str, str]
    """Element type in A, in B."""

    shape: tuple[tuple[int, ...], tuple[int, ...]]
    """Global shape in A, in B."""

    numel: int
    """Elements in A."""

    settled_bytes: int
    """Bytes of A with equal digests, which were not read; norms, NaNs and infinities exclude them."""

    change: Change | None
    """How much it differs; None if nothing was read."""


@value_class
class NameOnly:
    """A tensor that only one checkpoint has."""

    fqn: str
    """Its name."""

    dtype: str
    """Element type."""

    shape: tuple[int, ...]
    """Global shape."""

    tied_to: str | None
    """The stored tensor of this tied name, or None."""


@value_class
class TieDiff:
    """A name that is tied to different tensors in A and B, or tied in only one of them."""

    name: str
    """The name."""

    a: str
    """Its stored tensor in A."""

    b: str
    """Its stored tensor in B."""


@value_class
class ValueDiff:
    """A value that is not a tensor and differs."""

    path: str
    """Its path in the values."""

    in_a: bool
    """Whether A has it."""

    in_b: bool
    """Whether B has it."""

    a: object
    """The value in A; None if A lacks it."""

    b: object
    """The value in B; None if B lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """All differences between two checkpoints, and how many bytes were read for them."""

    a: str
    """URL of A."""

    b: str
    """URL of B."""

    tensors: tuple[TensorDiff, ...]
    """Every tensor that both have, sorted by name; a tied tensor once, under its first name."""

    only_a: tuple[NameOnly, ...]
    """Names that B lacks."""

    only_b: tuple[NameOnly, ...]
    """Names that A lacks."""

    ties: tuple[TieDiff, ...]
    """Names with different ties. If the tensors are equal they load alike, so they do not count as a difference."""

    values: tuple[ValueDiff, ...]
    """Different values that are not tensors; empty if only some tensors were compared."""

    read_bytes: int
    """Bytes read from both."""

    settled_bytes: int
    """Bytes of A with equal digests in B, read from neither."""

    @property
    def equal(self) -> bool:
        """Whether names, dtypes, shapes, all bits (for different dtypes: all values) and other values are equal."""
        same = all(tensor.verdict is Verdict.EQUAL for tensor in self.tensors)
        return same and not (self.only_a or self.only_b or self.values)

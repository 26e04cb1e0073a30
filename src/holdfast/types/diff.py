"""What differs between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.geometry.value_class import value_class


@value_class
class Change:
    """By how much a tensor differs, of what was read of it; what digests settle is the same bit for bit.

    Maxima and norms are of finite elements, in 64-bit floats; whole numbers are subtracted exactly.
    """

    changed: int
    """Elements that differ in a bit; where types differ, in their value."""

    unmeasured: int
    """Changed elements that have no difference, since one of the two is infinite or NaN."""

    max_absolute: float
    """Largest |a − b|."""

    max_relative: float
    """Largest |a − b| / max(|a|, |b|)."""

    norm_a: float
    """Euclidean norm of what was read of A."""

    norm_b: float
    """Euclidean norm of what was read of B."""

    norm_difference: float
    """Euclidean norm of a − b; 0 where digests settle."""

    nan: tuple[int, int]
    """NaNs in what was read of A, of B."""

    inf: tuple[int, int]
    """Infinities in what was read of A, of B."""


class Verdict(Enum):
    """What came of comparing a tensor."""

    EQUAL = "equal"
    """The same bit for bit; by value, where types differ."""

    CHANGED = "changed"
    """Elements differ."""

    DTYPE = "dtype"
    """The element types differ, and were not to be compared, or no type holds both exactly."""

    SHAPE = "shape"
    """The shapes differ."""


@value_class
class TensorDiff:
    """One tensor that both checkpoints have."""

    fqn: str
    """Its name."""

    verdict: Verdict
    """Whether it is the same."""

    dtype: tuple[str, str]
    """Element type in A, in B."""

    shape: tuple[tuple[int, ...], tuple[int, ...]]
    """Global shape in A, in B."""

    numel: int
    """Elements in A."""

    settled_bytes: int
    """Bytes of A that digests show to be the same, unread; norms, NaNs and infinities say nothing of them."""

    change: Change | None
    """By how much; None where nothing was read."""


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
    """The stored tensor it is another name of, or None."""


@value_class
class TieDiff:
    """A name that is tied to different tensors in the two, or tied in one and stored by itself in the other."""

    name: str
    """The name."""

    a: str
    """The stored tensor it stands for in A."""

    b: str
    """The stored tensor it stands for in B."""


@value_class
class ValueDiff:
    """A value that is not a tensor and differs."""

    path: str
    """Where it stands."""

    in_a: bool
    """Whether A has it."""

    in_b: bool
    """Whether B has it."""

    a: object
    """It in A; None where A lacks it."""

    b: object
    """It in B; None where B lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Everything that differs between two checkpoints, and what was done to find out."""

    a: str
    """Where A lies."""

    b: str
    """Where B lies."""

    tensors: tuple[TensorDiff, ...]
    """Every tensor that both have, by name; one with several names once, under the first of them."""

    only_a: tuple[NameOnly, ...]
    """Names that B lacks."""

    only_b: tuple[NameOnly, ...]
    """Names that A lacks."""

    ties: tuple[TieDiff, ...]
    """Names tied otherwise. They load alike if the tensors are equal, so they make no difference by themselves."""

    values: tuple[ValueDiff, ...]
    """Values that are not tensors and differ; empty where only some tensors were asked for."""

    read_bytes: int
    """Bytes read of both."""

    settled_bytes: int
    """Bytes of A that digests show to be the same in B, read in neither."""

    @property
    def equal(self) -> bool:
        """Whether both hold the same: names, types, shapes, every bit (where types differ, every value), values."""
        same = all(each.verdict is Verdict.EQUAL for each in self.tensors)
        return same and not (self.only_a or self.only_b or self.values)

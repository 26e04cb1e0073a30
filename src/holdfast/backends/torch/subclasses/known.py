"""Subclasses of which Holdfast knows how each inner tensor follows the elements, so that they can be split anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Rule(Enum):
    """How an inner tensor follows the elements of the tensor."""

    ELEMENTS = "one element each, in the same shape"
    RUNS = "1-d; one element for each run of elements in row-major order, all runs of one length"
    WHOLE = "the same on every shard"


@dataclass(frozen=True, slots=True)
class KnownClass:
    """One subclass."""

    rules: Mapping[str, Rule]
    """By inner tensor."""

    caches: frozenset[str] = field(default_factory=frozenset)
    """Inner tensors that follow from the others: not saved, and dropped by a load."""

    @property
    def has_runs(self) -> bool:
        """Whether a shard must be one run of elements in row-major order."""
        return Rule.RUNS in self.rules.values()


_BLOCKS = {"codes": Rule.ELEMENTS, "scale": Rule.RUNS}

_KNOWN: dict[str, dict[str, KnownClass]] = {
    "torchao": {
        "OptimState8bit": KnownClass({**_BLOCKS, "qmap": Rule.WHOLE}),
        "OptimState4bit": KnownClass({"codes": Rule.RUNS, "scale": Rule.RUNS, "qmap": Rule.WHOLE}),
        "OptimStateFp8": KnownClass(_BLOCKS),
        "WeightWithDynamicFloat8CastTensor": KnownClass(
            {"_tensor": Rule.ELEMENTS}, caches=frozenset({"_precomputed_scale"})
        ),
    }
}
"""By package and name."""


def known_class(kind: type) -> KnownClass | None:
    """Return what is known of a class; None for any other class."""
    return _KNOWN.get(kind.__module__.partition(".")[0], {}).get(kind.__qualname__)

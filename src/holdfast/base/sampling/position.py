"""The place of training in the order of samples, and the step that comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from holdfast.errors import InvalidError

Tail: TypeAlias = Literal["short", "drop", "carry"]


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The samples whose step the optimizer has taken: all before this place."""

    epoch: int = 0
    samples: int = 0
    """Samples of the epoch."""

    steps: int = 0
    """Steps since the start of the run."""


@dataclass(frozen=True, slots=True)
class Epochs:
    """Epochs of n samples, in steps of a global batch.

    Raises:
        InvalidError: A value is outside its range.
    """

    n: int
    global_batch: int
    tail: Tail = "short"
    """The last step of an epoch: "short" has the samples that are left, "drop" leaves them out, "carry" is filled from
    the next epoch."""

    def __post_init__(self) -> None:
        if type(self.global_batch) is not int or self.global_batch < 1:
            raise InvalidError(
                f"global_batch={self.global_batch!r}; expected samples of a step over all ranks, 1 or more"
            )
        if self.tail not in get_args(Tail):
            raise InvalidError(f"tail={self.tail!r}; expected 'short', 'drop' or 'carry'")
        if self.tail == "drop" and self.global_batch > self.n:
            raise InvalidError(
                f"global_batch={self.global_batch} and tail='drop': an epoch of {self.n} samples would have no step; "
                "expected a global batch of at most an epoch. Pass tail='short' or 'carry'"
            )

    def settled(self, position: DataPosition) -> DataPosition:
        """Return the place where the next step begins: in the next epoch, if this one has no step left."""
        left = self.n - position.samples
        if left >= self.global_batch or (left > 0 and self.tail != "drop"):
            return position
        # Only a step that "carry" filled ends beyond the epoch, and a large one ends some epochs later.
        epochs, samples = divmod(position.samples, self.n) if self.tail == "carry" else (1, 0)
        return DataPosition(position.epoch + epochs, samples, position.steps)

    def size(self, position: DataPosition) -> int:
        """Return the samples of the step that begins at a settled position."""
        return min(self.global_batch, self.n - position.samples) if self.tail == "short" else self.global_batch

    def after(self, position: DataPosition) -> DataPosition:
        """Return the place after the step that begins at a settled position: where the next step begins."""
        return self.settled(DataPosition(position.epoch, position.samples + self.size(position), position.steps + 1))

    def steps_left(self, position: DataPosition) -> int:
        """Return the steps that begin in the epoch of a position, from the position on."""
        left = max(0, self.n - position.samples)
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def steps_in_epoch(self, epoch: int) -> int:
        """Return the steps that begin in an epoch, if the global batch has always been the present one."""
        carried = -epoch * self.n % self.global_batch if self.tail == "carry" else 0
        return self.steps_left(DataPosition(epoch, carried))

"""The micro-batches of one data rank, from any place of an epoch to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from holdfast.backends.torch.data.data_ranks import DataRanks
from holdfast.base.sampling.mixture import MixedOrder
from holdfast.base.sampling.order import Order, Places
from holdfast.base.sampling.position import DataPosition, Epochs
from holdfast.base.sampling.shares import MicroBatch, micro_batch_count, micro_batches
from holdfast.errors import InvalidError

_PLACES_AHEAD_MIN, _PLACES_AHEAD_MAX = 64, 4096
"""Places whose samples are looked up at once: few before the first batch, and twice as many each time."""

_parts = lru_cache(maxsize=64)(micro_batches)


@dataclass(frozen=True, slots=True)
class Draw:
    """The samples of one micro-batch of this rank."""

    ends_step: bool
    epochs: int | list[int]
    """The epoch of all samples, or of each."""

    samples: list[int]


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws the micro-batches of this rank.

    Raises:
        InvalidError: The micro-batch is outside its range, or the global batch is below the number of data ranks.
    """

    order: Order | MixedOrder
    epochs: Epochs
    ranks: DataRanks
    micro_batch: int
    """Most samples of a micro-batch."""

    def __post_init__(self) -> None:
        global_batch = self.epochs.global_batch
        if type(self.micro_batch) is not int or not 1 <= self.micro_batch <= global_batch:
            raise InvalidError(
                f"micro_batch={self.micro_batch!r} and global_batch={global_batch}; expected 1 to {global_batch} "
                "samples in a micro-batch of one rank. Lower micro_batch"
            )
        if global_batch < self.ranks.number:
            raise InvalidError(
                f"global_batch={global_batch} is below the {self.ranks.number} data ranks; expected a sample for each "
                "in every step. Raise global_batch, or name fewer data ranks with mesh="
            )

    @property
    def micro_batch_count(self) -> int:
        """Return the micro-batches of a whole step on each data rank."""
        return micro_batch_count(self.epochs.global_batch, self.ranks.number, self.micro_batch)

    def parts(self, size: int) -> Sequence[MicroBatch]:
        """Return the micro-batches of this rank in a step of so many samples."""
        return _parts(size, self.ranks.number, self.ranks.rank, self.micro_batch)

    def micro_batches_left(self, position: DataPosition) -> int:
        """Return the micro-batches of this rank from a settled position to the end of the epoch."""
        whole, rest = divmod(self.epochs.n - position.samples, self.epochs.global_batch)
        if rest and self.epochs.tail == "carry":
            whole, rest = whole + 1, 0
        last = 0 if self.epochs.tail == "drop" else micro_batch_count(rest, self.ranks.number, self.micro_batch)
        return whole * self.micro_batch_count + last

    def since(self, position: DataPosition) -> Iterator[Draw]:
        """Yield the micro-batches of this rank, from a settled position to the end of the epoch."""
        epoch, left = position.epoch, self.epochs.steps_left(position)
        ahead_max = _PLACES_AHEAD_MIN
        while left:
            steps: list[tuple[int, Sequence[MicroBatch]]] = []
            places: list[Places] = []
            ahead = 0
            while left and ahead < ahead_max:
                parts = self.parts(self.epochs.size(position))
                begin, end = min(part.start for part in parts), max(part.stop for part in parts)
                places.append(np.arange(position.samples + begin, position.samples + end))
                steps.append((ahead - begin, parts))
                ahead, left, position = ahead + end - begin, left - 1, self.epochs.after(position)
            ahead_max = min(2 * ahead_max, _PLACES_AHEAD_MAX)
            epochs, samples = self.order.samples(epoch, np.concatenate(places))
            # One conversion for all of them; a list is cut faster than an array.
            numbers, of_one = samples.tolist(), int(epochs[0]) if (epochs == epochs[0]).all() else None
            for shift, parts in steps:
                for part in parts:
                    inside = slice(part.start + shift, part.stop + shift)
                    of_epochs = epochs[inside].tolist() if of_one is None else of_one
                    yield Draw(part is parts[-1], of_epochs, numbers[inside])

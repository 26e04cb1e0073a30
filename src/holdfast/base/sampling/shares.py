"""Which part of a step a data rank reads, and in how many micro-batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Places of one micro-batch: half-open, counted from the first sample of the step."""

    start: int
    stop: int
    is_repeat: bool
    """The one sample is read by another micro-batch too, and counts 0 here."""


def micro_batch_count(size: int, ranks: int, micro_batch: int) -> int:
    """Return the micro-batches of a step on each data rank.

    Args:
        size: Samples of the step.
        ranks: Data ranks.
        micro_batch: Most samples of a micro-batch.
    """
    share_max = -(-size // ranks)
    return -(-share_max // micro_batch)


def has_repeats(size: int, ranks: int, micro_batch: int) -> bool:
    """Return whether a micro-batch of the step would be empty on some data rank."""
    return size // ranks < micro_batch_count(size, ranks, micro_batch)


def micro_batches(size: int, ranks: int, rank: int, micro_batch: int) -> list[MicroBatch]:
    """Return the micro-batches of one data rank in a step: equally many on every data rank, and none empty.

    Shares are contiguous and differ by one sample at most, and so do the micro-batches of a share. Where a share has
    fewer samples than the step has micro-batches, the last micro-batch repeats the sample before it.
    """
    count = micro_batch_count(size, ranks, micro_batch)
    first, stop = divided(size, ranks, rank)
    parts = (divided(stop - first, count, number) for number in range(count))
    return [
        MicroBatch(first + begin, first + end, False)
        if begin < end
        else MicroBatch(first + begin - 1, first + begin, True)
        for begin, end in parts
    ]


def divided(total: int, parts: int, number: int) -> tuple[int, int]:
    """Return the half-open range of part `number`, where the first parts are longer by one."""
    length, longer = divmod(total, parts)
    start = number * length + min(number, longer)
    return start, start + length + (number < longer)

"""Which sample stands at a place of an epoch: a keyed bijection of [0, n), with no permutation in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidError

Places: TypeAlias = npt.NDArray[np.int64]
Shuffle: TypeAlias = Literal["full", "blocks", False]

SAMPLES_MAX = 1 << 62
BLOCK = 4096
"""Samples of a block, within which `shuffle="blocks"` keeps reads near each other."""

_ROUNDS = 6
_BLOCK_STRIDE = np.uint64(0x9E3779B97F4A7C15)
"""Sets the keys of neighbouring blocks far apart: 2^64 divided by the golden ratio."""

_Words: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Order:
    """The order of samples in every epoch.

    Raises:
        InvalidError: A value is outside its range.
    """

    n: int
    """Samples of an epoch."""

    seed: int

    shuffle: Shuffle = "full"
    """"full": any sample at any place; "blocks": blocks of 4,096 samples in random order, and samples in random order
    inside a block; False: the order of the data set."""

    def __post_init__(self) -> None:
        if type(self.n) is not int or not 1 <= self.n <= SAMPLES_MAX:
            raise InvalidError(f"n={self.n!r}; expected a number of samples from 1 to 2^62. Pass len(dataset)")
        if type(self.seed) is not int:
            raise InvalidError(f"seed={self.seed!r}; expected an int. Pass the same number on every rank")
        if not any(self.shuffle is each or self.shuffle == each != 0 for each in get_args(Shuffle)):
            raise InvalidError(f"shuffle={self.shuffle!r}; expected 'full', 'blocks' or False")

    def at(self, epoch: int, places: Places) -> Places:
        """Return the samples at places of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            places: int64 numbers in [0, n), any shape.
        """
        if self.shuffle is False:
            return places
        keys = _keys(self.seed, epoch)
        if self.shuffle == "full":
            return _permuted(places.astype(np.uint64), self.n, keys).astype(np.int64)
        # The short block always comes last. Blocks begin at a drawn offset, so that other samples are last each time.
        blocks, offset = self.n // BLOCK, int(keys[-1] % np.uint64(self.n))
        block, inside = np.divmod(places.astype(np.uint64), np.uint64(BLOCK))
        whole = block < blocks
        found = np.empty_like(inside)
        if blocks:
            block[whole] = _permuted(block[whole], blocks, keys)
            found[whole] = _permuted(inside[whole], BLOCK, keys, (block[whole] + np.uint64(1)) * _BLOCK_STRIDE)
        if not whole.all():
            found[~whole] = _permuted(inside[~whole], self.n % BLOCK, keys)
        samples = block * np.uint64(BLOCK) + found + np.uint64(offset)
        return (samples % np.uint64(self.n)).astype(np.int64)

    def samples(self, epoch: int, places: Places) -> tuple[Places, Places]:
        """Return the epoch and the sample at each place, where places of n and more are in later epochs.

        Args:
            epoch: Number of the epoch, from 0.
            places: int64 numbers in ascending order.
        """
        if not len(places) or places[-1] < self.n:
            return np.full(len(places), epoch), self.at(epoch, places)
        return self.samples_of(epoch * self.n + places)

    def samples_of(self, numbers: Places) -> tuple[Places, Places]:
        """Return the epoch and the sample of each number in the sequence of all epochs, in ascending order."""
        epochs, places = np.divmod(numbers, self.n)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            samples[inside] = self.at(int(epoch), places[inside])
        return epochs, samples

    @property
    def lengths(self) -> dict[str, int]:
        """Return the samples of each named source: there is one source, without a name."""
        return {}

    def served(self, epoch: int, samples: int) -> dict[str, int]:
        """Return the samples served by each named source before a place: there is one source, without a name."""
        return {}


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return 128 random bits for one sample of one epoch, the same on every platform."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch} {sample}".encode(), digest_size=16).digest(), "little")


def _keys(seed: int, epoch: int) -> _Words:
    return np.frombuffer(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=64).digest(), "<u8").astype(np.uint64)


def _permuted(values: _Words, n: int, keys: _Words, tweaks: _Words | None = None) -> _Words:
    """Return the images of values under a keyed bijection of [0, n).

    A Feistel network permutes the smallest even number of bits that holds n values. An image of n or more is mapped
    again until one is below n: each value walks the cycle that it lies on, so the map stays a bijection.

    Args:
        values: Numbers below n, one dimension.
        n: Size of the domain.
        keys: A key for each round.
        tweaks: Changes the keys, for each value.
    """
    if n == 1:
        return np.zeros_like(values)
    if tweaks is None:
        tweaks = np.zeros_like(values)
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    images = _network(values, half, keys, tweaks)
    while (outside := np.flatnonzero(images >= np.uint64(n))).size:
        images[outside] = _network(images[outside], half, keys, tweaks[outside])
    return images


def _network(values: _Words, half: np.uint64, keys: _Words, tweaks: _Words) -> _Words:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys[:_ROUNDS]:
        left, right = right, left ^ (_mixed((right + key) ^ tweaks) & mask)
    return (left << half) | right


def _mixed(words: _Words) -> _Words:
    """Return words with every bit spread over all bits. Source: the finalizer of SplitMix64 (Steele et al., 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

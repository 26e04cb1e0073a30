"""Random numbers for each sample, equal on any number of ranks and workers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, get_worker_info

from holdfast.base.sampling.order import sample_seed
from holdfast.errors import InvalidError

_sample: ContextVar[list[int] | None] = ContextVar("sample", default=None)
"""Seed, epoch and number of the sample that is read now."""


def rng() -> np.random.Generator:
    """Return a generator for the sample that `__getitem__` reads now, keyed by seed, epoch and sample.

    Augmentation that draws from this generator is the same on any number of ranks and workers, and after a resume.

    Raises:
        InvalidError: No `holdfast.data.Loader` calls `__getitem__` of the data set now.

    Example:
        >>> class Noisy:
        ...     def __len__(self): return 4
        ...     def __getitem__(self, index): return index + holdfast.data.rng().normal()
    """
    key = _sample.get()
    if key is None:
        raise InvalidError(
            "holdfast.data.rng(): no sample is read now; expected a call within __getitem__ of a data set without "
            "__getitems__, under holdfast.data.Loader. Make a numpy generator of your own elsewhere"
        )
    return np.random.Generator(np.random.PCG64(sample_seed(*key)))


class KeyedSamples:
    """A data set that a `DataLoader` asks for whole micro-batches, by epoch and sample.

    Args:
        dataset: The data set of the user.
        seed: Seed of the order.
        reseed: Whether each sample sets the generators of Python, numpy and torch.
    """

    def __init__(self, dataset: Any, seed: int, *, reseed: bool) -> None:
        self._dataset, self._seed, self._reseed = dataset, seed, reseed
        # A subset reads its samples one by one anyway, and each shall have its own random numbers.
        self._reads_batches = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: tuple[int | Sequence[int], Sequence[int]]) -> Sequence[object]:
        """Return the samples of a micro-batch.

        Args:
            keys: The epoch of all samples, or of each; and the samples.
        """
        epochs, samples = keys
        if self._reads_batches and not self._reseed:
            found: Sequence[object] = self._dataset.__getitems__(samples)
            return found
        if not self._reseed:
            return self._read(epochs, samples)
        with _kept_generators():
            return self._read(epochs, samples)

    def _read(self, epochs: int | Sequence[int], samples: Sequence[int]) -> list[object]:
        found: list[object] = []
        # Set once for a micro-batch: a change of the variable for each sample costs as much as a small sample.
        key = [self._seed, 0, 0]
        token = _sample.set(key)
        try:
            for number, sample in enumerate(samples):
                key[1], key[2] = epochs if isinstance(epochs, int) else epochs[number], sample
                if self._reseed:
                    _seed_generators(sample_seed(*key))
                found.append(self._dataset[sample])
        finally:
            _sample.reset(token)
        return found


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # Transforms of other libraries draw from this generator.
    torch.manual_seed(seed & 0xFFFFFFFFFFFFFFFF)


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Give the training process its generators back: without workers, samples are read between its own draws."""
    if get_worker_info() is not None:
        yield
        return
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)

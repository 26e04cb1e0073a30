"""A data set of several sources with exact quotas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from holdfast.base.sampling.mixture import MixedOrder, Quotas
from holdfast.base.sampling.order import Shuffle
from holdfast.errors import InvalidError


class Mixture(Dataset[Any]):
    """Several data sets by weight: after k samples, each source has served its share of k, within one sample.

    Pass a mixture to `Loader`, or to `Batches` in place of n and to the loader as the data set. A source that ends
    begins its own next epoch. The state of the position counts the samples of each source.

    Args:
        sources: Data set and weight of each source, by name. Weights are rounded to 1/65,536 of their sum.
        phases: Other weights by name, by the sample of the run from which they count, as for annealing. A source that
            a phase leaves out has the weight 0 there.
        epoch_samples: Samples of an epoch; the sum of the sources without it.
    Raises:
        InvalidError: A weight is negative, not finite, or all are 0; a phase names an unknown source; a source is
            empty or has no places.

    Example:
        >>> mixture = holdfast.data.Mixture({"web": (web, 0.7), "code": (code, 0.3)}, phases={10**9: {"code": 1}})
        >>> loader = holdfast.data.Loader(mixture, global_batch=96, seed=7)
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Any, float]],
        *,
        phases: Mapping[int, Mapping[str, float]] | None = None,
        epoch_samples: int | None = None,
    ) -> None:
        if not sources:
            raise InvalidError("sources is empty; expected a data set and a weight by name: {'web': (web, 0.7)}")
        self._datasets = [dataset for dataset, _ in sources.values()]
        self._lengths = {name: length_of(dataset, f"source {name!r}") for name, (dataset, _) in sources.items()}
        self._starts = [0, *accumulate(self._lengths.values())]
        self._epoch_samples = self._starts[-1] if epoch_samples is None else epoch_samples
        if type(self._epoch_samples) is not int or self._epoch_samples < 1:
            raise InvalidError(f"epoch_samples={epoch_samples!r}; expected 1 or more samples")
        weights = {0: [weight for _, weight in sources.values()]}
        for start, phase in (phases or {}).items():
            if unknown := sorted(phase.keys() - sources.keys()):
                raise InvalidError(
                    f"phases: the phase at sample {start} names {unknown[0]!r}; expected names of sources: "
                    f"{', '.join(sources)}. Correct the name, or add the source"
                )
            weights[start] = [phase.get(name, 0.0) for name in sources]
        self._quotas = Quotas(weights)

    def __len__(self) -> int:
        """Return the samples of an epoch."""
        return self._epoch_samples

    def __getitem__(self, index: int) -> Any:
        """Return a sample, where samples count through the sources, one after another."""
        source = bisect_right(self._starts, index) - 1
        return self._datasets[source][index - self._starts[source]]

    def order(self, seed: int, shuffle: Shuffle) -> MixedOrder:
        """Return the order of the samples."""
        return MixedOrder(self._lengths, self._epoch_samples, self._quotas, seed, shuffle)


def length_of(dataset: object, what: str) -> int:
    """Return the number of samples of a map-style data set.

    Raises:
        InvalidError: The data set is empty or has no places.
    """
    ways = (
        "expected a data set with len and []. Pass a map-style form, or keep holdfast.PerRank(StatefulDataLoader(...)) "
        "in the state, which resumes on the same ranks and workers"
    )
    if isinstance(dataset, IterableDataset):
        raise InvalidError(f"{what} is {type(dataset).__name__}, an IterableDataset, which has no places; {ways}")
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        raise InvalidError(f"{what} is {type(dataset).__name__}, whose length is unknown; {ways}") from error
    if length < 1:
        raise InvalidError(f"{what} has {length} samples; expected 1 or more")
    return length

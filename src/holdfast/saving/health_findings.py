"""From what every rank found to the health of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

from holdfast.errors import CorruptError
from holdfast.types.health import NAMED_RANKS_MAX, Counted, Expectation, Health, Replicas

_Copies = dict[bytes, list[int]]
"""Ranks by what they hold."""


class Findings:
    """What the ranks of one save found, taken in rank by rank."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._expectations: dict[str, Expectation] = {}
        self._all_counted = self._all_compared = True
        self._names: dict[int, tuple[str, ...]] = {}
        self._hosts: dict[int, str] = {}
        self._held: dict[bytes, dict[tuple[int, tuple[int, ...]], _Copies]] = {}
        """By who holds the same; by speaker and positions; by digests: the ranks. Equal copies take no further room."""

    def add(self, rank: int, counted: Counted | None, replicas: Replicas | None) -> None:
        """Take in what one rank found.

        Args:
            rank: Who says it.
            counted: Its non-finite elements; None if it did not count.
            replicas: Its copies; None if it did not compare. Those of its speaker come first.
        Raises:
            CorruptError: It speaks of tensors that nobody named.
        """
        if counted is None:
            self._all_counted = False
        else:
            for fqn, (count, expectation) in counted.items():
                self._counts[fqn] = self._counts.get(fqn, 0) + count
                self._expectations.setdefault(fqn, expectation)
        if replicas is None:
            self._all_compared = False
            return
        self._hosts[rank] = replicas.host
        if replicas.names:
            self._names[rank] = replicas.names
        named = len(self._names.get(replicas.speaker, ()))
        for group in replicas.groups:
            if group.positions and group.positions[-1] >= named:
                raise CorruptError(
                    f"rank {rank}: a copy of tensor {group.positions[-1]} of {named} that rank {replicas.speaker} named"
                )
            copies = self._held.setdefault(group.holders, {}).setdefault((replicas.speaker, group.positions), {})
            copies.setdefault(group.digests, []).append(rank)

    @property
    def has_counts(self) -> bool:
        """Whether every rank counted, and some found something."""
        return self._all_counted and bool(self._counts)

    def health(self, before: Health | None, held: Callable[[str], bool] = lambda _: True) -> Health | None:
        """Return what was found; None if some rank looked at nothing.

        Args:
            before: The health of the last checkpoint before this one in which it was counted, if there is one.
            held: Returns whether that held a tensor; asked only of what it found nothing in.
        """
        if not self._all_counted and not self._all_compared:
            return None
        divergent, undecided = self._compared() if self._all_compared else (None, ())
        named = {*chain.from_iterable((divergent or {}).values())}
        return Health(
            nonfinite=dict(sorted(self._counts.items())) if self._all_counted else None,
            new=self._news(before, held) if self._all_counted else {},
            divergent=divergent,
            undecided=undecided,
            hosts={rank: self._hosts[rank] for rank in sorted(named)},
        )

    def _news(self, before: Health | None, held: Callable[[str], bool]) -> dict[str, int]:
        known = before.nonfinite if before is not None else None
        news = {}
        for fqn, count in sorted(self._counts.items()):
            expectation = self._expectations[fqn]
            if expectation == "expected":
                continue
            if expectation == "buffer" and (known is None or not (fqn in known or held(fqn))):
                continue  # The first count of it.
            # What was news there is compared with what it was news to: a mark stays until its cause is gone.
            had = 0 if before is None or known is None else before.new.get(fqn, known.get(fqn, 0))
            if count > had:
                news[fqn] = had
        return news

    def _compared(self) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
        """Return who differs from most, by FQN, and of which FQNs there is no most."""
        divergent: dict[str, tuple[int, ...]] = {}
        undecided = []
        for held in self._held.values():
            if len(held) == 1 and all(len(copies) == 1 for copies in held.values()):
                continue
            for fqn, copies in self._by_name(held).items():
                if len(copies) < 2:
                    continue
                groups = sorted(copies.values(), key=len, reverse=True)
                is_undecided = len(groups[0]) == len(groups[1])
                ranks = sorted(chain.from_iterable(groups if is_undecided else groups[1:]))
                divergent[fqn] = tuple(ranks[:NAMED_RANKS_MAX])
                if is_undecided:
                    undecided.append(fqn)
        return dict(sorted(divergent.items())), tuple(sorted(undecided))

    def _by_name(self, held: Mapping[tuple[int, tuple[int, ...]], _Copies]) -> dict[str, _Copies]:
        found: dict[str, _Copies] = {}
        for (speaker, positions), copies in held.items():
            for digests, ranks in copies.items():
                for number, position in enumerate(positions):
                    own = found.setdefault(self._names[speaker][position], {})
                    own.setdefault(digests[8 * number : 8 * number + 8], []).extend(ranks)
        return found

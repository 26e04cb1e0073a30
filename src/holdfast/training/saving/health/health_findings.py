"""Merges the health findings of all ranks into the health of a checkpoint. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain

from holdfast.base.types.health import Counted, Expectation, Health, Replicas
from holdfast.core.plan.rank_differences import outvoted
from holdfast.errors import CorruptError

_Copies = dict[bytes, list[int]]
"""Ranks by the digests of their copies."""


class Findings:
    """Findings of the ranks of one save. `add` takes one rank's; `health` returns the result."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._expectations: dict[str, Expectation] = {}
        self._all_counted = self._all_compared = True
        self._names: dict[int, tuple[str, ...]] = {}
        self._hosts: dict[int, str] = {}
        self._replicas: dict[bytes, dict[tuple[int, tuple[int, ...]], _Copies]] = {}
        """Ranks by group of holders, then by speaker and positions, then by digests. Equal copies share one entry."""

    def add(self, rank: int, counted: Counted | None, replicas: Replicas | None) -> None:
        """Add the findings of one rank.

        Args:
            rank: The rank.
            counted: Its non-finite elements; None if it did not count.
            replicas: Digests of its replicas; None if it did not compare. Add the speaker of its class first: only the
                speaker names the tensors.
        Raises:
            CorruptError: It refers to a tensor that its speaker did not name.
        """
        if counted is None:
            self._all_counted = False
        else:
            for fqn, (count, expectation) in counted.items():
                self._counts[fqn] += count
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
                    f"rank {rank}: its part has a copy of tensor {group.positions[-1]} of {named} that rank "
                    f"{replicas.speaker} named; expected a named tensor. Save again"
                )
            copies = self._replicas.setdefault(group.holders, {}).setdefault((replicas.speaker, group.positions), {})
            copies.setdefault(group.digests, []).append(rank)

    @property
    def has_counts(self) -> bool:
        """Whether every rank counted, and some rank has non-finite elements."""
        return self._all_counted and bool(self._counts)

    def health(self, before: Health | None, had_tensor: Callable[[str], bool] = lambda _: True) -> Health | None:
        """Return the health; None if a rank did not count and a rank did not compare.

        Args:
            before: The health of the newest earlier checkpoint with counts, if there is one.
            had_tensor: Returns whether that checkpoint had a tensor; called only for tensors that it has no counts of.
        """
        if not self._all_counted and not self._all_compared:
            return None
        divergent, undecided = self._compared() if self._all_compared else (None, ())
        named = {*chain.from_iterable((divergent or {}).values())}
        return Health(
            nonfinite=dict(sorted(self._counts.items())) if self._all_counted else None,
            new=self._new_counts(before, had_tensor) if self._all_counted else {},
            divergent=divergent,
            undecided=undecided,
            hosts={rank: self._hosts[rank] for rank in sorted(named)},
        )

    def _new_counts(self, before: Health | None, had_tensor: Callable[[str], bool]) -> dict[str, int]:
        """Return the earlier count of each tensor that now has more non-finite elements."""
        known = before.nonfinite if before is not None else None
        earlier = {}
        for fqn, count in sorted(self._counts.items()):
            expectation = self._expectations[fqn]
            if expectation == "expected":
                continue
            if expectation == "buffer" and (known is None or not (fqn in known or had_tensor(fqn))):
                continue  # The first count of a buffer: its non-finite elements may be intended, as in a mask.
            # A tensor that was new there keeps its older count, so that the mark stays until the elements are finite.
            had = 0 if before is None or known is None else before.new.get(fqn, known.get(fqn, 0))
            if count > had:
                earlier[fqn] = had
        return earlier

    def _compared(self) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
        """Return the ranks that differ from the majority, by FQN, and the FQNs without a majority."""
        divergent: dict[str, tuple[int, ...]] = {}
        undecided = []
        for group in self._replicas.values():
            if len(group) == 1 and all(len(copies) == 1 for copies in group.values()):
                continue  # All digests are equal: the usual case, and the only cheap one.
            for fqn, copies in self._by_name(group).items():
                if len(copies) < 2:
                    continue
                divergent[fqn], is_undecided = outvoted([*copies.values()])
                if is_undecided:
                    undecided.append(fqn)
        return dict(sorted(divergent.items())), tuple(sorted(undecided))

    def _by_name(self, group: Mapping[tuple[int, tuple[int, ...]], _Copies]) -> dict[str, _Copies]:
        """Split the joined digests of a group; return ranks by FQN and digest."""
        result: dict[str, _Copies] = {}
        for (speaker, positions), copies in group.items():
            for digests, ranks in copies.items():
                for number, position in enumerate(positions):
                    copies_of = result.setdefault(self._names[speaker][position], {})
                    copies_of.setdefault(digests[8 * number : 8 * number + 8], []).extend(ranks)
        return result

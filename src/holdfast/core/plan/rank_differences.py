"""Judges what differs between ranks that hold it under one name: which names are refused, and which are logged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from holdfast.base.types.health import NAMED_RANKS_MAX, Health
from holdfast.errors import InvalidError, first_three, printable

_LINES_MAX = 20
"""Most warnings of one save."""

_ADVICE = (
    "If each rank has its own, pass holdfast.PerRank(…), or holdfast.RngState() for random states. If they are parts "
    "of one tensor, declare the layout: holdfast.Sharded(…) or a DTensor. If they should be equal, broadcast them from "
    "one rank. Or leave them out with skip="
)

_DRIFTED_MAX = 20
"""Most replicas that a drift names: every rank receives it."""

Ranks = Sequence[int]

RanksByDigest = Mapping[str, Mapping[str, list[int]]]
"""Ranks by name and digest."""


def ranks_by_digest(digests_of: Mapping[int, Mapping[str, str]]) -> RanksByDigest:
    """Return the ranks by name and digest.

    Args:
        digests_of: Digests by name, of each rank.
    """
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, digests in digests_of.items():
        for name, digest in digests.items():
            ranks.setdefault(name, {}).setdefault(digest, []).append(rank)
    return ranks


def outvoted(groups: Sequence[Ranks]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks whose copy differs from most others, and whether no copy has a majority: then all ranks.

    Args:
        groups: Ranks with equal copies; two groups or more.
    """
    largest, second, *_ = groups = sorted(groups, key=len, reverse=True)
    is_undecided = len(largest) == len(second)
    ranks = sorted(chain.from_iterable(groups if is_undecided else groups[1:]))
    return tuple(ranks[:NAMED_RANKS_MAX]), is_undecided


@dataclass(frozen=True, slots=True)
class Differences:
    """What differs between the ranks that described their state. The lowest of a class stands for its silent ranks."""

    replicas: RanksByDigest
    """Parameters and optimizer state, which must agree."""

    others: RanksByDigest
    """Buffers, objects and values, of which the lowest rank's are saved."""

    @classmethod
    def between(cls, agreeing: Mapping[int, Mapping[str, str]], other: Mapping[int, Mapping[str, str]]) -> Differences:
        """Find the differences.

        Args:
            agreeing: Digests of what must agree, by name, of each rank.
            other: Digests of what may differ.
        """
        return cls(_differing(ranks_by_digest(agreeing)), _differing(ranks_by_digest(other)))

    def refused(self, lossy: Collection[str], *, is_first: bool) -> list[str]:
        """Return a text for each name that is refused.

        Args:
            lossy: Names among `others` of which the lowest rank's cannot stand for all.
            is_first: Whether this is the first save. Later, what a rank would lose is known from its warning.
        """
        refused = dict(self.replicas)
        if is_first:
            refused |= {name: ranks for name, ranks in self.others.items() if name in lossy}
        return [f"{name} ({_grouped([*ranks.values()])})" for name, ranks in sorted(refused.items())]

    def warnings(self, names: Sequence[str], silent: Mapping[int, Ranks]) -> list[str]:
        """Return a warning for each of some names among `others`; one line names all beyond the first.

        Args:
            names: The names.
            silent: As `drift`.
        """
        shown = len(names) if len(names) <= _LINES_MAX else _LINES_MAX - 1
        lines = [
            f"{printable(name)} differs between ranks ({self._copies(name, silent)}): "
            f"only that of rank {self._saved_rank(name)} is saved. {_ADVICE}"
            for name in names[:shown]
        ]
        if rest := names[shown:]:
            saved_ranks = first_three(sorted({*map(self._saved_rank, rest)}))
            lines.append(
                f"{printable(first_three(rest))} differ between ranks (the first: {self._copies(rest[0], silent)}): "
                f"only those of ranks [{saved_ranks}] are saved. {_ADVICE}"
            )
        return lines

    def drift(self, silent: Mapping[int, Ranks]) -> Drift:
        """Return the replicas that differ.

        Args:
            silent: Ranks that described nothing, by the rank whose state is theirs too.
        """
        drift = Drift()
        for name, by_digest in self.replicas.items():
            drift.add(name, _all_ranks(by_digest, silent))
        return drift

    def _copies(self, name: str, silent: Mapping[int, Ranks]) -> str:
        return _grouped(_all_ranks(self.others[name], silent))

    def _saved_rank(self, name: str) -> int:
        return min(map(min, self.others[name].values()))


class Drift:
    """Replicas that differ, in a save that keeps the lowest rank's."""

    def __init__(self) -> None:
        """Know none."""
        self._names: list[str] = []
        self._divergent: dict[str, tuple[int, ...]] = {}
        self._undecided: list[str] = []

    def add(self, name: str, groups: Sequence[Ranks]) -> None:
        """Add a tensor.

        Args:
            name: Its FQN.
            groups: Ranks with equal copies.
        """
        self._names.append(name)
        if len(self._divergent) < _DRIFTED_MAX:
            self._divergent[name], is_undecided = outvoted(groups)
            if is_undecided:
                self._undecided.append(name)

    @property
    def health(self) -> Health | None:
        """The first of them, as the health of a checkpoint names them; None if there are none."""
        return Health(divergent=self._divergent, undecided=tuple(self._undecided)) if self._divergent else None

    def warning(self, saved: str) -> str:
        """Return the warning; `saved` says whose copies are saved."""
        return (
            f"{len(self._names)} replicated tensors differ between ranks: {printable(first_three(self._names))}. "
            f"With replicas='lowest' {saved} are saved, and the step is marked unhealthy; later saves do so without "
            "this warning. Broadcast the parameters and optimizer state from one rank to end the drift"
        )


def refusal_of(name: str, texts: Sequence[str]) -> InvalidError:
    """Return the error for names that differ between ranks.

    Args:
        name: Name of the save.
        texts: A text for each.
    """
    return InvalidError(
        f"{name}: tensors or objects differ between ranks that hold them under one name: {first_three(texts)}. "
        f"Expected equal copies. {_ADVICE}. Settings(replicas='lowest') saves those of the lowest rank"
    )


def _differing(ranks: RanksByDigest) -> RanksByDigest:
    return {name: by_digest for name, by_digest in sorted(ranks.items()) if len(by_digest) > 1}


def _all_ranks(by_digest: Mapping[str, Ranks], silent: Mapping[int, Ranks]) -> list[list[int]]:
    """Return the groups of ranks with equal copies, with the ranks that described nothing."""
    return [sorted([*ranks, *chain(*(silent.get(each, ()) for each in ranks))]) for ranks in by_digest.values()]


def _grouped(groups: Sequence[Ranks]) -> str:
    """Return groups of ranks with equal copies, at most three of them."""
    texts = [f"ranks [{first_three(ranks)}]" for ranks in groups]
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return f"{' ≠ '.join(texts[:3])}{more}"

"""Finds what no remaining step of a run needs, by reachability: a pure function of its files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from holdfast.types.removal import StepFiles, Unreferenced


def unreferenced(
    steps: Iterable[StepFiles],
    staying: Collection[int],
    under_way: Collection[int],
    is_pack: Callable[[str], bool],
    wanted: frozenset[str] = frozenset(),
    *,
    packs_known: bool,
) -> Unreferenced:
    """Return the manifests that may go, and every file that no remaining manifest names.

    A pack stays in any folder while a remaining step refers to it. It goes with the last such step.

    Args:
        steps: Every step folder of the run.
        staying: Steps whose manifest stays, including all whose manifest cannot be read.
        under_way: Steps that are or may be being saved: none of their files goes.
        is_pack: Whether a key is that of a pack.
        wanted: Further packs that must stay.
        packs_known: Whether every remaining manifest could be read. If not, no pack goes: it may be named by one.
    """
    known = list(steps)
    stays = {each.step for each in known if each.counts and each.step in staying}
    needed = wanted.union(*(each.packs for each in known if each.step in stays))
    to_delete: dict[int, str] = {}
    files: dict[str, int] = {}
    for each in known:
        if each.step in under_way:
            continue
        if each.digest is not None and each.step not in stays:
            to_delete[each.step] = each.digest
        for attempt, held in each.attempts.items():
            if not _is_wanted(each, attempt, each.step in stays):
                files |= {k: size for k, size in held.items() if k not in needed and (packs_known or not is_pack(k))}
        if each.step not in stays and not each.pinned:
            files |= each.reports
    return Unreferenced(to_delete, files)


def _is_wanted(step: StepFiles, attempt: str, stays: bool) -> bool:
    """Return whether an attempt stays: it is pinned, or the remaining manifest names it."""
    # None: the manifest cannot be read, so it may name any attempt.
    return attempt in step.pinned or (stays and step.attempt in (attempt, None))

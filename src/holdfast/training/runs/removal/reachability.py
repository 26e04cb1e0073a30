"""Finds what no remaining step of a run needs, by reachability: a pure function of its files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from holdfast.base.types.removal import StepFiles, Unreferenced


def unreferenced(
    steps: Iterable[StepFiles],
    staying: Collection[int],
    under_way: Collection[int],
    is_pack: Callable[[str], bool],
    wanted: frozenset[str] = frozenset(),
    *,
    packs_known: bool,
    attempts_stay_whole: bool = False,
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
        attempts_stay_whole: Whether all packs of an attempt stay while a remaining step refers to one of them.
    """
    all_steps = list(steps)
    stays = {step.step for step in all_steps if step.counts and step.step in staying}
    needed = wanted.union(*(step.packs for step in all_steps if step.step in stays))
    if attempts_stay_whole:
        named = [sizes for step in all_steps for sizes in step.attempts.values() if not needed.isdisjoint(sizes)]
        needed |= {key for sizes in named for key in sizes if is_pack(key)}
    to_delete: dict[int, str] = {}
    files: dict[str, int] = {}
    for step in all_steps:
        if step.step in under_way:
            continue
        if step.digest is not None and step.step not in stays:
            to_delete[step.step] = step.digest
        for attempt, sizes in step.attempts.items():
            if not _is_wanted(step, attempt, step.step in stays):
                files |= {
                    key: size for key, size in sizes.items() if key not in needed and (packs_known or not is_pack(key))
                }
        if step.step not in stays and not step.pinned:
            files |= step.reports
    return Unreferenced(to_delete, files)


def _is_wanted(step: StepFiles, attempt: str, stays: bool) -> bool:
    """Return whether an attempt stays: it is pinned, or the remaining manifest names it."""
    # None: the manifest cannot be read, so it may name any attempt.
    return attempt in step.pinned or (stays and step.attempt in (attempt, None))

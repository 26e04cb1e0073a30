"""What of a run nobody needs any more: decided by reachability, from what lies there and which steps stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from holdfast.types.removal import StepFiles, Unreferenced


def doomed(
    steps: Iterable[StepFiles],
    staying: Collection[int],
    under_way: Collection[int],
    is_pack: Callable[[str], bool],
    wanted: frozenset[str] = frozenset(),
    *,
    packs_known: bool,
) -> Unreferenced:
    """Return the manifests that go, and every file that no manifest which stays names.

    A pack that a step which stays refers to stays, wherever it lies; it goes with the last that refers to it.

    Args:
        steps: Every step folder of the run.
        staying: Steps whose manifest stays, among them all that cannot be judged.
        under_way: Steps that are being saved, or may be: nothing of theirs is touched.
        is_pack: Whether a key is that of a pack.
        wanted: Packs that are needed besides.
        packs_known: Whether every manifest that stays could be read; otherwise no pack goes, for it may name it.
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
    """Return whether an attempt stays with the manifest that names it, or in spite of having none."""
    # Of a manifest that cannot be read nobody can say which attempt it names.
    return attempt in step.pinned or (stays and step.attempt in (attempt, None))

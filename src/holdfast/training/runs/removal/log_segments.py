"""Which segments of redo logs a run needs: those after the older of its two newest bases, as far as their log counts.

The two newest bases stay, whatever the policy says: if the newest is damaged, a restart redoes from the one before. A
policy decides about steps, never about logs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepAndDigest, StepFiles
from holdfast.base.types.timeline import Timeline
from holdfast.stored.repository.logs import BASES_KEPT, Segment, segments_of
from holdfast.stored.repository.timelines import log_end

BASE = "log"
"""Reason of a base that stays."""


@dataclass(frozen=True, slots=True)
class _Needed:
    """The part of one log that is needed."""

    after: int
    """Records after this step are needed."""

    below: int | None
    """Records below this step are needed; None: to the end."""


def kept_bases(manifests: Iterable[Manifest], newest: Timeline) -> Mapping[StepAndDigest, tuple[str, ...]]:
    """Return the bases that stay, each with the reason.

    Args:
        manifests: The manifests of steps that can be loaded.
        newest: The newest timeline.
    """
    bases = [manifest for manifest in _chain(manifests, newest) if manifest.log][:BASES_KEPT]
    return {(base.step, base.digest): (BASE,) for base in bases if base.step is not None}


def unneeded_segments(
    store: Store,
    steps: Iterable[StepFiles],
    manifests: Collection[Manifest],
    newest: Timeline,
    kept: Collection[StepAndDigest] | None,
    leased: Collection[int | None],
    own_log: str,
) -> Mapping[str, int]:
    """Return the segments that no restart needs: bytes by key.

    Args:
        store: The root of the run.
        steps: The files of each step, as listed before the segments: an attempt that no manifest names may be a save
            under way, and then gives its id to a log that has begun.
        manifests: Every manifest that counts.
        newest: The newest timeline.
        kept: The bases that stay; None while a manifest, which may be a base, cannot be read: then no segment goes.
        leased: Steps that readers hold; None for a reader that may take any step.
        own_log: Id of the log that this process writes: no manifest may state the log yet. Empty: there is none.
    """
    segments = {} if kept is None or None in leased else segments_of(store)
    if not segments or kept is None:
        return {}
    chain = _chain(manifests, newest)
    bases = [base for base in chain if base.log and (base.step in leased or (base.step, base.digest) in kept)]
    begun = {attempt for files in steps for attempt in files.attempts} - {each.attempt for each in manifests}
    needed = dict.fromkeys({own_log, *begun}, _Needed(-1, None))
    stated: dict[str, _Needed] = {}
    for base in bases:
        assert base.step is not None, "a run has steps"
        newer = [(each.step, each.log) for each in chain[: chain.index(base)] if each.step is not None]
        known, below = stated.get(base.log), log_end(base.log, base.timeline, newer, newest)
        if known is not None:
            below = None if below is None or known.below is None else max(below, known.below)
        stated[base.log] = _Needed(base.step if known is None else min(base.step, known.after), below)
    needed |= stated
    return {
        key: size
        for log, by_rank in segments.items()
        for listed in by_rank.values()
        for key, size in _unneeded(listed, needed.get(log))
    }


def _chain(manifests: Iterable[Manifest], newest: Timeline) -> list[Manifest]:
    """Return the manifests that a resume may take, the newest first."""
    held = [each for each in manifests if each.step is not None and newest.holds(each.timeline.id, each.step)]
    return sorted(held, key=lambda each: (each.timeline.number, each.step or 0), reverse=True)


def _unneeded(listed: Sequence[Segment], needed: _Needed | None) -> Iterable[tuple[str, int]]:
    """Yield key and bytes of the segments of one rank without a needed record."""
    for number, segment in enumerate(listed):
        following = listed[number + 1].first if number + 1 < len(listed) else None
        # All records of a segment are below the first record of the next one.
        is_before = needed is not None and following is not None and following <= needed.after + 1
        is_cut = needed is not None and needed.below is not None and segment.first >= needed.below
        if needed is None or is_before or is_cut:
            yield segment.key, segment.bytes

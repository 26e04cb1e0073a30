"""Finds the step that a caller names: by number, by tag, as the newest valid one, or by the best value of a metric."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal, cast

from holdfast.base.ports.store import Store
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.names import manifest_key, manifest_keys, step_folder
from holdfast.core.format.step_name import StepName, step_name
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError, first_three
from holdfast.policies import BestN, best_first
from holdfast.stored.checkpoint.location import CheckpointLocation, require_no_checkpoint
from holdfast.stored.repository.catalog import manifest_digest, require_run, step_folders
from holdfast.stored.repository.epochs import current_fence, fenced_error, is_valid
from holdfast.stored.repository.logs import base_reaching, newest_logs
from holdfast.stored.repository.quarantine import identity_at, quarantined
from holdfast.stored.repository.tags import Tag, tag_named
from holdfast.stored.repository.timelines import RunTimelines, StoredManifest, run_timelines, timelines_from

logger = logging.getLogger(__name__)

FoundStep = tuple[RunTimelines, StoredManifest]
"""The timelines of a run, and the manifest of the step that was found."""

StepQuery = Callable[[Store], FoundStep]
"""Finds one step under the root of a run. Called on one rank, when the load begins."""


def finder_of(step: object, best: object = None) -> StepQuery | None:
    """Return what finds the step that a caller names; None for the newest valid step.

    Args:
        step: A number, number and digest, a tag, or `latest`; None is short for the last.
        best: A metric whose lowest value is best, or a pair such as `("accuracy", "max")`; None to name no metric.
    Raises:
        InvalidError: An argument can name no step, or both are given.
    """
    if best is not None:
        if step is not None:
            raise InvalidError(f"step={str(step)[:80]!r} and best={str(best)[:80]!r}: expected one of them")
        return partial(_best, rule=_rule(best))
    named = step_name(step)
    return None if named.is_newest else partial(find_named, named=named)


def find_named(store: Store, named: StepName, listed: RunTimelines | None = None) -> FoundStep:
    """Return the manifest of the step that a name stands for. `latest` is the newest committed one here.

    Args:
        store: The root of the run.
        named: The name.
        listed: The timelines, if they were read already.
    Raises:
        MissingError: There is no such step or tag; the message names others.
        CorruptError: The tag is damaged.
        InvalidError: The path is one checkpoint, or several manifests have these digits.
    """
    require_no_checkpoint(store)
    if named.is_newest:
        stored = run_timelines(store) if listed is None else listed
        if not stored.chain:
            raise no_step(store)
        return stored, stored.chain[-1]
    # Before the steps are listed: it may move to a step that is committed meanwhile.
    tag = None if named.tag is None else _tag_of_run(store, named.tag)
    step, digest = (named.step, named.digest) if tag is None else (tag.step, tag.digest)
    assert step is not None, "a name is a number, a tag, or the newest step"
    stored = _timelines_with(store, step, digest) if listed is None else listed
    if tag is None and not (stored.chain or stored.superseded):
        require_run(store)
    try:
        return stored, _manifest_of(store, stored, step, digest)
    except MissingError as gone:
        if tag is None:
            raise
        _require_undamaged(store, tag)
        raise MissingError(
            f"{store.url}: tag {tag.name!r} names step {tag.step}, which is gone or was saved again since; expected a "
            f"step that is stored. Choose another step, or move the tag: holdfast tag ROOT STEP {tag.name} --move"
        ) from gone


def number_of(store: Store, named: StepName) -> int:
    """Return the number of a step that may be damaged or not committed.

    Raises:
        InvalidError: It is named by its digest, or the path is one checkpoint.
        MissingError: There is no such tag, or no step.
    """
    require_no_checkpoint(store)
    if named.digest:
        raise InvalidError(f"step={named.step}@{named.digest}: expected the step by its number, tag or as 'latest'")
    if named.tag is not None:
        return tag_named(store, named.tag).step
    return find_named(store, named)[1].step if named.step not in step_folders(store) else named.step


def location_of(home: CheckpointLocation, manifest: StoredManifest) -> CheckpointLocation:
    """Return the location of a step of a run.

    Args:
        home: The root of the run.
        manifest: Its manifest.
    """
    step, key = manifest.step, manifest.key
    moved = None if key == manifest_key(step) else key
    return replace(home, folder=step_folder(step), step=step, moved_manifest=moved, digest=manifest.digest)


def no_step(store: Store) -> MissingError:
    """Return the error for a root without a committed step."""
    return MissingError(f"{store.url}: no committed step yet; expected at least one. Save one, or choose another path")


def _timelines_with(store: Store, step: int, digest: str) -> RunTimelines:
    """Return the timelines of a run; without what is older than a step if the step is there."""
    stored = timelines_from(store, step)
    found = stored.at(step)
    if found is not None and (not digest or (found.digest or "").startswith(digest)):
        return stored
    return run_timelines(store)  # It is superseded, or the error names others.


def _manifest_of(store: Store, stored: RunTimelines, step: int, digest: str) -> StoredManifest:
    """Return the manifest of a step; without the first digits of a digest, of the step that a resume could take.

    Raises:
        InvalidError: Several manifests have these digits.
        MissingError: No such step counts; the message names others.
    """
    found = stored.at(step)
    matching = [] if found is None else [found]
    if digest:
        matching = [
            manifest
            for manifest in (*stored.chain, *stored.superseded)
            if manifest.step == step
            and (manifest.digest or manifest_digest(store, step, manifest.key) or "").startswith(digest)
        ]
    if len(matching) == 1:
        return matching[0]
    asked = f"{step}@{digest}" if digest else str(step)
    if matching:
        digests = first_three(f"{step}@{manifest.digest}" for manifest in matching)
        raise InvalidError(f"{store.url}: {asked} names several manifests: {digests}. Give more digits")
    superseded = [f"{step}@{(manifest.digest or '')[:8]}" for manifest in stored.superseded_at(step)]
    if superseded:
        raise MissingError(
            f"{store.url}: no step {asked} on the newest timeline; a newer timeline superseded it. Load it by its "
            f"digest: {first_three(superseded)}"
        )
    is_fenced = False
    with suppress(MissingError):
        is_fenced = not is_valid(store, current_fence(store), step)
    if is_fenced:
        raise fenced_error(f"{store.url}/{manifest_key(step)}")
    newest = first_three(manifest.step for manifest in reversed(stored.chain)) or "none"
    base: int | None = None
    with suppress(CheckpointError):
        base = base_reaching(store, stored, step)
        for log in newest_logs(store, stored):
            if log.steps and base is None:
                newest += f"; in the redo log after step {log.base}: {log.steps[0]} to {log.reach}"
    if base is not None and not digest:
        raise MissingError(
            f"{store.url}: step {step} is in the redo log after step {base}, and is no checkpoint; committed, newest "
            f"first: {newest}. Choose one of them, or CheckpointManager.load(state, step={step}), which redoes the step"
        )
    raise MissingError(
        f"{store.url}: no committed step {asked}; committed, newest first: {newest}. Choose one of them "
        "(holdfast ls lists all)"
    )


def _tag_of_run(store: Store, name: str) -> Tag:
    try:
        return tag_named(store, name)
    except MissingError:
        require_run(store)  # That there is no run says more.
        raise


def _require_undamaged(store: Store, tag: Tag) -> None:
    """Refuse a tag whose manifest is there and damaged: its digest is no proof that the step is gone.

    Raises:
        CorruptError: It is damaged.
    """
    for key in manifest_keys(tag.step, tag.digest):
        try:
            decode_manifest(store.get(key, MANIFEST_BYTES_MAX), f"{store.url}/{key}")
        except MissingError:
            continue
        except CorruptError as damage:
            raise CorruptError(
                f"{store.url}: tag {tag.name!r} names step {tag.step}, of which a manifest is damaged: {damage}. Run: "
                f"holdfast repair {store.url} --step {tag.step}"
            ) from damage


def _rule(best: object) -> BestN:
    if isinstance(best, BestN):
        return replace(best, n=1)
    metric, mode = best if isinstance(best, tuple | list) and len(best) == 2 else (best, "min")
    try:
        return BestN(1, cast(str, metric), cast(Literal["min", "max"], mode))
    except InvalidError as error:
        raise InvalidError(
            f"best={str(best)[:80]!r}: expected the name of a metric, of which the lowest value is best, such as "
            "'loss', or a pair such as ('accuracy', 'max')"
        ) from error


def _best(store: Store, rule: BestN) -> FoundStep:
    """Return the committed step with the best value of a metric, ranked as `BestN` ranks.

    Steps that a newer timeline superseded take no part, nor do damaged steps.

    Raises:
        MissingError: There is no step, or none with a finite value.
        InvalidError: No step has the metric; the message names those that there are.
    """
    require_no_checkpoint(store)
    require_run(store)
    stored = run_timelines(store)
    if not stored.chain:
        raise no_step(store)
    metrics = _metrics(store, stored)
    names = sorted({name for found in metrics.values() for name in found})
    if rule.metric not in names:
        raise InvalidError(
            f"{store.url}: best={rule.metric!r}: no committed step has this metric; they have {names or 'none'}. Name "
            "one of these, or give it to save: save(step, state, metrics={…})"
        )
    ranked = best_first(rule, metrics)
    if not ranked:
        raise MissingError(
            f"{store.url}: best={rule.metric!r}: no committed step has a finite value of it. Choose a step by number"
        )
    chosen = stored.at(ranked[0])
    assert chosen is not None, "it is in the chain"
    logger.info("step %d has the best %s: %g", chosen.step, rule.metric, metrics[chosen.step][rule.metric])
    return stored, chosen


def _metrics(store: Store, stored: RunTimelines) -> Mapping[int, Mapping[str, float]]:
    """Return the metrics of the steps of the chain that can be read and are not under quarantine."""
    records = quarantined(store)
    metrics: dict[int, Mapping[str, float]] = {}
    for manifest in stored.chain:
        try:
            data = store.get(manifest.key, MANIFEST_BYTES_MAX)
            found = decode_manifest(data, f"{store.url}/{manifest.key}")
            if records.get(manifest.step) and identity_at(store, manifest.key) in records[manifest.step]:
                raise CorruptError("it is under quarantine")
        except MissingError:
            continue  # It was deleted meanwhile.
        except (CorruptError, InvalidError) as error:
            logger.warning("step %d is not ranked: %s", manifest.step, error)
            continue
        metrics[manifest.step] = found.metrics
    return metrics


def is_run(store: Store) -> bool:
    """Return whether a path is the root of a run."""
    with suppress(CheckpointError):
        require_no_checkpoint(store)
        require_run(store)
        return True
    return False

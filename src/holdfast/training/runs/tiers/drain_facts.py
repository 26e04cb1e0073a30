"""What drains share: facts of steps for retention, and the error of a step that the root does not get."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepAndDigest
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from holdfast.core.format.names import manifest_keys
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.stored.repository.publish import get_or_none
from holdfast.stored.repository.tags import read_tags
from holdfast.stored.repository.timelines import run_timelines
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.runs.removal.chosen_steps import name_of
from holdfast.training.runs.removal.retention import KeptFacts


def facts_of(manifest: Manifest, tags: tuple[str, ...]) -> KeptFacts:
    """Return the facts about a step that has some tags."""
    step, digest = name_of(manifest)
    return KeptFacts(step, manifest.created, manifest.metrics, tags, manifest.healthy, manifest.timeline, digest)


def facts_in(run: TwoRoots) -> Iterable[tuple[StepAndDigest, KeptFacts]]:
    """Yield what the root has: each step that counts and can be read. Read once a job; the drain adds to it."""
    tags, stored = read_tags(run.root), run_timelines(run.root)
    for each in (*stored.chain, *stored.superseded):
        with suppress(CheckpointError):
            manifest = decode_manifest(run.root.get(each.key, MANIFEST_BYTES_MAX), f"{run.root.url}/{each.key}")
            yield name_of(manifest), facts_of(manifest, tags.of(*name_of(manifest)))


def undrained(step: int | None, why: str) -> UnavailableError:
    """Return the error of a step that is near, and that the root does not get from this job."""
    return UnavailableError(
        f"step {step} is saved near, and not in the root: {why}. Expected a drain to its end. As long as the near tier "
        "holds the step, a restart loads the step, and the next job or holdfast drain copies it"
    )


def manifest_in(place: Store, name: StepAndDigest) -> Manifest | None:
    """Return the manifest of a step in a place; None if it is not there any more."""
    for key in manifest_keys(*name):
        data = get_or_none(place, key, MANIFEST_BYTES_MAX)
        with suppress(CheckpointError):
            if data is not None and (manifest := decode_manifest(data, f"{place.url}/{key}")).digest == name[1]:
                return manifest
    return None

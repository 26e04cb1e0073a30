"""Which steps of a run its policy keeps, as things are now."""

from __future__ import annotations

import logging

from holdfast.errors import CheckpointError
from holdfast.plan.retention import Reasons, kept
from holdfast.ports.store import Store
from holdfast.repository.catalog import committed_steps, read_manifest
from holdfast.repository.names import step_folder
from holdfast.repository.tags import read_tags
from holdfast.spec.policy import KeepPolicy
from holdfast.spec.retention import KeptFacts

logger = logging.getLogger(__name__)


def kept_steps(store: Store, policy: KeepPolicy | None) -> Reasons:
    """Return the steps that a policy keeps, ascending, each with the reasons; damaged ones are not among them.

    Raises:
        CorruptError: A tag cannot be read: it may name a step that must stay.
        InvalidError: The policy ranks by a metric that no step has.
    """
    facts = []
    tags = read_tags(store)
    for error in tags.damaged.values():
        raise error
    for step in committed_steps(store):
        try:
            manifest = read_manifest(store, step_folder(step))
        except CheckpointError as error:
            logger.warning("step %d counts for nothing among those to keep: %s", step, error)
            continue
        named = tags.of(step, manifest.digest)
        facts.append(KeptFacts(step, manifest.created, manifest.metrics, named, manifest.healthy))
    return kept(policy, facts)

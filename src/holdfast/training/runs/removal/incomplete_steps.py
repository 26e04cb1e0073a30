"""Steps that no run resumes from now: files are missing, or cannot be looked at.

They must not take the place of a step that can be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.base.ports.packs import packs_under
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepAndDigest, StepFiles
from holdfast.base.types.timeline import Timeline
from holdfast.errors import UnavailableError
from holdfast.stored.checkpoint.pack_sizes import sizes_of
from holdfast.stored.repository import removal
from holdfast.stored.repository.tags import Tags


def incomplete_steps(
    store: Store,
    manifests: Mapping[StepAndDigest, Manifest],
    all_files: Sequence[StepFiles],
    newest: Timeline,
    tags: Tags,
) -> Mapping[StepAndDigest, tuple[str, ...]]:
    """Return the newest steps with missing files of each timeline, down to its first complete step, each with why.

    So too for the chain of the newest timeline. No run resumes from these steps. The complete step is the newest valid
    one of its timeline or chain, and the policy keeps it.

    A step without a why need not stay. In a store of many nodes one node may be silent for hours, and each save adds a
    step that cannot be looked at: the newest of these steps stays, and each one with a tag.

    Args:
        store: The root of the run.
        manifests: Manifests by step and digest.
        all_files: Files of all steps. Those of known steps are left out: they are complete.
        newest: The newest timeline.
        tags: The tags of all steps.
    """
    stored = {key: size for files in all_files for sizes in files.attempts.values() for key, size in sizes.items()}
    torn: dict[StepAndDigest, tuple[str, ...]] = {}
    complete = set[StepAndDigest]()
    for group in _groups(manifests, newest):
        is_newest = True
        for name in group:
            if name in complete:
                break
            named, links = removal.named_files(manifests[name]), removal.link_keys(manifests[name])
            try:
                # Packs of other steps, the folders of which are not listed again.
                stored |= sizes_of(named.keys() - stored.keys(), packs_under(store, ""))
                short = [key for key, size in named.items() if stored[key] != size]
                at_links = {links[key] for key in short if key in links}
                stored |= sizes_of(at_links - stored.keys(), packs_under(store, ""))
            except UnavailableError as error:  # A silent node must not let the files of failed saves pile up.
                must_stay = is_newest or torn.get(name) or tags.of(*name) or not store.traits.has_parity
                torn[name] = (f"cannot be looked at now: {error}",) if must_stay else ()
                is_newest = False
                continue
            short = [key for key in short if key not in links or stored[links[key]] != named[key]]
            if not short:
                complete.add(name)
                break
            torn[name] = (f"{short[0]} is missing or of another size",)
    return torn


def _groups(manifests: Mapping[StepAndDigest, Manifest], newest: Timeline) -> Iterable[list[StepAndDigest]]:
    """Return the steps of each timeline, and those of the chain of the newest one, in the order of a resume."""
    by_timeline: dict[str, list[StepAndDigest]] = {}
    for name in sorted(manifests, reverse=True):
        by_timeline.setdefault(manifests[name].timeline.id, []).append(name)
    chain = [name for name, manifest in manifests.items() if newest.holds(manifest.timeline.id, name[0])]
    chain.sort(key=lambda name: (manifests[name].timeline.number, name[0]), reverse=True)
    return (*by_timeline.values(), chain)

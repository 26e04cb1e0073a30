"""Which packs of a run are still wanted: those that a manifest names, its own step's or another's."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.format.names import is_pack_name, step_of_pack, step_pack_name
from holdfast.types.manifest import Manifest


def packs_named_by(manifests: Iterable[Manifest]) -> frozenset[str]:
    """Return the packs of a run that some of its manifests name, by their path from the root.

    References are never chained, so nothing but these manifests need be asked. Files that other systems wrote are no
    packs of the run and are left out.

    Args:
        manifests: Those of steps that are to stay readable.
    """
    named = set()
    for manifest in manifests:
        for pack in manifest.packs:
            if step_of_pack(pack.name) is not None:
                named.add(pack.name)
            elif is_pack_name(pack.name) and manifest.step is not None:
                named.add(step_pack_name(manifest.step, manifest.attempt, pack.name))
    return frozenset(named)

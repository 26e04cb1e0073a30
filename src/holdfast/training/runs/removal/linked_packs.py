"""Packs in the folders of removed steps that kept steps name: which may go, since each of these steps has a link."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.base.ports.store import Store
from holdfast.base.types.removal import StepFiles
from holdfast.core.format.names import link_name, step_folder, step_of_pack
from holdfast.errors import CheckpointError
from holdfast.stored.repository import removal


@dataclass(frozen=True, slots=True)
class LinkedPacks:
    """What kept steps need in the folders of steps that do not stay."""

    listed: Sequence[StepFiles]
    """All steps. Those that stay are without the packs that they need only by their links."""

    linked: frozenset[str]
    """The packs, by their path from the root, that no step needs at its place. Their removal frees no bytes."""

    holders: Mapping[int, tuple[int, ...]]
    """By step that does not stay, the steps that need packs in its folder."""


def linked_packs(
    store: Store, listed: Sequence[StepFiles], staying: Collection[int], bases: Collection[int]
) -> LinkedPacks:
    """Find the packs of steps that do not stay, and whether the steps that name a pack hold it by links.

    A link must be one object with the pack. A copy of the pack under its name may be damaged.

    Args:
        store: The root of the run.
        listed: All steps; those that do not stay, with their files.
        staying: Steps that stay, and those that are being saved.
        bases: Steps that saves under way refer to. Such a save may have got no link, so it needs what its base names.
    """
    others = {
        key
        for files in listed
        if files.step not in staying
        for sizes in files.attempts.values()
        for key in sizes
        if removal.is_pack_key(key)
    }
    needed = {files.step: files.packs & others for files in listed if files.step in staying and files.counts}
    # A store that answers in pages has no links.
    may_link = store.traits.page_entries is None
    held = {
        files.step: frozenset(pack for pack in needed[files.step] if may_link and _is_linked(store, files, pack))
        if files.step not in bases
        else frozenset[str]()
        for files in listed
        if needed.get(files.step)
    }
    wanted = {(step, pack) for step, packs in needed.items() for pack in packs if pack not in held[step]}
    holders: dict[int, set[int]] = {}
    for step, pack in wanted:
        owner = step_of_pack(pack)
        assert owner is not None, "it is a pack of a step"
        holders.setdefault(owner, set()).add(step)
    linked = frozenset().union(*held.values()) - {pack for _, pack in wanted}
    without = [replace(files, packs=files.packs - linked) if files.step in held else files for files in listed]
    return LinkedPacks(without, linked, {owner: tuple(sorted(steps)) for owner, steps in sorted(holders.items())})


def _is_linked(store: Store, files: StepFiles, pack: str) -> bool:
    link = f"{step_folder(files.step)}{files.attempt}/{link_name(pack)}"
    try:
        return store.identity(link) == store.identity(pack)
    except CheckpointError:
        return False  # There is no link, or nothing can be said now.

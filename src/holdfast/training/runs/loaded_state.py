"""Whether a state is still as a load left it, so that a save at the loaded step has nothing to write.

First the names and the objects that hold tensors are compared, with address and version counter of each tensor: this
finds nearly every loop that has trained. But not every write moves a counter: not that of a fused optimizer, of a load,
of `.data`, or of an object that is no module. So every tensor is then compared with the digests of the step, and every
plain value with that of the manifest. A loop that has not trained may have drawn a random number or a sample. So what
each rank has for itself (`RngState`, `PerRank`) and loaders are not compared. Tensors that a rank has for itself are
stored as plain values, so their stamps have digests.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.geometry.region import Region, contains
from holdfast.base.name_patterns import with_names_above
from holdfast.base.ports.framework import Collected, Framework, LocalShard, Selection
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import PackItem
from holdfast.base.types.values import Group, Value
from holdfast.core.engine.stream import Scratch, chunk_digests
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.core.format.values import values
from holdfast.training.loading.load import Loaded
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.statuses import names_of


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state that one load filled as a whole."""

    step: int
    """The step that was loaded."""

    manifest: Manifest
    """Its commit record."""

    _selection: Selection
    _keys: frozenset[str]
    """The names of the state itself."""
    _stored: Index | SplitIndex
    """The index of the step."""
    _watched: Mapping[str, tuple[weakref.ref[object], object]]
    """By path, an object that holds tensors, and their stamps."""
    _filled: frozenset[str]
    """The tensors that the load filled on this rank, without those of which there are stamps."""

    def is_still(self, framework: Framework, step: int, state: Mapping[str, object], selection: Selection) -> bool:
        """Return whether a save of a step may write what was loaded: nothing shows that the loop has trained.

        Args:
            framework: Finds the tensors.
            step: The step.
            state, selection: What is saved.
        """
        if step != self.step or selection != self._selection or frozenset(state) != self._keys:
            return False
        # Only now: nearly every load is followed by a save of another step.
        names = names_of(self._stored.tensors, self.manifest.aliases, self.manifest.tree)
        if not all(_is_of(name, self._keys) for name in names):
            return False
        try:
            now = framework.watched(state)
        except Exception:  # noqa: BLE001 - a state that cannot be watched is saved, or refused, by what the save finds
            return False
        return now.keys() == self._watched.keys() and all(
            known() is now[path][0] and stamps == now[path][1] for path, (known, stamps) in self._watched.items()
        )

    def equals(self, collected: Collected, buffer: memoryview) -> bool:
        """Return whether a state has the tensors of the step, as stored; False if the step has other pieces.

        Args:
            collected: The state, taken apart.
            buffer: Scratch memory.
        Raises:
            CheckpointError: A tensor or the index cannot be read.
        """
        # An object may hold fewer tensors than it was given: those that are left would equal the step.
        if not self._filled <= {each.shard.tensor.fqn for each in collected.shards}:
            return False
        shards = [local for local in collected.shards if local.shard.pieces]
        if any(self._stored.tensors.get(each.shard.tensor.fqn) != each.shard.tensor for each in shards):
            return False
        wanted = [(each.shard.tensor.fqn, _box_around(each, held)) for each, held in _held(shards)]
        stored = self._stored
        index = stored if isinstance(stored, Index) else stored.read_for(wanted)
        return all(_is_stored(local, held, index, Scratch(buffer)) for local, held in _held(shards))

    def changed_values(self, collected: Collected, state: Mapping[str, object], *, is_alone: bool) -> list[str]:
        """Return the paths of plain values and hyperparameters that are not as the step has them, type and order too.

        Args:
            collected: The state, taken apart.
            state: The state; it shows which objects are loaders.
            is_alone: Whether no other rank can have the values that are absent here.
        """
        return list(_changed(self.manifest.tree, collected.tree, "", state, is_alone))


def _changed(saved: Value, now: Value, path: str, at: object, is_alone: bool) -> Iterator[str]:
    """Yield the paths below a value that differ; arguments as `LoadedState.changed_values`."""
    if isinstance(saved, Group) and isinstance(now, Group) and saved.kind == now.kind:
        if now.kind == "stateful" and hasattr(type(at), "__iter__"):
            return  # A loader: it has moved on if anything has looked at its samples.
        if now.kind == "optimizer":
            for name in _OPTIMIZER_TABLES:
                below = f"{path}.{name}"
                yield from _changed_items(saved.items.get(name), now.items.get(name), below, None, is_alone)
        else:
            yield from _changed_items(saved.items, now.items, path, at, is_alone)
    elif values.dumps(values.encode(saved, path)) != values.dumps(values.encode(now, path)):
        yield path


_OPTIMIZER_TABLES = ("param_groups", "empty_groups", "state")
"""By name: the first two name the hyperparameters of a group by a digest of their content."""


def _changed_items(saved: Value, now: Value, path: str, at: object, is_alone: bool) -> Iterator[str]:
    ours, theirs = (each if isinstance(each, dict) else {} for each in (now, saved))
    for name in theirs.keys() | ours.keys() if is_alone else ours.keys():
        below = f"{path}.{name}" if path else name
        if name not in ours or name not in theirs:
            yield below
        else:
            inner = at.get(name) if isinstance(at, Mapping) else None
            yield from _changed(theirs[name], ours[name], below, inner, is_alone)


def _held(shards: Sequence[LocalShard]) -> Iterator[tuple[LocalShard, Region]]:
    return ((local, held) for local in shards for held in local.shard.pieces)


def _box_around(local: LocalShard, held: Region) -> Box:
    return held if isinstance(held, Box) else Box.whole(local.shard.tensor.global_shape)


def _is_stored(local: LocalShard, held: Region, index: Index, scratch: Scratch) -> bool:
    """Return whether stored pieces make up a held region, and have the bytes that it has now."""
    near = index.pieces_near(local.shard.tensor.fqn, _box_around(local, held))
    inside = [piece for piece in near if contains(held, piece.region)]
    if sum(piece.bytes for piece in inside) != held.numel * local.shard.tensor.itemsize:
        return False
    for piece in inside:
        item = PackItem(piece.tensor, piece.region, 0, 0)
        digests = chunk_digests(item, scratch, piece.chunk_bytes, local.source, None)
        if any(digest != piece.digests[DIGEST_BYTES * n :][:DIGEST_BYTES] for n, digest in enumerate(digests)):
            return False
    return True


def loaded_state(framework: Framework, request: LoadRequest, loaded: Loaded) -> LoadedState | None:
    """Return the state that a load filled; None unless the load was a whole one.

    Args:
        framework: Finds the tensors.
        request: What was loaded, and how.
        loaded: What the load did.
    """
    step, state, report = loaded.location.step, request.state, loaded.report
    if step is None or not request.is_whole or report.missing or report.unexpected or report.skipped:
        return None
    try:
        # An object without weak references cannot be told from a later one at its address: it raises here.
        watched = {path: (weakref.ref(each), stamps) for path, (each, stamps) in framework.watched(state).items()}
    except Exception:  # noqa: BLE001 - a state that can be filled need not be one that can be watched
        return None
    # Where no object shows whether the loop has trained, nobody can say that nothing has changed.
    if not watched:
        return None
    # A module or optimizer may be given more than a save takes: FSDP1 has scalars of parameters elsewhere.
    filled = frozenset(fqn for fqn in loaded.filled if watched.keys().isdisjoint(with_names_above(f".{fqn}")))
    return LoadedState(step, loaded.manifest, request.selection, frozenset(state), loaded.index, watched, filled)


def _is_of(name: str, keys: Collection[str]) -> bool:
    """Return whether a name is one of some keys, or below one. A flat state has as many keys as there are names."""
    return name in keys or any(name[:at] in keys for at, letter in enumerate(name) if letter == ".")

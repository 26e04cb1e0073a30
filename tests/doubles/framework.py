"""A framework over numpy: states are global arrays, of which each rank holds the part that its layout assigns to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Self

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box, grid_within
from holdfast.base.geometry.placement import boxes_at, coordinate_of, replica_ranks
from holdfast.base.geometry.region import FlatRange, Region, contains, region_boxes
from holdfast.base.geometry.tensor import MeshLayout, Role, Shard, TensorSpec
from holdfast.base.ports.framework import (
    Catalog,
    Collected,
    LocalShard,
    Misfit,
    Selection,
    Target,
    UnmatchedPattern,
    Wanted,
)
from holdfast.base.types.reports import PartlyFilled
from holdfast.base.types.values import Group


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A whole tensor; a rank uses only its own part."""

    dtype: str
    """Element type, a key of `DTYPES`."""

    array: NDArray[np.generic]
    """All elements, in the numpy dtype of the same bits; a load fills this rank's part."""

    layout: MeshLayout | None = None
    """Mesh and placements; None for a plain tensor, which every rank that has it holds whole."""

    role: Role = Role.PARAMETER
    """Whether copies of a plain tensor must agree."""

    declared: Mapping[int, tuple[Region, ...]] | None = None
    """Instead of a layout: the regions of each rank; ranks with equal regions are replicas."""

    siblings: tuple[MeshLayout, ...] = ()
    """Layouts on meshes beside that of `layout`, disjoint and of its shape: ranks at equal coordinates are replicas."""

    def layout_on(self, rank: int) -> MeshLayout | None:
        """Return the layout on the mesh that a rank is on; `layout` if it is on none."""
        return next((each for each in self.siblings if rank in each.mesh_ranks), self.layout)

    def regions_on(self, rank: int) -> tuple[Region, ...]:
        """Return the regions that a rank holds."""
        if self.declared is not None:
            return self.declared.get(rank, ())
        layout = self.layout_on(rank)
        if layout is None:
            return (Box.whole(self.array.shape),)
        if rank not in layout.mesh_ranks:
            return ()
        return boxes_at(layout, self.array.shape, coordinate_of(layout, rank))

    def holders_with(self, rank: int) -> tuple[int, ...] | None:
        """Return the ranks that hold the same regions as `rank` on its own mesh; None for a plain tensor."""
        if self.declared is not None:
            held = self.declared.get(rank)
            return tuple(sorted(other for other, regions in self.declared.items() if regions == held))
        layout = self.layout_on(rank)
        return None if layout is None else replica_ranks(layout, coordinate_of(layout, rank))

    def is_on(self, rank: int) -> bool:
        """Return whether the tensor is in a rank's state."""
        if self.declared is not None:
            return rank in self.declared
        layout = self.layout_on(rank)
        return layout is None or rank in layout.mesh_ranks


class _Copied:
    """The ticket of a copy that is already complete."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class _ArraySource:
    array: NDArray[np.generic]
    held: tuple[Region, ...]

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> _Copied:
        assert any(contains(region, piece) for region in self.held), f"{piece} is read; expected a part of {self.held}"
        buffer[: stop - start] = _bytes_of(self.array, piece)[start:stop]
        return _Copied()

    @classmethod
    def copy_together(cls, sources: Sequence[Self], pieces: Sequence[Region], buffer: memoryview) -> _Copied:
        at = 0
        for source, piece in zip(sources, pieces, strict=True):
            stop = piece.numel * source.array.itemsize
            source.copy_into(piece, 0, stop, buffer[at:])
            at += stop
        assert at == len(buffer), f"{at} bytes of pieces for a buffer of {len(buffer)}"
        return _Copied()

    def sample(self, blocks: int, block_bytes: int, *, whole_bytes: int, shift: float) -> bytes:
        data = b"".join(_bytes_of(self.array, region) for region in self.held)
        if len(data) <= max(whole_bytes, blocks * block_bytes):
            return data
        places = (int((number + shift) * (len(data) + block_bytes) / blocks) - block_bytes for number in range(blocks))
        starts = (max(min(place, len(data) - block_bytes), 0) for place in places)
        return b"".join(data[start : start + block_bytes] for start in starts)

    def stamp(self) -> object:
        return self.array.ctypes.data

    def copied(self) -> _ArraySource:
        return _ArraySource(self.array.copy(), self.held)


@dataclass(frozen=True, slots=True)
class _ArrayTarget(Target):
    array: NDArray[np.generic]
    held: tuple[Box, ...]

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        assert source_box.contains(part), f"{part} is placed from {source_box}; expected a part of it"
        assert any(box.contains(part) for box in self.held), f"{part} is placed; expected a part of {self.held}"
        stored = np.frombuffer(source, dtype=self.array.dtype).reshape(source_box.shape)
        self.array[part.relative_to((0,) * len(part.start))] = stored[part.relative_to(source_box.start)]

    def put(self, at: Sequence[slice], elements: NDArray[np.generic]) -> None:
        self.array[grid_within(at, Box.whole(self.array.shape))] = elements

    def memory(self, part: Box) -> memoryview | None:
        assert any(box.contains(part) for box in self.held), (
            f"memory of {part} is requested; expected a part of {self.held}"
        )
        run = self.array[part.relative_to((0,) * len(part.start))]
        return run.view(np.uint8).data.cast("B") if run.flags.c_contiguous and run.ndim else None


@dataclass(frozen=True, slots=True)
class _NumpyRestoration:
    wanted: Sequence[Wanted]
    missing: Sequence[str]
    unexpected: Sequence[str]
    skipped: Sequence[str]
    state: Mapping[str, object]
    values: Mapping[str, object] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    unmatched: Sequence[UnmatchedPattern] = ()
    misfits: Sequence[Misfit] = ()
    partly: Sequence[PartlyFilled] = ()

    @property
    def fills_any(self) -> bool:
        return bool(self.wanted or self.values)

    def finish(self) -> None:
        if isinstance(self.state, dict):
            self.state.update(self.values)


class NumpyFramework:
    """States are dicts that map an FQN to a `GlobalTensor` or a plain value."""

    def __init__(self, rank: int) -> None:
        """Serve the states of one rank."""
        self._rank = rank

    def collect(self, state: Mapping[str, object], selection: Selection) -> Collected:
        """Take a state apart. An exception among the values is raised, like the error of an invalid value."""
        shards: list[LocalShard] = []
        items: dict[str, object] = {}
        skipped: list[str] = []
        for fqn, value in state.items():
            if isinstance(value, Exception):
                raise value
            if not _takes_part(fqn, selection):
                skipped.append(fqn)
            elif not isinstance(value, GlobalTensor):
                items[fqn] = value
            elif value.is_on(self._rank):
                held = value.regions_on(self._rank)
                spec = TensorSpec(fqn, value.dtype, value.array.shape)
                shard = Shard(spec, value.layout_on(self._rank), value.holders_with(self._rank), value.role, held)
                shards.append(LocalShard(shard, _ArraySource(value.array, held)))
        return Collected(shards, Group("dict", items), {}, skipped, unmatched=_unmatched(state, selection))

    def watched(self, state: Mapping[str, object]) -> Mapping[str, tuple[object, object]]:
        """Return the tensors of a state, each with the address of its array."""
        tensors = {fqn: value for fqn, value in state.items() if isinstance(value, GlobalTensor)}
        return {fqn: (value, value.array.ctypes.data) for fqn, value in tensors.items()}

    def restoration(self, state: Mapping[str, object], catalog: Catalog, selection: Selection) -> _NumpyRestoration:
        """Return what a state wants of a checkpoint."""
        wanted: list[Wanted] = []
        missing: list[str] = []
        values: dict[str, object] = {}
        measured: dict[str, int] = {}
        misfits: list[Misfit] = []
        partly: list[PartlyFilled] = []
        chosen = [fqn for fqn in state if _takes_part(fqn, selection)]
        for fqn in chosen:
            value = state[fqn]
            if isinstance(value, Exception):
                raise value
            if isinstance(value, GlobalTensor):
                measured[fqn] = sum(len(_bytes_of(value.array, region)) for region in value.regions_on(self._rank))
                spec = catalog.tensors.get(fqn)
                if spec is None:
                    missing.append(fqn)
                    continue
                overlap = Box.whole(value.array.shape)
                if spec.global_shape != value.array.shape:
                    is_partial = any(fnmatchcase(fqn, pattern) for pattern in selection.partial)
                    if not is_partial or len(spec.global_shape) != value.array.ndim:
                        text = f"{fqn}: {value.array.shape} here and {spec.global_shape} in the checkpoint"
                        misfits.append(Misfit(text, is_certain=True, fqn=fqn, is_shape=True))
                        del measured[fqn]
                        continue
                    overlap = Box.whole(tuple(map(min, value.array.shape, spec.global_shape)))
                    partly.append(PartlyFilled(fqn, overlap.stop, value.array.shape, spec.global_shape))
                regions = value.regions_on(self._rank)
                held = tuple(box for region in regions for box in region_boxes(region, value.array.shape))
                target = _ArrayTarget(value.array, held)
                boxes = held
                if overlap.stop != value.array.shape:
                    boxes = tuple(part for box in held if (part := box.intersect(overlap)) is not None)
                wanted.append(Wanted(fqn, boxes, value.dtype, value.array.shape, target, fqn))
            elif fqn in catalog.tree.items:
                values[fqn] = catalog.tree.items[fqn]
            else:
                missing.append(fqn)
        stored = {*catalog.tensors, *catalog.tree.items}
        unexpected = sorted(fqn for fqn in stored - set(state) if _takes_part(fqn, selection))
        skipped = [fqn for fqn in state if fqn not in chosen]
        unmatched = _unmatched([*state, *stored], selection)
        return _NumpyRestoration(
            wanted, missing, unexpected, skipped, state, values, measured, unmatched, misfits, partly
        )


def _bytes_of(array: NDArray[np.generic], region: Region) -> bytes:
    if isinstance(region, FlatRange):
        return array.reshape(-1)[region.start : region.stop].tobytes()
    return array[region.relative_to((0,) * len(region.start))].tobytes()


def _unmatched(names: Collection[str], selection: Selection) -> tuple[UnmatchedPattern, ...]:
    patterns = [UnmatchedPattern("only", pattern) for pattern in selection.only or ()]
    patterns += [UnmatchedPattern("skip", pattern) for pattern in selection.skip]
    patterns += [UnmatchedPattern("partial", pattern) for pattern in selection.partial]
    return tuple(each for each in patterns if not any(fnmatchcase(name, each.pattern) for name in names))


def _takes_part(fqn: str, selection: Selection) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(fqn, pattern) for pattern in patterns)

    return (selection.only is None or matches(selection.only)) and not matches(selection.skip)

"""The tensor framework: takes a state apart into shards, offers targets to load into, and copies their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.tensor import Shard, TensorSpec
from holdfast.base.geometry.value_class import value_class
from holdfast.base.types.manifest import OptimizerRecord
from holdfast.base.types.plan import WantedBoxes
from holdfast.base.types.reports import PartlyFilled
from holdfast.base.types.values import FrameworkValue, Group, Value


class Ticket(Protocol):
    """A copy that may still be under way."""

    def wait(self) -> None:
        """Return once the copy is complete; any thread, any number of times. If it raises, the copy may go on."""
        ...


class _Done:
    def wait(self) -> None:
        """Return at once: the copy was complete when the call returned."""


DONE: Ticket = _Done()
"""The ticket of a copy that is complete."""


Unpin = Callable[[], None]
"""Undoes a pin, before the memory is freed."""

Pin = Callable[[memoryview], Unpin]
"""Page-locks host memory, so that a device copies into it asynchronously.

Raises:
    UnavailableError: It failed; the memory is still usable, but copies into it are slower.
"""


class Source(Protocol):
    """The bytes of one rank's shard of a tensor, read piece by piece.

    Those of a framework are read by several threads at a time, in any order.
    """

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy a run of a piece's row-major bytes to the front of `buffer`.

        Args:
            piece: A region inside one of the shard's pieces, and of the same kind (box or flat range).
            start, stop: Half-open byte range within the piece's own row-major bytes.
            buffer: Writable memory of at least `stop - start` bytes. Until the ticket's `wait` returns, keep the source
                alive and do not use the buffer. If this call raises, no copy is under way.
        """
        ...

    @classmethod
    def copy_together(cls, sources: Sequence[Self], pieces: Sequence[Region], buffer: memoryview) -> Ticket:
        """Copy whole pieces of several sources of one state, one after the other: much faster for tiny pieces.

        Args:
            sources: Where each piece comes from.
            pieces: As for `copy_into`; none is empty.
            buffer: Writable memory with exactly the bytes of all pieces.
        """
        ...

    def sample(self, blocks: int, block_bytes: int, *, whole_bytes: int, shift: float) -> bytes | memoryview:
        """Return up to `blocks` blocks of `block_bytes`, evenly spaced over the shard; all bytes if there are few.

        Args:
            blocks, block_bytes: How many, and the size of each.
            whole_bytes: Size up to which all bytes are returned.
            shift: Where the blocks begin, from 0 to less than 1 of their distance.
        """
        ...

    def stamp(self) -> object:
        """Return a value that stays equal until the memory moves, or changes in a way that the framework counts."""
        ...

    def copied(self) -> Source:
        """Return a source of a copy of the present bytes."""
        ...


class Target(Protocol):
    """A writable view of the part of one tensor that one rank wants."""

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` out of the row-major bytes of `source_box` into this target.

        Args:
            part: Global coordinates; inside the wanted box and inside `source_box`.
            source: The row-major bytes of `source_box`, in the dtype that was saved; perhaps read-only memory.
            source_box: Global coordinates of `source`.
        """
        ...

    @classmethod
    def place_together(
        cls, targets: Sequence[Self], boxes: Sequence[Box], source: memoryview, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Copy one box to each of several targets of one state: faster for tiny ones where a framework can.

        Args:
            targets: Where each box goes.
            boxes: As `part` of `place`.
            source: Memory that holds the row-major bytes of every box, in the dtype that was saved; perhaps read-only.
            ranges: Half-open byte range of each box in `source`.
        """
        for target, box, (start, stop) in zip(targets, boxes, ranges, strict=True):
            target.place(box, source[start:stop], box)

    def put(self, at: Sequence[slice], elements: NDArray[np.generic]) -> None:
        """Copy elements of a grid into this target.

        Args:
            at: Global coordinates of the grid along each dimension, with a step from 1 on; inside a wanted box.
            elements: In the dtype that was saved, with any strides; the shape of the grid.
        """
        ...

    def memory(self, part: Box) -> memoryview | None:
        """Return the target's own memory for `part`, if it holds the stored bytes as one contiguous run.

        None if host memory has no such run: a slice of columns, device memory, another dtype. Reading straight into the
        memory saves the copy out of a buffer, which costs as much as a read from the page cache.

        Args:
            part: Global coordinates; inside the wanted box.
        """
        ...


@value_class
class LocalShard:
    """A shard and the source of its bytes."""

    shard: Shard
    """What this rank holds."""

    source: Source
    """Its bytes."""

    fenced: bool = False
    """Whether its bytes change only after the fence of its `Collected` has run a call."""


Fence = Callable[[Callable[[], None]], None]
"""Registers a call. It runs on the training thread before a fenced shard changes (optimizer step, load), and again
before later changes until one run has completed. Source: the copies fenced by the optimizer step of DataStates-LLM."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A state taken apart."""

    shards: Sequence[LocalShard]
    """One per tensor of which this rank holds a part; FQNs are distinct."""

    tree: Group
    """All values that are not tensors, in their nested containers."""

    aliases: Mapping[str, str]
    """Tied names: alias to the FQN under which the tensor is stored."""

    skipped: Sequence[str]
    """FQNs and paths excluded by `only` and `skip`."""

    per_rank: Mapping[str, Value] = field(default_factory=dict)
    """This rank's own values by path; the tree holds a `PerRankRef` for each."""

    fence: Fence | None = None
    """The fence of the fenced shards; None if there is none: then all shards must be copied during the call."""

    unfenced_because: str = ""
    """Why there is no fence."""

    optimizers: Mapping[str, OptimizerRecord] = field(default_factory=dict)
    """Class and state keys of each optimizer, by path."""

    pin: Pin | None = None
    """Page-locks memory for copies of the shards; None if all shards are in host memory."""

    unmatched: Sequence[UnmatchedPattern] = ()
    """Patterns of the selection that match no name of this rank's state."""

    refused: Sequence[str] = ()
    """A message for each tensor that cannot be saved: path, type and what to do. Any refuses the save."""

    accumulators: Sequence[str] = ()
    """Paths of metrics: they count what their rank has seen, so their states differ by rank in ordinary runs."""

    subclasses: Mapping[str, FrameworkValue] = field(default_factory=dict)
    """What the tree holds for each tensor subclass, by its name; all ranks that hold one must have the same."""

    order: Sequence[str] = ()
    """Names in the order of the state: of tensors, and of items of dicts and modules."""

    as_loaded: bool = False
    """Whether this is the step to be saved, and this rank holds it as it was loaded."""


@value_class
class Wanted(WantedBoxes):
    """One tensor to be filled."""

    dtype: str
    """Element type of the target."""

    global_shape: tuple[int, ...]
    """Shape of the whole target tensor."""

    target: Target
    """Where it goes."""

    fqn: str
    """Name in the state that is being loaded."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why an object of the state does not fit what the checkpoint has of it."""

    text: str
    """Path, what was saved, what is there, and what to do."""

    is_certain: bool
    """Whether it is known not to fit: a strict load refuses it. Otherwise a warning is logged."""

    fqn: str = ""
    """The name that it keeps from being filled; empty if it is of an object with many names."""

    is_shape: bool = False
    """Whether a tensor has another shape. Such a load is refused even if it is not strict."""


class Restoration(Protocol):
    """A load under way: the tensors that it wants, and its last step."""

    @property
    def wanted(self) -> Sequence[Wanted]:
        """Tensors to read."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes in memory of each selected tensor of this rank's state, by one of its names.

        A tensor with several names counts once; a tensor that the checkpoint lacks counts too.
        """
        ...

    @property
    def missing(self) -> Sequence[str]:
        """Names in the state that the checkpoint lacks."""
        ...

    @property
    def unexpected(self) -> Sequence[str]:
        """Names under the passed keys in the checkpoint that the state lacks."""
        ...

    @property
    def skipped(self) -> Sequence[str]:
        """Names excluded by `only` and `skip`."""
        ...

    @property
    def unmatched(self) -> Sequence[UnmatchedPattern]:
        """Patterns of the selection that match no name of this rank's state; of `skip`, also none in the checkpoint."""
        ...

    @property
    def misfits(self) -> Sequence[Misfit]:
        """Objects of the state that do not fit what the checkpoint has of them."""
        ...

    @property
    def partly(self) -> Sequence[PartlyFilled]:
        """Tensors of another shape than saved, of which only the overlap is filled."""
        ...

    @property
    def fills_any(self) -> bool:
        """Whether it sets a tensor, value or object of this rank's state."""
        ...

    def finish(self) -> None:
        """Restore everything else once every tensor is placed: plain values, hyperparameters, `load_state_dict`."""
        ...


@dataclass(frozen=True, slots=True)
class Catalog:
    """The content of a checkpoint, as a restoration sees it."""

    tensors: Mapping[str, TensorSpec]
    """Stored tensors by FQN."""

    aliases: Mapping[str, str]
    """Tied names: alias to stored FQN."""

    tree: Group
    """The non-tensor state."""

    run_id: str
    """Run to which the checkpoint belongs."""

    step: int | None
    """Its step."""

    world_size: int
    """Number of ranks that saved it."""

    per_rank: Callable[[int], Mapping[str, Value]]
    """Returns the own values of one of those ranks, by path."""

    same_content: Callable[[str, str], bool]
    """Whether two stored FQNs hold the same bytes; decided by digests, or without digests by reading."""

    fill: Callable[[Sequence[Wanted]], None]
    """Fills targets on this rank alone, before the ranks have agreed: only memory that is not of the state."""

    optimizers: Mapping[str, OptimizerRecord] = field(default_factory=dict)
    """Class and state keys of each optimizer, by path; empty if the checkpoint does not state them."""

    masters: Mapping[str, str] = field(default_factory=dict)
    """Stored FQN to the FQN of its master copy of higher precision, if another system stored both. A target of the
    master's dtype is filled from the master. A state needs no target for the master itself."""

    drops_ties: bool = False
    """Whether its writer may have stored a tied tensor under one of its names only, as Hugging Face does. Then
    another name of filled memory is not missing."""

    require_stored: Callable[[str], None] = lambda _: None
    """Raises for a stored FQN whose packs are missing or truncated; called before memory of its shape is allocated."""

    def stored_fqn(self, fqn: str) -> str:
        """Return the FQN under which a tensor is stored: that of its tied name, else its own."""
        return self.aliases.get(fqn, fqn)


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects FQNs by glob patterns as in `fnmatch`, and gradients or not."""

    only: tuple[str, ...] | None = None
    """If given, only names that match one of these patterns are selected."""

    skip: tuple[str, ...] = ()
    """Names that match one of these patterns are excluded."""

    grads: bool = False
    """Whether gradients are selected; each has the FQN of its parameter plus `.grad`."""

    partial: tuple[str, ...] = ()
    """Tensors that match one of these patterns may have another shape than saved: a load fills the overlap."""

    hyperparameters: bool = True
    """Whether a load sets the hyperparameters of optimizers."""

    cast: bool = False
    """Whether a load may fill a tensor from another dtype."""


@dataclass(frozen=True, slots=True)
class UnmatchedPattern:
    """A pattern of a selection that matches no name: most likely misspelt."""

    argument: Literal["only", "skip", "partial", "compression_skip"]
    """The argument or setting that holds it."""

    pattern: str
    """The pattern."""

    @property
    def is_error(self) -> bool:
        """Whether the call is refused. A glob in `skip` is not: names that it leaves out may come and go. Nor is a
        setting: it is for all saves of a job, whatever their states are.
        """
        if self.argument == "compression_skip":
            return False
        return self.argument != "skip" or not any(wildcard in self.pattern for wildcard in "*?[")

    def __str__(self) -> str:
        return f"{self.argument}={self.pattern!r}"


class Framework(Protocol):
    """A tensor framework."""

    def collect(self, state: Mapping[str, object], selection: Selection) -> Collected:
        """Take a state apart without changing it.

        Raises:
            InvalidError: The state is not one that can be taken apart: two names collide, a container contains itself.
                Single tensors that cannot be saved are in `Collected.refused`.
        """
        ...

    def restoration(self, state: Mapping[str, object], catalog: Catalog, selection: Selection) -> Restoration:
        """Return what a state wants of a checkpoint, without changing the state.

        Raises:
            InvalidError: The state cannot be filled as it is (meta tensors, conflicting hyperparameters).
        """
        ...

    def watched(self, state: Mapping[str, object]) -> Mapping[str, tuple[object, object]]:
        """Return by path each object of a state that holds tensors, and stamps of these as `Source.stamp` makes them.

        It calls no `state_dict`: that of a data loader may start its workers. Objects of other kinds are left out.

        Raises:
            Exception: Some tensor has no stamp.
        """
        ...

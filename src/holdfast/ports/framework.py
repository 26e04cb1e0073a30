"""What the machine asks of a tensor framework: shards to save, targets to load into, bytes of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from holdfast.geometry.box import Box
from holdfast.geometry.region import Region
from holdfast.geometry.tensor import Shard, TensorSpec
from holdfast.geometry.value_class import value_class
from holdfast.types.values import Group, Value


class Ticket(Protocol):
    """A copy on its way."""

    def wait(self) -> None:
        """Return once the copy is complete; any thread may ask, any number of times. Where it raises, it may go on."""
        ...


Unpin = Callable[[], None]
"""Undoes a pin, before the memory is freed."""

Pin = Callable[[memoryview], Unpin]
"""Page-locks host memory, so that a device copies into it while the host does something else.

Raises:
    UnavailableError: It cannot be; the memory is as good as before, only slower to copy into.
"""


class Source(Protocol):
    """The bytes of what one rank holds of one tensor, read piece by piece."""

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        """Copy a run of a piece's row-major bytes to the front of `buffer`.

        Args:
            piece: A region inside one of the shard's pieces and of its kind.
            start, stop: Half-open byte range within the piece's own row-major bytes.
            buffer: Writable memory of at least `stop - start` bytes. It must not be used, nor the source let go, until
                the ticket says so; where this raises, nothing is under way.
        """
        ...

    @classmethod
    def copy_together(cls, sources: Sequence[Self], pieces: Sequence[Region], buffer: memoryview) -> Ticket:
        """Copy pieces of several sources of one state, each whole, one after the other: far less work for tiny ones.

        Args:
            sources: Where each piece comes from.
            pieces: As for `copy_into`; none empty.
            buffer: Writable memory of as many bytes as all pieces have.
        """
        ...

    def sample(self, blocks: int, block_bytes: int) -> bytes:
        """Return at most `blocks` blocks of `block_bytes` spread evenly over the held bytes; all of them if fewer."""
        ...

    def stamp(self) -> object:
        """Return what compares equal until the memory is moved, or written to in a way that is counted."""
        ...

    def copied(self) -> Source:
        """Return a source of the bytes as they are now, in memory of its own."""
        ...


class Target(Protocol):
    """A writable view of what one rank wants of one tensor."""

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` out of the row-major bytes of `source_box` into this target.

        Args:
            part: Global coordinates; inside the wanted box and inside `source_box`.
            source: The row-major bytes of `source_box`, in the dtype that was saved.
            source_box: Global coordinates of what `source` holds.
        """
        ...

    @classmethod
    def place_together(
        cls, targets: Sequence[Self], boxes: Sequence[Box], source: memoryview, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Copy boxes to several targets of one state, one to each: where it can be less work for tiny ones.

        Args:
            targets: Where each box goes.
            boxes: As the part for `place`.
            source: Where the row-major bytes of every box lie, in the dtype that was saved.
            ranges: Half-open byte range of each box in `source`.
        """
        for target, box, (start, stop) in zip(targets, boxes, ranges, strict=True):
            target.place(box, source[start:stop], box)

    def memory(self, part: Box) -> memoryview | None:
        """Return the memory in which the row-major bytes of `part`, as they are stored, would lie as one run.

        None where there is no such run in host memory: a slice of columns, a device, another dtype. What is read
        straight into it spares the copy out of a buffer, which costs as much as the read.

        Args:
            part: Global coordinates; inside the wanted box.
        """
        ...


@value_class
class LocalShard:
    """A shard together with the means to read its bytes."""

    shard: Shard
    """What this rank holds."""

    source: Source
    """Its bytes."""

    fenced: bool = False
    """Whether it changes only behind the fence of what it was collected with."""


Fence = Callable[[Callable[[], None]], None]
"""Has a call run, on the thread that trains, before anything fenced changes (an optimizer steps, a state is loaded),
until it has run to its end once. Source: the copies fenced by the optimizer step of DataStates-LLM."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A state taken apart."""

    shards: Sequence[LocalShard]
    """One per tensor this rank holds something of, FQNs distinct."""

    tree: Group
    """Everything that is not a tensor, with the shape of its containers."""

    aliases: Mapping[str, str]
    """Tied names: the alias, and the FQN the tensor is stored under."""

    skipped: Sequence[str]
    """FQNs and paths that `only` and `skip` left out."""

    per_rank: Mapping[str, Value] = field(default_factory=dict)
    """This rank's own values by path; the tree holds a `PerRankRef` in their place."""

    fence: Fence | None = None
    """What tells before the fenced shards change; None where nothing does, so that all must be copied at the call."""

    unfenced_because: str = ""
    """Why there is no fence."""

    pin: Pin | None = None
    """Page-locks memory that the shards are copied into; None where all of them lie in host memory."""


@value_class
class Wanted:
    """One tensor to be filled."""

    stored_fqn: str
    """Name in the checkpoint."""

    dtype: str
    """Element type of the target."""

    global_shape: tuple[int, ...]
    """Shape of the whole target tensor."""

    boxes: tuple[Box, ...]
    """What this rank wants of it, global coordinates."""

    target: Target
    """Where it goes."""

    fqn: str
    """Name in the state that is being loaded."""


class Restoration(Protocol):
    """A load under way: what it wants, and how it ends."""

    @property
    def wanted(self) -> Sequence[Wanted]:
        """Tensors to read."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of each tensor of this rank's state that takes part, by one of its names: measured on the memory.

        A tensor with several names counts once; one that the checkpoint lacks counts too.
        """
        ...

    @property
    def missing(self) -> Sequence[str]:
        """Names the state has and the checkpoint lacks."""
        ...

    @property
    def unexpected(self) -> Sequence[str]:
        """Names the checkpoint has under the keys passed, and the state lacks."""
        ...

    @property
    def skipped(self) -> Sequence[str]:
        """Names that `only` and `skip` left alone."""
        ...

    def finish(self) -> None:
        """Put values back once every tensor is placed: plain values, hyperparameters, `load_state_dict`."""
        ...


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a checkpoint offers."""

    tensors: Mapping[str, TensorSpec]
    """Stored tensors by FQN."""

    aliases: Mapping[str, str]
    """Tied names: alias to stored FQN."""

    tree: Group
    """The non-tensor state."""

    run_id: str
    """Run the checkpoint belongs to."""

    step: int | None
    """Its step."""

    world_size: int
    """Ranks that saved it."""

    per_rank: Callable[[int], Mapping[str, Value]]
    """Reads what one of those ranks kept as its own, by path."""

    same_content: Callable[[str, str], bool]
    """Whether two stored FQNs are known to hold the same bytes: by digests, or where there are none by reading."""

    masters: Mapping[str, str] = field(default_factory=dict)
    """Stored FQN to that of its master copy, of higher precision, where another system kept both: a target of the
    master's dtype is filled from the master. Nobody need have a place for a master itself."""

    drops_ties: bool = False
    """Whether what wrote it may have kept a tied tensor under only one of its names, as Hugging Face does: another name
    of memory that is filled is not missing then."""

    require_stored: Callable[[str], None] = lambda _: None
    """Refuses a stored FQN whose packs are not there in full; asked before memory of its shape is allocated."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which FQNs take part, by glob patterns as in `fnmatch`, and whether gradients do."""

    only: tuple[str, ...] | None = None
    """If given, a name takes part only when one of these matches it."""

    skip: tuple[str, ...] = ()
    """A name matching one of these is left out."""

    grads: bool = False
    """Whether gradients take part, each under the FQN of its parameter with `.grad` after it."""


class Framework(Protocol):
    """A tensor framework."""

    def collect(self, state: Mapping[str, object], selection: Selection) -> Collected:
        """Take a state apart, touching nothing.

        Raises:
            InvalidError: Something in it cannot be saved; the message names its path, type and what to do.
        """
        ...

    def restoration(self, state: Mapping[str, object], catalog: Catalog, selection: Selection) -> Restoration:
        """Work out what a state wants of a checkpoint, touching no value of it.

        Raises:
            InvalidError: The state cannot be filled as it is (meta tensors, conflicting hyperparameters).
        """
        ...

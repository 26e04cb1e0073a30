"""The frame: the stored tensors of one call of a unit.

States of a frame: *forward* (packs and counts saved tensors), *waiting* (holds stored tensors strongly), *replayed*
(holds stored tensors weakly: memory goes as the graph goes). The call ends the first state, the first replay the
second. Later replays, of a retained graph, find the tensors that the graph still holds, and run the rest again.
Tensors that cannot be run again are held strongly for the life of the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from holdfast.activations.runtime.column_program import Act, ColumnProgram
from holdfast.activations.runtime.dense import PackedTensor, TensorGeometry
from holdfast.activations.runtime.signature import scalars_of
from holdfast.activations.runtime.traced import SavedSource
from holdfast.backends.torch.private_layout import WeakStorage, registered, storage_identity, version_counter
from holdfast.errors import InvalidError

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Pack and unpack of saved tensors."""


class KeptTensor:
    """A tensor that is kept by reference, with the version that autograd saved."""

    __slots__ = ("__weakref__", "_first", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, first: KeptTensor | None = None) -> None:
        # The tensor itself would hold a history that holds the frame: a cycle that Python cannot see.
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._version = version_counter(tensor)
        # The frame refers weakly to the first tensor of a storage: the others keep that one alive.
        self._first = first

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: The tensor has changed since; the error that autograd raises.
        """
        if version_counter(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}] is at version {version_counter(self._tensor)}; "
                f"expected version {self._version} instead."
            )
        return self._tensor

    def storage(self) -> torch.UntypedStorage:
        """Return the tensor's storage."""
        return self.unpack().untyped_storage()

    def shows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the same storage, with the same content."""
        same_storage = storage_identity(tensor) == storage_identity(self._tensor)
        return same_storage and version_counter(tensor) == self._version


class PackedStorage:
    """A packed storage. The original memory was released."""

    __slots__ = ("__weakref__", "_packed", "_unpacked", "_unused", "_version", "_weak", "views")

    def __init__(self, packed: PackedTensor, tensor: torch.Tensor) -> None:
        self._packed, self._version = packed, version_counter(tensor)
        self._weak = WeakStorage(tensor)
        self._unpacked: torch.Tensor | None = None
        self.views, self._unused = 0, 0

    def storage(self) -> torch.UntypedStorage:
        """Return a storage with the unpacked content."""
        if self._unpacked is None:
            with torch.no_grad():
                self._unpacked, self._unused = self._packed.unpack(), self.views
        return self._unpacked.untyped_storage()

    def use(self) -> torch.UntypedStorage:
        """Return the unpacked storage for one of the views. The last view drops the unpacked storage here."""
        storage = self.storage()
        self._unused -= 1
        if self._unused <= 0:
            self._unpacked = None
        return storage

    def shows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the storage that was packed, with the same content."""
        is_same = not self._weak.is_expired() and storage_identity(tensor) == self._weak.identity
        return is_same and version_counter(tensor) == self._version


class PackedView:
    """A saved tensor whose storage is packed."""

    __slots__ = ("_geometry", "_packed")

    def __init__(self, packed: PackedStorage, geometry: TensorGeometry) -> None:
        self._packed, self._geometry = packed, geometry
        packed.views += 1

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        return self._geometry.view_of(self._packed.use())


class PassedTensor:
    """A saved tensor that torch's checkpoint manages."""

    __slots__ = ("__weakref__", "_holder", "_unpack")

    def __init__(self, hooks: Hooks, tensor: torch.Tensor) -> None:
        self._unpack = hooks[1]
        self._holder = hooks[0](tensor)

    def unpack(self) -> torch.Tensor:
        """Return the tensor, by a replay if none has run yet."""
        return self._unpack(self._holder)


SavedToken = KeptTensor | PackedView | PassedTensor


class CallFrame:
    """The stored tensors of one call."""

    def __init__(self, program: ColumnProgram, name: str, unit: nn.Module) -> None:
        self.program, self.name = program, name
        self.passed: list[weakref.ref[PassedTensor] | None] = []
        """Each saved tensor that torch's checkpoint manages; None for the others."""
        self.overflows = 0
        """How many groups did not fit a pack."""
        self._missing: set[int] = set()
        self._stored: dict[tuple[int, int], Callable[[], KeptTensor | PackedStorage | None]] = {}
        """By group and slot: returns a stored tensor, held strongly or weakly."""
        self._registered = [held for module in unit.modules() for held in registered(module) if held]
        self._versions: list[tuple[int, int]] = []
        self._unit, self._scalars = unit, scalars_of(unit)

    def pack(self, tensor: torch.Tensor, hooks: Hooks | None) -> SavedToken:
        """Store a tensor that autograd saves, as the program says.

        Args:
            tensor: The tensor.
            hooks: Those of torch's checkpoint; None outside one.
        """
        token = self._token(tensor, self.source(len(self.passed), tensor), hooks)
        self.passed.append(weakref.ref(token) if isinstance(token, PassedTensor) else None)
        return token

    def end_forward(self) -> None:
        """Check the number of saved tensors, and note the versions of parameters and buffers."""
        expected = len(self.program.trace.saved)
        if len(self.passed) != expected:
            raise self.difference(f"autograd saved {len(self.passed)} tensors", f"{expected} tensors")
        self._versions = self.registered_versions()

    def registered_versions(self) -> list[tuple[int, int]]:
        """Return identity of the storage, and version, of each parameter and buffer of the unit."""
        tensors = (each for held in self._registered for each in held.values() if each is not None)
        return [(storage_identity(each), version_counter(each)) for each in tensors]

    def begin_replay(self) -> tuple[tuple[Act, ...], frozenset[int], set[int]]:
        """Return the acts of a replay.

        Returns:
            The acts, the stored groups that cannot be given, and the storages of parameters that have changed since.
        """
        scalars = zip(self._scalars, scalars_of(self._unit), strict=False)
        changed = [after for before, after in scalars if before != after]
        if changed:
            raise self.difference(f"an attribute has changed since forward to {changed[0]}", "equal attributes")
        released = (group for (group, _), stored in self._stored.items() if stored() is None)
        missing = frozenset(self._missing.union(released))
        # Later replays of one graph run only for tensors that the graph still holds.
        saved = self.program.trace.saved
        alive = (source.group for source, token in zip(saved, self.passed, strict=True) if token and token())
        acts = self.program.acts(frozenset(filter(None, alive)), missing)
        now = zip(self.registered_versions(), self._versions, strict=True)
        return acts, missing, {storage for (storage, after), (_, before) in now if before != after}

    def stored(self, group: int, slot: int) -> torch.UntypedStorage | None:
        """Return a stored storage for a replay; None without one."""
        found = self._found(group, slot)
        return None if found is None else found.storage()

    def end_replay(self) -> None:
        """Hold stored tensors weakly from now on."""
        for key, stored in self._stored.items():
            found = stored()
            if key[0] not in self.program.irreplaceable and found is not None:
                self._stored[key] = weakref.ref(found)

    def source(self, index: int, tensor: torch.Tensor) -> SavedSource:
        """Return the source of the saved tensor of a number.

        Raises:
            InvalidError: The call differs from the trace.
        """
        saved = self.program.trace.saved
        if index >= len(saved):
            raise self.difference(f"autograd saved more than {len(saved)} tensors", f"{len(saved)} tensors")
        if not saved[index].fits(tensor):
            found = f"saved tensor {index} is {tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"
            geometry = saved[index].geometry
            raise self.difference(found, f"{geometry.dtype} {list(geometry.size)}, strides {list(geometry.stride)}")
        return saved[index]

    def difference(self, found: str, expected: str) -> InvalidError:
        """Return the error of a call that differs from the trace."""
        return InvalidError(
            f"unit {self.name}: {found}; expected {expected}, as in the trace. A call of the same signature ran other "
            "ops: leave the unit out of units=, or make the flag that the code reads an argument"
        )

    def _token(self, tensor: torch.Tensor, source: SavedSource, hooks: Hooks | None) -> SavedToken:
        treatment, group = self.program.treatments[len(self.passed)], source.group
        if not group or treatment == "pass":
            return KeptTensor(tensor) if treatment == "keep" or hooks is None else PassedTensor(hooks, tensor)
        first = self._found(group, source.slot)
        if first is not None and self.program.trace.ops[group].is_storable and not first.shows(tensor):
            raise self.difference(f"saved tensor {len(self.passed)} has a storage of its own", f"op {group}'s")
        if treatment == "keep":
            token = KeptTensor(tensor, first if isinstance(first, KeptTensor) else None)
            self._stored.setdefault((group, source.slot), lambda: token)
            return token
        if first is None and group not in self._missing:
            first = self._pack(tensor, group)
            self._stored[group, source.slot] = lambda: first
        if isinstance(first, PackedStorage):
            return PackedView(first, source.geometry)
        # Without torch's checkpoint no replay can run: a pack that does not fit is kept.
        return KeptTensor(tensor) if hooks is None else PassedTensor(hooks, tensor)

    def _pack(self, tensor: torch.Tensor, group: int) -> PackedStorage | None:
        whole = self.program.packed[group][1].whole(tensor.untyped_storage())
        packed = None
        if whole is not None and self.program.pack is not None:
            with torch.no_grad():
                packed = self.program.pack(whole, group)
        if packed is None:
            self._missing.add(group)
            self.overflows += 1
        return None if packed is None else PackedStorage(packed, tensor)

    def _found(self, group: int, slot: int) -> KeptTensor | PackedStorage | None:
        return stored() if (stored := self._stored.get((group, slot))) else None


def call_storing(frame: CallFrame, forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Return the output of a call whose backward never runs an op again. A frame stores the saved tensors.

    Args:
        frame: Holds the call's stored tensors.
        forward: Takes the tensors of the arguments.
        tensors: The tensors of the arguments.
    """
    pack = partial(frame.pack, hooks=None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.unpack()):
        output = forward(*tensors)
    frame.end_forward()
    return output

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

from holdfast.activations.runtime.column_program import Act, ColumnProgram, Treatment
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
        self._missing: set[int] = set()
        self._strong: dict[tuple[int, int], KeptTensor | PackedStorage] = {}
        self._weak: dict[tuple[int, int], weakref.ref[KeptTensor | PackedStorage]] | None = None
        self._registered = [held for module in unit.modules() for held in registered(module) if held]
        self._versions: list[int] = []
        self._unit, self._scalars = unit, scalars_of(unit)

    @property
    def overflows(self) -> int:
        """Return how many groups did not fit a pack."""
        return len(self._missing)

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
        self._versions = self._present_versions()

    def registered_storages(self) -> set[int]:
        """Return the identities of the storages of the unit's parameters and buffers."""
        return set(self._present_storages())

    def begin_replay(self) -> tuple[tuple[Act, ...], frozenset[int], set[int]]:
        """Return the acts of a replay.

        Returns:
            The acts, the stored groups that cannot be given, and the storages of parameters that have changed since.
        """
        scalars = zip(self._scalars, scalars_of(self._unit), strict=False)
        changed = [after for before, after in scalars if before != after]
        if changed:
            raise self.difference(f"an attribute has changed since forward to {changed[0]}", "equal attributes")
        missing = set(self._missing)
        for (group, _), weak in (self._weak or {}).items():
            if weak() is None:
                missing.add(group)
        # Later replays of one graph run only for tensors that the graph still holds.
        saved = self.program.trace.saved
        alive = (source.group for source, token in zip(saved, self.passed, strict=True) if token and token())
        acts = self.program.acts(frozenset(filter(None, alive)), frozenset(missing))
        now = zip(self._present_storages(), self._versions, self._present_versions(), strict=True)
        return acts, frozenset(missing), {storage for storage, before, after in now if before != after}

    def stored(self, group: int, slot: int) -> torch.UntypedStorage | None:
        """Return a stored storage for a replay; None without one."""
        found = self._strong.get((group, slot))
        if self._weak is not None and (weak := self._weak.get((group, slot))) is not None:
            found = weak()
        return None if found is None else found.storage()

    def end_replay(self) -> None:
        """Hold stored tensors weakly from now on."""
        if self._weak is None:
            held = self.program.irreplaceable
            self._weak = {key: weakref.ref(each) for key, each in self._strong.items() if key[0] not in held}
            self._strong = {key: each for key, each in self._strong.items() if key[0] in held}

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
        treatment = self.program.treatments[len(self.passed)]
        if treatment is Treatment.KEEP:
            return self._keep(tensor, source)
        if treatment is Treatment.PACK and source.group not in self._missing:
            packed = self._pack(tensor, source)
            if packed is not None:
                return PackedView(packed, source.geometry)
        # Without torch's checkpoint no replay can run: a pack that does not fit is kept.
        return KeptTensor(tensor) if hooks is None else PassedTensor(hooks, tensor)

    def _keep(self, tensor: torch.Tensor, source: SavedSource) -> KeptTensor:
        if not source.group:
            return KeptTensor(tensor)
        first = self._strong.get((source.group, source.slot))
        self._check_same(first, tensor, source)
        kept = KeptTensor(tensor, first if isinstance(first, KeptTensor) else None)
        if first is None:
            self._strong[source.group, source.slot] = kept
        return kept

    def _pack(self, tensor: torch.Tensor, source: SavedSource) -> PackedStorage | None:
        group = source.group or 0
        found = self._strong.get((group, source.slot))
        self._check_same(found, tensor, source)
        if isinstance(found, PackedStorage):
            return found
        packed = None
        whole = self.program.packed[group][1].whole(tensor.untyped_storage())
        if whole is not None:
            assert self.program.pack is not None, "a program with packed groups has packs"
            with torch.no_grad():
                packed = self.program.pack(whole, group)
        if packed is None:
            self._missing.add(group)
            return None
        self._strong[group, source.slot] = stored = PackedStorage(packed, tensor)
        return stored

    def _check_same(self, first: KeptTensor | PackedStorage | None, tensor: torch.Tensor, source: SavedSource) -> None:
        is_storable = self.program.trace.ops[source.group or 0].is_storable
        if first is not None and is_storable and not first.shows(tensor):
            raise self.difference(f"saved tensor {len(self.passed)} has a storage of its own", f"op {source.group}'s")

    def _present_storages(self) -> list[int]:
        return [storage_identity(each) for held in self._registered for each in held.values() if each is not None]

    def _present_versions(self) -> list[int]:
        return [version_counter(each) for held in self._registered for each in held.values() if each is not None]


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

"""Records the steps of the optimizers of a state: the gradients that they consume, and all that a redo needs beside."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.containers import small_tensor, take_apart
from holdfast.backends.torch.local_shards import LocalPart, Ranks, local_of
from holdfast.backends.torch.private_layout import unreduced_parameters, version_counter
from holdfast.backends.torch.redo.after_images import OtherTensors, SteppedTensors
from holdfast.backends.torch.redo.gap import GapError
from holdfast.backends.torch.redo.recorded_bytes import RecordedBytes, ToRecord
from holdfast.backends.torch.redo.step_hooks import is_at_end, put_hook
from holdfast.backends.torch.redo.stepped import HeldTensor, Stepped, SteppedState
from holdfast.backends.torch.redo.sums import sum_of
from holdfast.backends.torch.redo.values import StateValues
from holdfast.backends.torch.state.gradients import declared_for_gradient
from holdfast.backends.torch.tensors import TorchSource, held_storable
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import LocalShard, Selection
from holdfast.base.ports.gradients import Captured, RecordMemory
from holdfast.base.types.redo import AfterImage, OptimizerCall, Record, call_tensor, image_tensor
from holdfast.base.types.values import Value
from holdfast.errors import InvalidError

logger = logging.getLogger(__name__)

_CAPTURES: weakref.WeakValueDictionary[int, TorchGradientCapture] = weakref.WeakValueDictionary()
"""The capture of each optimizer, by the identity of the optimizer, which the capture keeps alive."""


class TorchGradientCapture:
    """Hooks the optimizers of a state."""

    def __init__(
        self,
        state: Mapping[str, object],
        selection: Selection,
        vouched: Sequence[type],
        memory: RecordMemory,
        ranks: Ranks,
    ) -> None:
        """Take a state apart and hook its optimizers.

        Raises:
            InvalidError: A step of this state cannot be recorded.
        """
        self._state = SteppedState(state, selection, ranks, vouched)
        _require_uncaptured(self._state.optimizers)
        self._values = StateValues(state, selection, self._state)
        self._values.collected()  # Refuses values that a record cannot hold.
        self._memory, self._ranks = memory, ranks
        self.interrupted = "begin() was not called"
        self.parameters = [*self._state.parameters.values(), *self._state.others.values()]
        self._by_fqn = {local.shard.tensor.fqn: local for local in self.parameters}
        self._regions: Mapping[str, Sequence[Region]] = {}
        self._sharded = [
            node for node in self._state.modules if any(isinstance(each, DTensor) for each in node.tensors.values())
        ]
        self._software = self._state.software()
        self._others = OtherTensors({})
        self._turn = 0
        self._bytes = RecordedBytes(memory)
        self._calls: list[OptimizerCall] = []
        self._images: list[AfterImage] = []
        self._hooked = [_Hooked(stepped, self) for stepped in self._state.optimizers]

    def begin(
        self, step: int, regions: Mapping[str, Sequence[Region]], state: Mapping[str, object] | None = None
    ) -> None:
        """Begin at a boundary: the next record holds everything after this moment."""
        self._bytes.release()
        self.interrupted, self._regions, self._turn = "", regions, step
        self._calls, self._images = [], []
        try:
            self._software = self._state.software()
            self._others = OtherTensors(self._other_shards(self._values.collected(state).shards))
            for hooked in self._hooked:
                hooked.begin()
        except Exception as error:  # noqa: BLE001 - nothing may raise into training
            self.interrupt(error)

    def boundary(self, step: int, state: Mapping[str, object] | None = None) -> Captured | None:
        """End a record at a boundary and begin the next; return None if the records have a gap."""
        if self.interrupted:
            return None
        try:
            return self._end(step, state)
        except BaseException as error:
            self.interrupt(error)
            if not isinstance(error, Exception):
                raise
            return None

    def close(self) -> None:
        """Remove the hooks, and give the memory of an unfinished record back."""
        for hooked in self._hooked:
            hooked.close()
        self._bytes.release()
        self.interrupted = "closed"

    def interrupt(self, error: BaseException) -> None:
        """End the records here: what follows is a gap. Training goes on."""
        reason = str(error) if isinstance(error, GapError) else f"{type(error).__name__}: {error}"
        if not self.interrupted:
            logger.warning("redo log interrupted: %s", reason)
            self.interrupted = reason
        self._bytes.release()

    def add_images(self, changed: Iterable[HeldTensor]) -> None:
        """Record stepped tensors that changed outside of a step, before the next call."""
        self._copy_images([local for named in changed for local in self._state.shards_of(named)])

    def add_call(self, stepped: Stepped) -> None:
        """Record a step that is about to begin."""
        number, names, wanted = len(self._calls), [], []
        for fqn, parameter in stepped.parameters.items():
            grad = parameter.grad
            if grad is None:
                continue
            names.append(fqn)
            source = self._source_of(fqn, parameter, grad, stepped)
            if regions := self._regions.get(fqn, ()):
                tensor = self._by_fqn[fqn].shard.tensor
                spec = TensorSpec(call_tensor(number, fqn), tensor.dtype, tensor.global_shape)
                wanted += [ToRecord(spec, region, source) for region in regions]
        self._bytes.copy(wanted)
        self._calls.append(OptimizerCall(stepped.path, stepped.groups(), tuple(names), _scaling_of(stepped)))

    def _source_of(self, fqn: str, parameter: torch.Tensor, grad: torch.Tensor, stepped: Stepped) -> TorchSource:
        """Return the bytes of a gradient.

        Raises:
            GapError: It is not what a redo could give to the parameter again.
        """
        if _form(grad) != _form(parameter):
            raise GapError(f"{fqn}: its gradient is sparse, or has another dtype, shape or placement than itself")
        known = self._by_fqn.get(fqn)
        pieces = () if known is None else known.shard.pieces
        local = local_of(grad)
        if len(pieces) == 1 and pieces[0].numel == local.numel():
            # The fast path: nearly all parameters are one box or one flat range.
            return TorchSource((LocalPart(pieces[0], local),), (grad,))
        declared = stepped.view.declared.get(id(parameter))
        held, memory = held_storable(fqn, grad, declared_for_gradient(fqn, declared, parameter, grad), self._ranks, "")
        return TorchSource(held.parts, memory)

    def _copy_images(self, changed: Sequence[LocalShard]) -> None:
        wanted = []
        for local in changed:
            tensor = local.shard.tensor
            spec = TensorSpec(image_tensor(len(self._images), tensor.fqn), tensor.dtype, tensor.global_shape)
            assert isinstance(local.source, TorchSource)
            wanted += [ToRecord(spec, region, local.source) for region in self._regions_of(local)]
            self._images.append(AfterImage(tensor.fqn, len(self._calls)))
        self._bytes.copy(wanted)

    def _regions_of(self, local: LocalShard) -> Sequence[Region]:
        """Return the regions of a tensor that this rank records.

        Optimizer state goes with its parameter: in the same regions if it has the parameter's shape, else whole on the
        rank that records the first element of the parameter.
        """
        fqn = local.shard.tensor.fqn
        if fqn in self._by_fqn:
            return self._regions.get(fqn, ())
        name, owners = fqn, ChainMap(*(hooked.stepped.owners for hooked in self._hooked))
        while name not in owners:
            name = name.rpartition(".")[0]  # An inner tensor of a tensor subclass.
        owner = owners[name]
        regions, shape = self._regions.get(owner, ()), self._by_fqn[owner].shard.tensor.global_shape
        if local.shard.tensor.global_shape == shape:
            return regions
        is_first = any(not any((each.start,) if isinstance(each, FlatRange) else each.start) for each in regions)
        return local.shard.pieces if is_first else ()

    def _other_shards(self, fresh: Sequence[LocalShard]) -> dict[str, LocalShard]:
        """Return the shards of all tensors that no optimizer steps: those that are known, and those made just now."""
        others = self._state.others
        for fqn, local in others.items():
            assert isinstance(local.source, TorchSource)
            if (moved := local.source.moved_parameter()) is not None:
                (others[fqn],) = self._state.shards_of((fqn, moved, None))
        made = {each.shard.tensor.fqn: each for each in fresh}
        return others | {fqn: each for fqn, each in made.items() if fqn not in self._state.parameters}

    def _end(self, step: int, state: Mapping[str, object] | None) -> Captured:
        for hooked in self._hooked:
            hooked.require_in_place()
            self.add_images(hooked.tensors.changed())
        if self._state.software() != self._software:
            raise GapError("the flags of an optimizer changed: no process redoes steps by both kernels")
        collected = self._values.collected(state)
        self._copy_images(self._others.changed(self._other_shards(collected.shards)))
        self._turn += 1
        record = Record(
            step,
            tuple(self._calls),
            tuple(self._images),
            collected.tree,
            collected.per_rank,
            {fqn: total for hooked in self._hooked for fqn, total in self._sums(hooked.tensors)},
            self._software,
            self._not_resumable(),
            tuple([fqn for hooked in self._hooked for fqn in hooked.held()]),
        )
        captured = Captured(record, self._bytes.tensors, self._bytes.size, self._bytes.release)
        self._bytes, self._calls, self._images = RecordedBytes(self._memory), [], []
        for hooked in self._hooked:
            hooked.tensors.begin()
        return captured

    def _sums(self, tensors: SteppedTensors) -> Iterable[tuple[str, int]]:
        for fqn in tensors.due(self._turn):
            for local in self._state.shards_of(tensors.named[fqn]):
                assert isinstance(local.source, TorchSource)
                yield local.shard.tensor.fqn, sum_of(local.source.parts, local.shard.tensor.global_shape)

    def _not_resumable(self) -> str:
        """Return why training cannot go on from the records up to here: gradients that no step has consumed."""
        for node in self._sharded:
            if any(True for _ in unreduced_parameters(node.module)):
                return f"{node.path}: FSDP2 has gradients that it has not reduced yet"
        pending = [each for hooked in self._hooked for each in hooked.pending()]
        if not any(bool(local_of(grad).any()) for _, grad in pending):
            return ""
        what = "no step" if self._calls else "no step since the last boundary, which a scaler may have skipped,"
        return f"{what} has consumed the gradients of {len(pending)} parameters, such as {pending[0][0]}"


class _Hooked:
    """One optimizer with its hooks."""

    def __init__(self, stepped: Stepped, capture: TorchGradientCapture) -> None:
        # Weak: hooks on an optimizer must not keep the records of a manager that was dropped.
        self.stepped, self._capture = stepped, weakref.ref(capture)
        _CAPTURES[id(stepped.optimizer)] = capture
        self.tensors = SteppedTensors(stepped)
        self._consumed: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Gradients as the last step left them, with their version counters."""
        self._depth = 0
        """Steps under way: torch calls the hooks of a step again where a class calls the step of its base class."""
        # torch.compile must trace only the hook that asks whether it does.
        disable: Any = torch.compiler.disable
        self._refuse_compiled, self._record = disable(self._compiled), disable(self._pre)
        self._before = stepped.optimizer.register_step_pre_hook(self._before_step)
        self._after = stepped.optimizer.register_step_post_hook(disable(self._post))

    def begin(self) -> None:
        """Take hooks and tensors as they are at a boundary."""
        # Last before a step: other hooks may change gradients. First after it: other hooks may change weights.
        put_hook(self._before, last=True)
        put_hook(self._after, last=False)
        self._depth = 0
        self._require_members()
        self.tensors.see()
        self.tensors.begin()
        self._consume()

    def close(self) -> None:
        """Remove the hooks."""
        self._before.remove()
        self._after.remove()
        _CAPTURES.pop(id(self.stepped.optimizer), None)

    def require_in_place(self) -> None:
        """Refuse hooks that come between these and the step, and other groups or parameters.

        Raises:
            GapError: There are some.
        """
        if not is_at_end(self._before, last=True) or not is_at_end(self._after, last=False):
            raise GapError(
                f"{self.stepped.path}: a step hook was registered after those of the log, and may change gradients or "
                "parameters unseen. Register it before the first save"
            )
        if self._depth:
            raise GapError(f"{self.stepped.path}: a step did not end")
        self._require_members()

    def held(self) -> list[str]:
        """Return the names of the parameters that have a gradient."""
        return [fqn for fqn, parameter in self.stepped.parameters.items() if parameter.grad is not None]

    def pending(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and gradient of each parameter whose gradient changed after the last step."""
        found = []
        for fqn, parameter in self.stepped.parameters.items():
            grad = parameter.grad
            if grad is not None:
                known = self._consumed.get(fqn)
                if known is None or known[0]() is not grad or known[1] != version_counter(local_of(grad)):
                    found.append((fqn, grad))
        return found

    def _require_members(self) -> None:
        if self.stepped.present_members() != self.stepped.members:
            raise GapError(f"{self.stepped.path}: a group or parameter was added or removed")

    def _before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._refuse_compiled()
        else:
            self._record(args, kwargs)

    def _compiled(self) -> None:
        if capture := self._capture():
            capture.interrupt(GapError(f"{self.stepped.path}: its step was compiled. Step it without torch.compile"))

    def _pre(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture = self._capture()
        if capture is None or capture.interrupted:
            return
        try:
            if any(each is not None for each in (*args[1:], *kwargs.values())):
                raise GapError(
                    f"{self.stepped.path}: its step got arguments, such as a closure, which a redo cannot give"
                )
            if self._depth == 0:
                self.require_in_place()
                capture.add_images(self.tensors.changed())
                capture.add_call(self.stepped)
            # After a step that raised, all later ones seem to be inside of it: the boundary finds that.
            self._depth += 1
        except BaseException as error:
            capture.interrupt(error)
            if not isinstance(error, Exception):
                raise

    def _post(self, *_: object) -> None:
        capture = self._capture()
        if capture is None or capture.interrupted:
            return
        try:
            self._depth -= 1
            if self._depth == 0:
                self.tensors.see()
                self._consume()
        except BaseException as error:
            capture.interrupt(error)
            if not isinstance(error, Exception):
                raise

    def _consume(self) -> None:
        grads = ((fqn, parameter.grad) for fqn, parameter in self.stepped.parameters.items())
        self._consumed = {
            fqn: (weakref.ref(grad), version_counter(local_of(grad))) for fqn, grad in grads if grad is not None
        }


def _require_uncaptured(optimizers: Sequence[Stepped]) -> None:
    taken = [stepped for stepped in optimizers if id(stepped.optimizer) in _CAPTURES]
    if taken:
        gc.collect()  # A manager that was dropped without a close may wait for the collector.
    for stepped in taken:
        if id(stepped.optimizer) in _CAPTURES:
            raise InvalidError(
                f"{stepped.path}: {stepped.kind} is recorded by another manager; expected one manager with "
                "differential= for an optimizer. Close the other manager, or leave differential= out of one"
            )


def _scaling_of(stepped: Stepped) -> dict[str, Value]:
    """Return the attributes that a scaler sets on an optimizer whose fused step sees scaled gradients."""
    values = ((name, getattr(stepped.optimizer, name, None)) for name in ("grad_scale", "found_inf"))
    return {name: take_apart(each, f"{stepped.path}.{name}", small_tensor) for name, each in values if each is not None}


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    return tensor.layout, tensor.dtype, tensor.shape, placements

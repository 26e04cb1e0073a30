"""A call under torch's checkpoint, and the replay: stored tensors are given back, ops without readers are skipped.

torch's checkpoint brings the state of generators, autocast, early stop and nesting. The forward context is a filter:
hooks inside torch's own that store what the column stores and hand the rest to torch. The recomputation's context is
the same filter, with a dispatch mode that follows the trace op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from holdfast.activations.runtime.arguments import mapped, tensors_of
from holdfast.activations.runtime.column_program import Act
from holdfast.activations.runtime.dense import TensorGeometry
from holdfast.activations.runtime.frame import CallFrame, Hooks
from holdfast.activations.runtime.op_rules import UNNUMBERED, first_read, written_by
from holdfast.activations.runtime.traced import OpReturn, TracedOp
from holdfast.backends.torch.private_layout import (
    CAST,
    TorchDispatchMode,
    set_version_counter,
    storage_identity,
    top_saved_tensors_hooks,
    version_counter,
)


def call_with_replay(frame: CallFrame, forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Return the output of a call whose backward may need a replay.

    Args:
        frame: Holds the call's stored tensors.
        forward: Takes the tensors of the arguments.
        tensors: The tensors of the arguments. torch keeps these tensors and checks the versions.
    """
    return checkpoint(
        forward,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=frame.program.trace.is_random,
        context_fn=lambda: (_filtered(frame), _ReplayContext(frame)),
        # Geometries are compared with the trace, in forward and in the replay.
        determinism_check="none",
    )


@contextmanager
def _filtered(frame: CallFrame) -> Iterator[None]:
    """Store saved tensors in a frame, inside the hooks of torch's checkpoint."""
    outer = top_saved_tensors_hooks()
    assert outer is not None, "torch's checkpoint has pushed its hooks"
    with torch.autograd.graph.saved_tensors_hooks(partial(frame.pack, hooks=outer), lambda token: token.unpack()):
        yield
    frame.end_forward()


class _ReplayContext(AbstractContextManager[None]):
    """The context of each replay of a frame: torch enters one context several times."""

    def __init__(self, frame: CallFrame) -> None:
        self._frame = frame

    def __enter__(self) -> None:
        """Begin a replay."""
        self._replay = _replaying(self._frame)
        self._replay.__enter__()

    def __exit__(self, *error: Any) -> None:
        """End a replay: after the last op, by torch's early stop or by an error."""
        self._replay.__exit__(*error)


@contextmanager
def _replaying(frame: CallFrame) -> Iterator[None]:
    outer = top_saved_tensors_hooks()
    assert outer is not None, "torch's checkpoint has pushed its hooks"
    try:
        mode = _ReplayMode(frame, outer)
        try:
            # The unit's own code could run a backward of the replay's graph.
            with torch.autograd.graph.saved_tensors_hooks(mode.pack, lambda tensor: tensor), mode:
                yield
        finally:
            mode.restore_versions()
    finally:
        frame.end_replay()


class _ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the trace: gives stored tensors, skips ops without readers, runs the rest."""

    def __init__(self, frame: CallFrame, outer: Hooks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._frame, self._trace, self._outer = frame, frame.program.trace, outer
        self._acts, self._missing, self._changed = frame.begin_replay()
        self._number = 0
        self._scratch: dict[torch.device, torch.UntypedStorage] = {}
        self._unwritten: set[int] = set()
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._registered = {storage for storage, _ in frame.registered_versions()}
        self._index = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Hand to torch exactly the saved tensors that the forward handed to torch, from the replay's own graph."""
        index, self._index = self._index, self._index + 1
        self._frame.source(index, tensor)
        token = self._frame.passed[index]
        if token is None:
            # A result that its own op saves would hold itself through its history.
            return tensor.detach() if tensor.requires_grad else tensor
        if storage_identity(tensor) in self._unwritten and token() is not None:
            raise self._frame.difference(f"saved tensor {index} was not run", "a tensor that the replay runs")
        return self._outer[0](tensor)

    def restore_versions(self) -> None:
        """Give tensors that skipped ops would have changed the versions of before: autograd has counted the ops."""
        for tensor, version in reversed(self._versions):
            set_version_counter(tensor, version)
        # Their history holds the replay's graph, whose hooks hold this mode: no garbage collection sees the circle.
        self._versions.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Treat an op as the program says."""
        kwargs = kwargs or {}
        if func in UNNUMBERED:
            return func(*args, **kwargs)
        if func is CAST and storage_identity(args[0]) in self._registered:
            self._check_reads((args[0],), func)
            return func(*args, **kwargs)
        self._number += 1
        if self._number >= len(self._trace.ops) or self._trace.ops[self._number].op is not func:
            expected = self._trace.ops[self._number].overload if self._number < len(self._trace.ops) else "no op"
            raise self._frame.difference(f"op {self._number} is {func}", expected)
        act = self._acts[self._number]
        if act is Act.VIEW:
            return func(*args, **kwargs)
        tensors = tensors_of((args, kwargs))
        if act is Act.RUN:
            self._check_reads(tensors[first_read(func) :], func)
            return func(*args, **kwargs)
        if act is Act.DRAW:
            self._draw(func, args, kwargs)
        return self._given(self._trace.ops[self._number], tensors)

    def _check_reads(self, tensors: Sequence[torch.Tensor], func: Any) -> None:
        """Raise if an op would read unwritten memory, or a parameter or buffer that has changed since forward."""
        for tensor in tensors:
            storage = storage_identity(tensor)
            if storage in self._unwritten:
                raise self._frame.difference(f"op {self._number} ({func}) reads an op that was skipped", "other reads")
            if storage in self._changed:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a parameter or buffer {list(tensor.shape)} of unit {self._frame.name}, which {func} reads again"
                )

    def _draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run a random op for its draw alone. Zeros replace tensors that the op would change and skipped ones."""
        written = {id(each) for each in written_by(func, args, kwargs)}

        def replaced(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or (
                id(value) not in written and storage_identity(value) not in self._unwritten
            ):
                return value
            # Of the same strides, which decide how some kernels draw. A probability of 0 passes all checks.
            spare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return spare.zero_()

        func(*map(replaced, args), **{key: replaced(value) for key, value in kwargs.items()})

    def _given(self, op: TracedOp, tensors: Sequence[torch.Tensor]) -> Any:
        is_stored = self._is_stored(op)

        def given(leaf: OpReturn) -> Any:
            if leaf.kind == "argument":
                self._versions.append((tensors[leaf.slot], version_counter(tensors[leaf.slot])))
                return tensors[leaf.slot]
            if leaf.geometry is None:
                return leaf.value
            storage = self._frame.stored(op.group, leaf.slot) if is_stored else None
            return self._unwritten_tensor(leaf.geometry) if storage is None else leaf.geometry.view_of(storage)

        return mapped(op.form, given)

    def _is_stored(self, op: TracedOp) -> bool:
        return op.group in self._frame.program.actions and op.group not in self._missing and op.is_storable

    def _unwritten_tensor(self, geometry: TensorGeometry) -> torch.Tensor:
        """Return a tensor for a result without readers. All show one memory, which no op writes."""
        scratch = self._scratch.get(geometry.device)
        if scratch is None:
            size = max(
                (
                    each.geometry.reach_bytes
                    for op, act in zip(self._trace.ops, self._acts, strict=True)
                    if act in (Act.GIVE, Act.DRAW) and not self._is_stored(op)
                    for each in op.returns
                    if each.geometry is not None and each.geometry.device == geometry.device
                ),
                default=0,
            )
            memory = torch.empty(size, dtype=torch.uint8, device=geometry.device)
            scratch = self._scratch[geometry.device] = memory.untyped_storage()
            self._unwritten.add(storage_identity(memory))
        return geometry.view_of(scratch)

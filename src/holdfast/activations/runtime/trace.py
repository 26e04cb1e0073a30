"""Trace one real call of a unit: the ops, the storages that ops read and make, and the tensors that autograd saves.

The call is a plain one: outputs and gradients are those of the unit. Only ops below autograd and autocast are seen.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from holdfast.activations.runtime.arguments import mapped, objects_of, take_apart, tensors_of
from holdfast.activations.runtime.dense import TensorGeometry, same_bits
from holdfast.activations.runtime.frame import KeptTensor
from holdfast.activations.runtime.measure import least_seconds, timed
from holdfast.activations.runtime.op_rules import (
    BLANKS,
    FROM_PYTHON,
    UNNUMBERED,
    first_read,
    is_collective,
    is_plain,
    is_random_op,
    why_not_again,
    written_by,
)
from holdfast.activations.runtime.packings import with_packings
from holdfast.activations.runtime.peak import unit_peak
from holdfast.activations.runtime.seen_storages import SeenStorage, SeenStorages
from holdfast.activations.runtime.signature import has_autocast, signature_of
from holdfast.activations.runtime.traced import OpReturn, SavedSource, TracedOp, UnitTrace
from holdfast.backends.torch.private_layout import (
    CAST,
    TorchDispatchMode,
    has_forward_hooks,
    top_saved_tensors_hooks,
)

_UNSEEN_READS = frozenset({"tolist", "numpy", "__array__", "data_ptr", "__dlpack__"})
"""Functions by which code reads the content of a tensor without an op."""

_ROUNDS = 3
"""Measurements of an op that may run again, of which the shortest counts."""


def trace_call(
    unit: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    error_bound: float | None = None,
) -> tuple[Any, UnitTrace]:
    """Return the output of a call of a unit, and the trace of the call.

    Args:
        unit: The module that is called.
        forward: The module's own forward.
        args, kwargs: Arguments of the call.
        error_bound: Measure: packs are tried, bounded ones above 0 alone, ops are timed several times, and further
            calls measure the unit's peak. None: only trace.
    """
    tensors: list[torch.Tensor] = []
    form = take_apart((tuple(args), dict(kwargs)), tensors)
    signature = signature_of(unit, form, tensors)
    recorder = _Recorder(unit, list(filter(is_plain, tensors)), rounds=1 if error_bound is None else _ROUNDS)
    if not tensors or not all(map(is_plain, tensors)):
        recorder.refuse("an argument is no plain tensor" if tensors else "the unit is called without a tensor")
    if objects := [*objects_of(form[0]), *objects_of(form[1])]:
        recorder.bar(f"the unit's code may change {objects[0]} without an op; pass data alone (use_cache=False)")
    if hooked := [name for name, module in unit.named_modules() if name and has_forward_hooks(module)]:
        recorder.bar(f"hooks of the module {hooked[0]} would see skipped tensors")
    before, drawn = _attributes(unit), random.getstate()
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack), _ReadWatch(recorder), recorder:
        output = forward(*args, **kwargs)
    if changed := _changed(before, _attributes(unit)):
        recorder.bar(f"the unit keeps state in the attribute {changed}")
    if random.getstate() != drawn:
        recorder.bar("the unit draws from Python's random, which no replay restores")
    after: list[torch.Tensor] = []
    is_same = objects or take_apart((tuple(args), dict(kwargs)), after) == form
    if not is_same or (not objects and [*map(id, after)] != [*map(id, tensors)]):
        recorder.refuse("the unit's code changes a list or dict that is an argument")
    trace = recorder.finish(signature, output)
    # Code that a replay cannot repeat cannot be repeated here either.
    if error_bound is not None and not trace.why_not:
        trace = replace(trace, peak_bytes=unit_peak(unit, forward, form, tensors))
    if error_bound is not None:
        trace = with_packings(trace, recorder.held(), error_bound)
    return output, trace


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs ops and records reads, writes and new storages."""

    def __init__(self, unit: nn.Module, inputs: Sequence[torch.Tensor], *, rounds: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why_not, self.refused = "", ""
        self._rounds = rounds
        self.is_own_code, self._is_done = False, False
        self._seen = SeenStorages(unit, inputs)
        # Masks and positions belong to the model, which gives the same ones to every unit.
        counted = [tensor for tensor in inputs if tensor.requires_grad] or inputs
        own = {seen.weak.identity: seen.bytes for seen in map(self._seen.of, counted) if seen.group == 0}
        self._input_bytes = sum(own.values())
        self._ops: list[TracedOp] = []
        self._saved: list[tuple[SeenStorage, TensorGeometry, weakref.ref[KeptTensor]]] = []
        self._peak_bytes = 0
        self._casts_stay = torch.is_autocast_cache_enabled() and has_autocast(inputs)

    def pack(self, tensor: torch.Tensor) -> KeptTensor:
        """Write down the source of a tensor that autograd saves."""
        kept = KeptTensor(tensor)
        with self._own_code():
            if self._plain([tensor]):
                seen = self._seen.of(tensor)
                self._note_content(seen)
                seen.saves.append(seen.writes)
                self._saved.append((seen, TensorGeometry.of(tensor), weakref.ref(kept)))
        return kept

    def unpack(self, kept: KeptTensor) -> torch.Tensor:
        """Return a saved tensor."""
        if not self._is_done:
            self.refuse("the unit runs a backward inside the forward")
        return kept.unpack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and record its reads, writes and storages."""
        kwargs = kwargs or {}
        if func in UNNUMBERED:
            return func(*args, **kwargs)
        with self._own_code():
            tensors = self._plain(tensors_of((args, kwargs)))
            seen = [self._seen.of(tensor) for tensor in tensors]
            if func is CAST and seen and seen[0].is_registered:
                output = func(*args, **kwargs)
                cast = self._seen.of(output)
                cast.is_watched, cast.cast_of = True, seen[0]
                return output
            if func is FROM_PYTHON and seen and seen[0].group is None:
                seen[0].is_watched = True
            self._check_op(func, tensors)
            return self._record(func, args, kwargs, tensors, seen)

    def finish(self, signature: Any, output: Any) -> UnitTrace:
        """Return the trace."""
        self._is_done = True
        # A parameter or buffer that the unit changes has another content when an op runs again.
        changed = {number for seen in self._seen.outside() if seen.writes for number, _ in seen.reads}
        needed, made = {seen.group for seen, *_ in self._saved}, self._seen.made()
        # Of an op with several results only the saved ones stay.
        saved_bytes: Counter[int | None] = Counter()
        for seen in made:
            saved_bytes[seen.group] += seen.bytes if seen.saves else 0
        unstorable = {seen.group for seen in made if not seen.is_read_last or (seen.reads and not seen.saves)}
        ops = [TracedOp(0, "input", self._input_bytes, 0.0, (), None, 0 in needed, True, False, False)]
        for op in self._ops:
            is_base = op.base is None
            ops.append(
                replace(
                    op,
                    bytes=saved_bytes[op.number] or op.bytes,
                    has_effect=op.has_effect or op.number in changed,
                    is_needed=is_base and (op.number in needed or op.has_value),
                    is_storable=is_base and op.bytes > 0 and op.number not in unstorable,
                )
            )
        self._plain(tensors_of(output))
        return UnitTrace(
            signature=signature,
            ops=tuple(ops),
            # A cast of a buffer that the unit changes cannot be made again.
            saved=tuple(
                SavedSource(seen.group, seen.slot, geometry, seen.cast_of is not None and not seen.cast_of.writes)
                for seen, geometry, _ in self._saved
            ),
            cast_bytes=sum({id(seen): seen.bytes for seen, *_ in self._saved if seen.cast_of is not None}.values()),
            casts_stay=self._casts_stay,
            peak_bytes=self._peak_bytes,
            why_not=self.refused or self.why_not,
            refused=self.refused,
        )

    def held(self) -> dict[tuple[int | None, int], KeptTensor]:
        """Return the saved tensors that the graph still holds, by group and slot."""
        return {(seen.group, seen.slot): kept for seen, _, weak in self._saved if (kept := weak()) is not None}

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], seen: list[SeenStorage]) -> Any:
        number = len(self._ops) + 1
        written = written_by(func, args, kwargs)
        # An op may change a buffer unsaid: `native_batch_norm` does.
        buffers = [
            (tensor, tensor.clone())
            for tensor, each in zip(tensors, seen, strict=True)
            if each.group is None and not tensor.requires_grad and each.cast_of is None
        ]
        is_random = is_random_op(func, args, kwargs)
        device = next((tensor.device for tensor in tensors), None)
        output, seconds = timed(partial(func, *args, **kwargs), device)
        changed = {id(self._seen.of(tensor)) for tensor in written}
        changed |= {id(self._seen.of(tensor)) for tensor, before in buffers if not same_bits(tensor, before)}
        if not changed and not is_random and self._rounds > 1:
            seconds = min(seconds, least_seconds(partial(func, *args, **kwargs), device, self._rounds - 1))
        form, returns, is_view, fresh = self._returns(func, output, tensors, written, number)
        group = self._group_of(func, number, seen, changed, is_view=is_view, is_fresh=bool(fresh))
        read = [] if is_view else seen[first_read(func) :]
        has_effect = (
            kwargs.get("generator") is not None
            or any(each.group is None and id(each) in changed for each in seen)
            or any(each.group is None and not each.is_watched for each in read)
        )
        reads = {each.group for each in read if each.group is not None and each.group != group}
        for each in {id(each): each for each in read if each.group != group}.values():
            self._note_content(each)
            each.reads.append((number, each.writes))
            if each.cast_of is not None:
                each.cast_of.reads.append((number, each.cast_of.writes))
        for each in {id(each): each for each in seen if id(each) in changed}.values():
            each.writes, each.is_blank = each.writes + 1, False
        self._ops.append(
            TracedOp(
                number=number,
                overload=str(func),
                bytes=sum(each.bytes for each in fresh),
                seconds=seconds,
                reads=tuple(sorted(reads)),
                base=None if group == number else group,
                is_needed=False,
                is_storable=False,
                is_random=is_random,
                has_effect=has_effect,
                op=func,
                form=form,
                returns=returns,
                is_view=is_view,
                has_value=not tensors_of(output) and any(each.value is not None for each in returns),
            )
        )
        self._peak_bytes = max(self._peak_bytes, self._seen.live_bytes())
        return output

    def _returns(
        self, func: Any, output: Any, tensors: list[torch.Tensor], written: list[torch.Tensor], number: int
    ) -> tuple[Any, tuple[OpReturn, ...], bool, list[SeenStorage]]:
        """Return form and leaves of a result, whether all tensors show storages of before, and the new storages."""
        leaves: list[OpReturn] = []
        fresh: dict[int, SeenStorage] = {}
        changed = {id(self._seen.of(each)): place for place, each in enumerate(tensors) if id(each) in map(id, written)}

        def leaf(value: Any) -> OpReturn:
            if not isinstance(value, torch.Tensor) or not self._plain([value]):
                return OpReturn("value", value=value)
            known = self._seen.known(value)
            if known is not None and id(known) in changed:
                return OpReturn("argument", slot=changed[id(known)])
            if known is not None and id(known) not in fresh:
                return OpReturn("view")
            made = self._seen.of(value)
            if id(made) not in fresh:
                made.group, made.slot, fresh[id(made)] = number, len(fresh), made
                made.is_blank = func.overloadpacket.__name__ in BLANKS and made.bytes > 0
            return OpReturn("fresh", slot=made.slot, geometry=TensorGeometry.of(value))

        def noted(value: Any) -> OpReturn:
            leaves.append(leaf(value))
            return leaves[-1]

        form = mapped(output, noted)
        is_view = any(each.kind == "view" for each in leaves)
        if is_view and (fresh or written):
            self.bar(f"{func} returns new tensors and views")
        return form, tuple(leaves), is_view, list(fresh.values())

    def _group_of(
        self, func: Any, number: int, seen: list[SeenStorage], changed: set[int], *, is_view: bool, is_fresh: bool
    ) -> int:
        owners = {each.group for each in seen if id(each) in changed}
        if 0 in owners:
            self.bar(f"{func} changes an argument of the unit in place")
        if owners - {None} and (len(owners) > 1 or is_fresh):
            self.bar(f"{func} changes tensors of several ops")
        if is_view:
            owners = {each.group for each in seen}
        return next((owner for owner in owners if owner is not None), number) if not is_fresh else number

    def _check_op(self, func: Any, tensors: list[torch.Tensor]) -> None:
        hooks = top_saved_tensors_hooks()
        if hooks is None or getattr(hooks[0], "__self__", None) is not self:
            self.refuse(
                "the unit installs hooks for saved tensors itself (disable activation checkpointing; Transformers: "
                "gradient_checkpointing_disable())"
            )
        if is_collective(func):
            self.refuse(f"the unit runs a collective ({func})")
        self.bar(why_not_again(func, tensors))

    def _plain(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the plain tensors; another kind refuses the unit."""
        for tensor in tensors:
            if not is_plain(tensor):
                self.refuse(f"the unit uses a tensor of type {type(tensor).__name__}, {tensor.layout}")
        return list(filter(is_plain, tensors))

    def _note_content(self, seen: SeenStorage) -> None:
        """Notice a kernel that is no op: the memory is read, and no op has written to it."""
        if seen.is_blank:
            self.bar(f"the unit's code writes to the memory of op {seen.group} without an op")

    def bar(self, why: str) -> None:
        """Note why ops may not run again; the first reason stays."""
        self.why_not = self.why_not or why

    def refuse(self, why: str) -> None:
        """Note why no plan can manage the unit; the first reason stays."""
        self.refused = self.refused or why

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        before, self.is_own_code = self.is_own_code, True
        try:
            yield
        finally:
            self.is_own_code = before


class _ReadWatch(TorchFunctionMode):
    """Notices functions that read the content of a tensor without an op."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if not self._recorder.is_own_code and getattr(func, "__name__", "") in _UNSEEN_READS:
            self._recorder.bar(f"the unit's code reads a tensor by {func.__name__}()")
        return func(*args, **(kwargs or {}))


def _attributes(unit: nn.Module) -> dict[str, object]:
    """Return the objects that the modules of a unit hold, those inside of these, and the lengths of containers."""
    held: dict[str, object] = {}
    for name, module in unit.named_modules():
        for key, value in vars(module).items():
            held[f"{name}.{key}"] = value
            held[f"{name}.{key} (length)"] = len(value) if isinstance(value, (list, dict, set)) else None
            held.update({f"{name}.{key}[{inner}]": each for inner, each in _inside(value)})
    return held


def _inside(value: object) -> Iterable[tuple[object, object]]:
    """Return the items of a container, or the attributes of an object such as a meter, with their keys."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return ()
    return getattr(value, "__dict__", {}).items()


def _changed(before: dict[str, object], after: dict[str, object]) -> str:
    """Return the name of an attribute that holds another object than before; empty if none does."""
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is not new and not (type(old) is type(new) is int and old == new):
            return name.removeprefix(".")
    return ""

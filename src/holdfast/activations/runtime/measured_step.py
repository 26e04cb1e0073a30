"""Measures the steps of a model: plain, traced, and under a plan. Leaves the model as it was."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import sqrt
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import ModelProfile, UnitColumn
from holdfast.activations.profile.worst import MeasuredStep
from holdfast.activations.runtime.attach import PlannedUnit, attach, trace_units
from holdfast.activations.runtime.dense import same_bits
from holdfast.activations.runtime.measure import timed, timed_units
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.activations.runtime.unit_names import inside_ddp, units_of
from holdfast.activations.solve.columns import keep_all, whole_recompute
from holdfast.activations.solve.timeline import step_peak
from holdfast.backends.torch.local_shards import local_of
from holdfast.backends.torch.private_layout import is_wrapper, original_of, version_counter
from holdfast.errors import InvalidError, first_three

_ROUNDS = 3
"""Timed steps, of which the shortest counts."""

_GLOO_COUNTS = 3
"""Steps whose peak is counted on a CPU with other ranks, of which the lowest counts."""

_BUFFER = "buffer "
"""Start of the names of buffers among gradients."""


class MeasuredModel:
    """A model and its step, between two calls of the loop."""

    def __init__(
        self,
        model: object,
        step: Callable[[], torch.Tensor],
        units: Sequence[str] | None,
        error_bound: float,
        agree: Callable[[], None],
    ) -> None:
        """Check the model; run nothing yet.

        Args:
            model: The model.
            step: Runs forward and backward, and returns the loss.
            units: Globs of the units; None: the repeated blocks.
            error_bound: Largest relative error of a stored element.
            agree: Returns once every rank has come as far: no rank begins a step in which another one is missing.
        Raises:
            InvalidError: The model cannot be managed.
        """
        if not isinstance(model, nn.Module) or not callable(step):
            raise InvalidError(
                f"model, step: got {type(model).__name__} and {type(step).__name__}; expected a module and a function"
            )
        model, wrapper = inside_ddp(model), model
        compiled = [each for each in model.modules() if original_of(each) is not None or is_wrapper(each)]
        kind = type((compiled or [model])[0]).__qualname__
        _require(
            not compiled and not isinstance(model, nn.DataParallel),
            f"model: is a {kind}; expected a plain module, DDP or FSDP2. Fit the module inside, uncompiled",
        )
        self._model, self._step, self._agree, self._is_ddp = model, step, agree, model is not wrapper
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        held = [name for name, each in self._parameters.items() if each.grad is not None]
        _require(not held, f"{first_three(held)}: has a gradient; expected none before a fit. Call model.zero_grad()")
        _require(self._parameters, "model: has no parameter that requires a gradient; expected one that trains")
        self._names = units_of(model, units)
        self._require_whole_units()
        self._device = next(iter(self._parameters.values())).device
        self._error_bound = error_bound
        self._loss = self._step_seconds = 0.0
        self.steps = 0
        """Steps so far, without those that count a peak again."""
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        self._shows_progress = is_first and sys.stderr.isatty()
        self._gradients: dict[str, torch.Tensor] = {}

    def _require_whole_units(self) -> None:
        for name in self._names:
            modules = self._model.get_submodule(name).named_modules(prefix=name)
            inner = [key for key, each in modules if key != name and isinstance(each, FSDPModule)]
            _require(
                not inner,
                f"unit {name}: contains {first_three(inner)}, which fully_shard gathers inside the unit; expected "
                "units that are gathered as a whole. Name these modules in units=",
            )

    def __enter__(self) -> MeasuredModel:
        """Note buffers and generators."""
        self._buffers = [
            (module, name, each, each.detach().clone())
            for module in self._model.modules()
            for name, each in module.named_buffers(recurse=False)
        ]
        self._drawn = random.getstate(), torch.get_rng_state()
        self._drawn_on_gpu = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return self

    def __exit__(self, *error: object) -> None:
        """Restore buffers, generators and gradients."""
        if self._shows_progress and self.steps:
            sys.stderr.write("\n")
        self._reset()

    def profile(self) -> ModelProfile:
        """Return the measurements of the plain step.

        Raises:
            InvalidError: The step does not repeat, or a unit cannot be managed.
        """
        # DDP orders the buckets again in the second or third step. From then on the ranks add in one order.
        for _ in range(2 if self._is_ddp else 0):
            self._run()
        self._loss = self._run()
        self._gradients = self._taken()
        repeats = "step: gave another loss the second time; expected the same batch each time. Take the batch outside"
        _require(self._run() == self._loss, repeats)
        self._require_equal("in a second plain step; expected kernels that repeat. Try use_deterministic_algorithms")
        self._traces = traces = trace_units(self._model, self._names, self._run)
        order = [name for name in traces if not traces[name].refused]
        why = next((f"{name}: {each.refused}" for name, each in traces.items()), "no unit was called")
        _require(order, f"units: no plan can manage one; expected plain modules. {why}")
        classes: dict[str, list[str]] = {}
        for name in order:
            classes.setdefault(traces[name].fingerprint, []).append(name)
        # Contents differ from unit to unit: a pack must fit in the first, the middle and the last one.
        samples = {names[0]: {names[0], names[len(names) // 2], names[-1]} for names in classes.values()}
        every = {name for names in samples.values() for name in names}
        measured = trace_units(self._model, every, self._run, error_bound=self._error_bound)
        seconds, self._plain_seconds = self._seconds()
        peak = self._peak()
        index = {fingerprint: number for number, fingerprint in enumerate(classes)}
        profile = ModelProfile(
            classes=tuple(
                measured[names[0]].profile(tuple(names), [measured[each] for each in samples[names[0]]])
                for names in classes.values()
            ),
            order=tuple((name, index[traces[name].fingerprint]) for name in order),
            gradient_bytes=self._gradient_bytes(order),
            outside_bytes=0,
            keep_all_peak_bytes=peak,
            step_seconds=seconds,
        )
        return self._with_outside(profile)

    def planned(self, plan: SolvedPlan) -> MeasuredStep:
        """Return the measurements of a step under a plan.

        Raises:
            InvalidError: The loss, a buffer, or without lossy packs a gradient differs from the plain step.
        """
        with self._under(plan.profile, plan.column_of, plan.error_bound):
            changed = "the planned step gave another loss than the plain one; exclude units with units="
            _require(self._run() == self._loss, changed)
            is_lossy = any(plan.column_of(unit).is_lossy for unit in range(len(plan.choice)))
            where = "under the plan; expected the plain gradient. Exclude the unit with units="
            self._require_equal(where, among=_BUFFER if is_lossy else "")
            errors = self._gradient_errors() if is_lossy else ()
            peak = self._peak()
            slowdown = self._seconds()[0] / plan.profile.step_seconds
            return MeasuredStep(peak, slowdown, errors)

    def added_seconds(self, plan: SolvedPlan) -> tuple[tuple[int, int, float], ...]:
        """Return class, index and added seconds of each column that a plan chose and no step has measured."""
        with self._under(plan.profile, plan.column_of, plan.error_bound):
            _, spent = self._seconds()
        added: dict[tuple[int, int], list[float]] = {}
        for (name, kind), index in zip(plan.profile.order, plan.choice, strict=True):
            if not plan.columns[kind][index].is_measured:
                added.setdefault((kind, index), []).append(spent[name] - self._plain_seconds[name])
        return tuple((*column, max(fmean(seconds), 0.0)) for column, seconds in added.items())

    @contextmanager
    def _under(
        self, profile: ModelProfile, column_of: Callable[[int], UnitColumn], error_bound: float = 0.0
    ) -> Iterator[None]:
        """Run steps under the column of each unit, by the position of the unit in forward order."""
        programs = {
            name: PlannedUnit(profile.classes[kind], column_of(unit), error_bound).program(self._traces[name])
            for unit, (name, kind) in enumerate(profile.order)
        }
        attached = attach(self._model, programs)
        try:
            yield
        finally:
            attached.detach()
            self._reset()

    def _run(self) -> float:
        """Run a step from the same generators and buffers; leave the gradients."""
        self._agree()
        self._reset()
        if self._shows_progress:
            sys.stderr.write(f"\rholdfast: fit: step {self.steps + 1} of about 25")
            sys.stderr.flush()
        before = {name: version_counter(local_of(each)) for name, each in self._parameters.items()}
        loss: object
        loss, self._step_seconds = timed(self._step, self._device)
        self.steps += 1
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not bool(torch.isfinite(loss.detach()).all()):
            raise InvalidError(f"step: returned {str(loss)[:80]}; expected a finite loss, a tensor of one element")
        changed = [name for name, each in self._parameters.items() if before[name] != version_counter(local_of(each))]
        alone = f"step: changed {first_three(changed)}; expected forward and backward alone. Step no optimizer in it"
        _require(not changed, alone)
        has_gradient = any(each.grad is not None for each in self._parameters.values())
        _require(has_gradient, "step: left no gradient; expected loss.backward() in it")
        return float(loss.detach())

    def _seconds(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of the fastest of several steps, and those of each unit in this step."""
        found = []
        for _ in range(_ROUNDS):
            with timed_units({name: self._model.get_submodule(name) for name in self._names}, self._device) as spent:
                self._run()
            found.append((self._step_seconds, spent))
        return min(found, key=lambda each: each[0])

    def _peak(self) -> int:
        """Return the peak of a step above the memory before the step.

        A thread of gloo may be the last to hold a gathered unit. The profiler, which counts on a CPU, does not see such
        a release: each one adds to the count, until the end of the step.
        """
        has_gloo = self._device.type == "cpu" and dist.is_available() and dist.is_initialized()
        steps, found = self.steps, list[int]()
        for _ in range(_GLOO_COUNTS if has_gloo else 1):
            self._reset()
            found.append(peak_bytes(self._run, self._device)[1])
        self.steps = steps + 1  # The others take no step from the search for columns.
        return min(found)

    def _reset(self) -> None:
        for each in self._parameters.values():
            each.grad = None
        with torch.no_grad():
            for module, name, buffer, content in self._buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(content)
        random.setstate(self._drawn[0])
        torch.set_rng_state(self._drawn[1])
        if self._drawn_on_gpu is not None:
            torch.cuda.set_rng_state(self._drawn_on_gpu, self._device)

    def _taken(self) -> dict[str, torch.Tensor]:
        """Return copies of all gradients in host memory, and those of buffers."""
        tensors = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        sparse = [name for name, each in tensors.items() if local_of(each).layout is not torch.strided]
        _require(not sparse, f"{first_three(sparse)}: has a sparse gradient; expected dense ones. Use sparse=False")
        tensors |= {f"{_BUFFER}{name}": each for name, each in self._model.named_buffers()}
        return {name: local_of(each).detach().cpu().clone() for name, each in tensors.items()}

    def _require_equal(self, where: str, *, among: str = "") -> None:
        """Raise if a gradient or a buffer differs from the plain step.

        Args:
            where: For the message.
            among: Start of the names that count: `_BUFFER` for buffers alone.
        """
        found, plain = self._taken(), self._gradients
        both = {name for name in found.keys() & plain.keys() if same_bits(found[name], plain[name])}
        different = sorted(name for name in (found.keys() | plain.keys()) - both if name.startswith(among))
        _require(not different, f"{first_three(different)}: got another gradient {where}")

    def _gradient_errors(self) -> tuple[tuple[str, float], ...]:
        """Return the relative error of the gradient of each parameter, and of all as one under the name ""."""
        found, plain, squares = self._taken(), self._gradients, {"": (0.0, 0.0)}
        for name in self._parameters.keys() & plain.keys():
            mine, theirs = found[name].double(), plain[name].double()
            error, size = (float(each.square().sum()) for each in (mine - theirs, theirs))
            squares[name] = error, size
            squares[""] = squares[""][0] + error, squares[""][1] + size
        return tuple((name, sqrt(error / (size or 1.0))) for name, (error, size) in sorted(squares.items()))

    def _gradient_bytes(self, order: Sequence[str]) -> tuple[int, ...]:
        """Return the bytes of the gradients that are made by the end of the backward of each unit."""
        made: Counter[nn.Parameter] = Counter()
        standing: set[nn.Parameter] = set()

        def arrived(parameter: nn.Parameter, _: torch.Tensor) -> None:
            # A step may add to gradients that stood before.
            if parameter.grad is not None and parameter not in made:
                standing.add(parameter)

        def added(parameter: nn.Parameter) -> None:
            if parameter not in standing:
                made[parameter] += 1

        with ExitStack() as stack:
            for each in self._parameters.values():
                stack.callback(each.register_hook(partial(arrived, each)).remove)  # type: ignore[no-untyped-call]
                stack.callback(each.register_post_accumulate_grad_hook(added).remove)  # type: ignore[no-untyped-call]
            self._run()
        owners = {
            id(parameter): number
            for number, name in enumerate(order)
            for parameter in self._model.get_submodule(name).parameters()
        }
        total, by_unit = 0, [0] * len(order)
        for parameter in made:
            total += local_of(parameter).nbytes
            if id(parameter) in owners:
                by_unit[owners[id(parameter)]] = total
        if max(made.values(), default=0) > 1:
            # Of several backwards in a step, all but the first find every gradient.
            return (total,) * len(order)
        return tuple(accumulate(reversed(by_unit), max))[::-1]

    def _with_outside(self, profile: ModelProfile) -> ModelProfile:
        """Return a profile with the bytes outside units and of the loss: measured peaks less the simulated ones."""
        units = [profile.classes[kind] for _, kind in profile.order]
        kept = [keep_all(unit) for unit in units]
        again = [whole_recompute(unit) or keep_all(unit) for unit in units]
        outside = profile.keep_all_peak_bytes - step_peak(profile, kept).bytes
        outside = max(outside, self._peak_under(profile, again) - step_peak(profile, again).bytes, 0)
        profile = replace(profile, outside_bytes=outside)
        if not any(unit.casts_stay and unit.cast_bytes for unit in units):
            return profile
        # Where casts stay until the forward ends, the loss may be the peak: with the last unit kept and no other.
        last = [*again[:-1], kept[-1]]
        peak = self._peak_under(profile, last)
        if peak <= step_peak(profile, last).bytes:
            return profile  # Another moment is the peak even so.
        held = outside + sum(each.device_bytes + each.forward_cast_bytes for each in last)
        return replace(profile, loss_workspace_bytes=max(peak - held, 0))

    def _peak_under(self, profile: ModelProfile, columns: Sequence[UnitColumn]) -> int:
        """Return the measured peak of a step under columns."""
        with self._under(profile, columns.__getitem__):
            self._run()
            return self._peak()


def _require(is_met: object, message: str) -> None:
    if not is_met:
        raise InvalidError(message)

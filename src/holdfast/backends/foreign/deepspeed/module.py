"""Lists the weights, buffers and frozen parameters of files of model states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.backends.foreign.deepspeed.layout import InexactError, Layouts, TensorParallelLayout, replicated_layout
from holdfast.backends.foreign.deepspeed.ranks import Models
from holdfast.backends.foreign.deepspeed.saved import ModelState
from holdfast.backends.foreign.deepspeed.tensors import HeldTensor, Tensors
from holdfast.backends.foreign.messages import CONVERT
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.slices.flat_partition import Shapes, parts_of_one
from holdfast.backends.foreign.slices.pieces import ElementRun
from holdfast.errors import CorruptError, InvalidError, MissingError, first_three


@dataclass(slots=True)
class Parameters:
    """The parameters of a model, collected from all files of model states."""

    models: Models
    """All files of model states."""

    layouts: Layouts
    """Tensor-parallel layouts of the parameters."""

    tensors: Tensors
    """Receives the listed tensors."""

    has_atoms: bool
    """Whether a universal folder also stores each parameter whole, so that inexact layouts do no harm."""

    states: Sequence[ModelState] = field(init=False)
    """States of data-parallel rank 0, by tensor-parallel rank."""

    flat_shapes: list[list[Shapes]] = field(default_factory=list)
    """Shapes of the parameters by flat buffer and tensor-parallel rank."""

    trained: set[str] = field(init=False)
    """Names of the parameters in flat buffers."""

    ties: dict[str, str] = field(default_factory=dict)
    """Alias to the stored name."""

    _known: dict[str, TensorParallelLayout | None] = field(default_factory=dict)
    _shapes: dict[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Collect the shapes of the flat buffers.

        Raises:
            InvalidError: Ranks hold different parameters, like the stages of a pipeline.
        """
        self.states = [self.models[tp, 0] for tp in range(self.layouts.tp_degree)]
        for by_rank in zip(*(state.groups for state in self.states), strict=True):
            for state, shapes in zip(self.states, by_rank, strict=True):
                if shapes.keys() != by_rank[0].keys():
                    other = first_three(sorted(shapes.keys() ^ by_rank[0].keys()))
                    raise InvalidError(
                        f"{self.tensors.where}/{state.file}: holds other parameters than {self.states[0].file}: "
                        f"{other}; expected the same names on every tensor-parallel rank. Holdfast reads no pipelines"
                    )
            self.flat_shapes.append(list(by_rank))
            self._shapes |= {name: [shapes[name] for shapes in by_rank] for name in by_rank[0]}
        self.trained = set(self._shapes)

    def layout(self, name: str, shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout | None:
        """Return the layout of a parameter; None, with a remark, if no rank stores it exactly.

        Args:
            name: The parameter.
            shapes: Shape of the tensor on each tensor-parallel rank.
        Raises:
            CorruptError: The shapes differ from those of an earlier call.
        """
        if self._shapes.setdefault(name, shapes) != shapes:
            raise CorruptError(
                f"{self.tensors.where}/{self.states[0].file}: {name} has shape {list(shapes[0])} in one place and "
                f"{list(self._shapes[name][0])} in another, or on another rank; expected module and param_shapes to "
                "agree. Read another copy"
            )
        if name not in self._known:
            try:
                self._known[name] = self.layouts.of(name, shapes)
            except InexactError as error:
                self._known[name] = None
                if self.has_atoms:
                    return None
                self.tensors.remark(
                    f"{self.layouts.where}: {name} and its optimizer state are left out: {error}. {CONVERT}"
                )
        return self._known[name]

    def is_left_out(self, name: str) -> bool:
        """Return whether a parameter was left out with a remark."""
        return not self.has_atoms and name in self._known and self._known[name] is None

    def remark_unlisted(self) -> None:
        """Add a remark about parameters that no pattern names, to which DeepSpeed's default layout applies."""
        names = [name for name, layout in self._known.items() if layout is not None and layout.unlisted]
        if names:
            self.tensors.remark(
                f"{self.layouts.where}: universal_checkpoint_info states no layout for {len(names)} parameters "
                f"({first_three(sorted(names))}); Holdfast assumes a cut along dimension 0, as DeepSpeed does"
            )


def list_module(parameters: Parameters, *, weights: bool) -> None:
    """List the tensors of the module's state dict.

    Args:
        parameters: The parameters, which receive the tensors.
        weights: Whether the state dict holds parameters; with ZeRO-3 it holds only buffers.
    """
    first, tensors = parameters.states[0], parameters.tensors
    parameters.ties = _ties(first, parameters.trained, by_memory=weights)
    for name, value in first.module.items():
        if not isinstance(value, StoredTensor) or name in parameters.ties:
            continue
        if not weights and name not in first.buffers:
            continue
        by_rank = [_tensor_of(state, name, tensors.where) for state in parameters.states]
        shapes = [tensor.shape for tensor in by_rank]
        layout = replicated_layout(shapes) if name in first.buffers else parameters.layout(name, shapes)
        if layout is not None:
            fqn = f"model.{name}"
            tensors.add(fqn, layout, [HeldTensor(t.dtype, t.shape, tensors.runs(fqn, t)) for t in by_rank])


def list_copies(parameters: Parameters) -> None:
    """List the buffers of data-parallel ranks beyond the first as further copies. ZeRO-3 stores them on every rank."""
    models, tensors = parameters.models, parameters.tensors
    for name in parameters.states[0].buffers:
        spec = tensors.specs.get(f"model.{name}")
        for (tp, dp), state in models.items():
            first, copy = models[tp, 0].module.get(name), state.module.get(name)
            if not dp or spec is None or not isinstance(first, StoredTensor):
                continue
            if not isinstance(copy, StoredTensor) or (copy.dtype, copy.shape) != (first.dtype, first.shape):
                held = f"{copy.dtype} {list(copy.shape)}" if isinstance(copy, StoredTensor) else "no tensor"
                tensors.remark(
                    f"{state.file}: holds {held} as the buffer {name}, data-parallel rank 0 "
                    f"{first.dtype} {list(first.shape)}; the buffer of rank 0 is read"
                )
            elif first.shape == spec.global_shape:
                tensors.add_copy(spec.fqn, copy)


def list_frozen(parameters: Parameters, ranks: int) -> None:
    """List the parameters that ZeRO-3 cut over a number of data-parallel ranks and that have no optimizer."""
    tensors = parameters.tensors
    for name in parameters.states[0].frozen:
        shapes = [_frozen_shape(state, name, tensors.where) for state in parameters.states]
        layout = None if name in parameters.ties else parameters.layout(name, shapes)
        if layout is not None:
            held = [_joined_fragments(parameters, tp, name, ranks) for tp in range(len(shapes))]
            tensors.add(f"model.{name}", layout, held)


def list_ties(parameters: Parameters) -> None:
    """List the tied names of listed parameters."""
    for alias, name in parameters.ties.items():
        if f"model.{name}" in parameters.tensors.specs:
            parameters.tensors.aliases[f"model.{alias}"] = f"model.{name}"


def _ties(state: ModelState, trained: set[str], *, by_memory: bool) -> dict[str, str]:
    """Return the tied names of a module: those that the file states, and those that share memory in it."""
    # ZeRO-3 stores empty tensors in place of parameters, so memory tells nothing there.
    same: dict[object, list[str]] = {}
    for name, value in state.module.items():
        if isinstance(value, StoredTensor):
            tensor = value if by_memory and value.numel else None
            memory = (tensor.storage, tensor.offset, tensor.dtype, tensor.shape, tensor.strides) if tensor else name
            same.setdefault(memory, []).append(name)
    ties: dict[str, str] = {}
    for names in same.values():
        stored = next((name for name in names if name in trained), names[0])
        ties |= {name: stored for name in names if name != stored}
    shapes = {name: value.shape for name, value in state.module.items() if isinstance(value, StoredTensor)}
    for stated in state.shared.items():
        # Keep the trained name of a pair: the flat buffers hold only that one.
        alias, name = stated if stated[1] in trained or stated[0] not in trained else (stated[1], stated[0])
        # DeepSpeed detects ties by address. Parameters without elements all have address 0 and are no ties.
        empty = by_memory and (shapes.get(alias) != shapes.get(name) or 0 in shapes.get(alias, (0,)))
        if alias in shapes and alias not in trained and alias != name and not empty:
            ties[alias] = name
    return ties


def _tensor_of(state: ModelState, name: str, where: str) -> StoredTensor:
    value = state.module.get(name)
    if not isinstance(value, StoredTensor):
        raise CorruptError(
            f"{where}/{state.file}: holds no tensor {name}, which tensor-parallel rank 0 holds; expected the same "
            "names on every rank. Holdfast reads no pipelines"
        )
    return value


def _frozen_shape(state: ModelState, name: str, where: str) -> tuple[int, ...]:
    if name not in state.frozen:
        raise CorruptError(
            f"{where}/{state.file}: frozen_param_shapes lacks {name}; expected it on every rank. Read another copy"
        )
    return state.frozen[name]


def _joined_fragments(parameters: Parameters, tp: int, name: str, ranks: int) -> HeldTensor:
    """Return a frozen parameter of one tensor-parallel rank, whose data-parallel ranks each hold a fragment."""
    where, shape = parameters.tensors.where, parameters.states[tp].frozen[name]
    first = parameters.states[tp].fragments.get(name)
    dtype = first.dtype if first is not None else "float32"
    runs = []
    for part in parts_of_one(math.prod(shape), ranks):
        state = parameters.models.get((tp, part.rank))
        if state is None:
            raise MissingError(
                f"{where}: no model states of data-parallel rank {part.rank}, tensor-parallel rank {tp}, which hold "
                f"some of {name}. Copy the missing files"
            )
        tensor = state.fragments.get(name)
        fits = tensor is not None and tensor.is_contiguous and tensor.numel >= part.stop - part.start
        if tensor is None or not fits or tensor.dtype != dtype:
            held = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise CorruptError(
                f"{where}/{state.file}: frozen_param_fragments holds {held} of {name}, shape {list(shape)} over "
                f"{ranks} ranks; expected {part.stop - part.start} elements of one type. Read another copy"
            )
        runs.append(ElementRun(part.start, part.stop, tensor.file, tensor.offset))
    return HeldTensor(dtype, shape, runs)

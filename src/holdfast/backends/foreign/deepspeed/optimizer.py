"""Lists the master copies and the optimizer state of flat buffers. Every rank's file holds one share of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.backends.foreign.deepspeed.module import Parameters
from holdfast.backends.foreign.deepspeed.saved import FlatShare, ZeroState
from holdfast.backends.foreign.deepspeed.tensors import HeldTensor
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.backends.foreign.slices.flat_partition import (
    FlatPart,
    numel_of,
    parts_of_each_cut,
    parts_of_even_cut,
    share_of,
)
from holdfast.backends.foreign.slices.pieces import ElementRun
from holdfast.base.types.values import Value
from holdfast.errors import CorruptError, first_three

MASTER = "master"

Files = Sequence[Sequence[ZeroState]]
"""Optimizer states by tensor-parallel and data-parallel rank."""


@dataclass(slots=True)
class ZeroOptimizer:
    """The state of an optimizer besides tensors."""

    param_groups: Sequence[Mapping[str, object]] | None
    """Hyperparameters by parameter group; None if the files hold none."""

    groups: dict[str, int] = field(default_factory=dict)
    """Number of the parameter group, by parameter."""

    values: dict[str, dict[str, Value]] = field(default_factory=dict)
    """State of each parameter besides tensors."""

    unread: str = ""
    """Why state other than master copies cannot be listed; empty if it can."""


def list_buffers(parameters: Parameters, files: Files) -> ZeroOptimizer:
    """List the state in flat buffers as `optimizer.state.<parameter>.<key>`, master copies included.

    Args:
        parameters: Names and layouts; receives the tensors.
        files: Every rank's file.
    """
    first = files[0][0]
    optimizer = ZeroOptimizer(first.param_groups)
    for number, names in enumerate(parameters.states[0].groups):
        optimizer.groups |= dict.fromkeys(names, first.group_of[number])
        _Buffer(parameters, files, number).list_state(optimizer)
    return optimizer


class _Buffer:
    """One flat buffer: every rank's share, and the parts of each parameter in it."""

    def __init__(self, parameters: Parameters, files: Files, number: int) -> None:
        self._parameters, self._files, self._number = parameters, files, number
        self._where = parameters.tensors.where
        self._shapes = parameters.flat_shapes[number]
        self._shares = [[state.shares[number] for state in of_rank] for of_rank in files]
        self._whole = [
            share_of([share.master.numel for share in shares], [share.padding for share in shares]) or 0
            for shares in self._shares
        ]
        self._every = [
            (share, whole, state.file)
            for shares, whole, of_rank in zip(self._shares, self._whole, files, strict=True)
            for share, state in zip(shares, of_rank, strict=True)
        ]
        self._parts = [self._placed(tp) for tp in range(len(files))]

    def list_state(self, optimizer: ZeroOptimizer) -> None:
        """List the master copy and the state of every parameter.

        A tensor of one dimension with as many elements as the master copy, with or without padding, is cut like the
        master copy. A single number belongs to every parameter. If another tensor is among the state, only the master
        copy is listed.

        Args:
            optimizer: Receives state that is no tensor, or the reason why a tensor is ambiguous.
        """
        first = self._shares[0][0]
        for share, _, file in self._every:
            if share.state.keys() != first.state.keys():
                raise CorruptError(
                    f"{self._where}/{file}: state of buffer {self._number} has {sorted(share.state)}; "
                    f"{self._files[0][0].file} has {sorted(first.state)}. Are they of one checkpoint?"
                )
        flat_keys, scalar_keys, plain = [MASTER], list[str](), dict[str, Value]()
        # Optimizers name their state freely, so the shape decides, on all ranks together.
        for key, first_value in first.state.items():
            values = [share.state[key] for share, _, _ in self._every]
            if all(_is_flat(share.state[key], share, whole) for share, whole, _ in self._every):
                flat_keys.append(key)
            elif all(isinstance(value, StoredTensor) and value.shape in ((), (1,)) for value in values):
                scalar_keys.append(key)
            elif not any(isinstance(value, StoredTensor) for value in values):
                plain[key] = first_value
            else:
                shape = next(list(value.shape) for value in values if isinstance(value, StoredTensor))
                optimizer.unread = (
                    f"{key} of buffer {self._number} has shape {shape} beside a master copy of "
                    f"{list(first.master.shape)}, so its parameters are ambiguous"
                )
                flat_keys, scalar_keys, plain = [MASTER], [], {}
                break
        self._list_flat(flat_keys)
        for key in scalar_keys:
            self._list_scalar(key)
        optimizer.values |= dict.fromkeys(self._shapes[0], plain)

    def _list_flat(self, keys: Sequence[str]) -> None:
        """List every parameter's part of the master copy, and of state that is cut like it."""
        for name in self._shapes[0]:
            layout = self._parameters.layout(name, [shapes[name] for shapes in self._shapes])
            if layout is None:
                continue
            for key in keys:
                held = [
                    HeldTensor(_tensor(self._shares[tp][0], key).dtype, shapes[name], list(self._runs(tp, name, key)))
                    for tp, shapes in enumerate(self._shapes)
                ]
                self._parameters.tensors.add(f"optimizer.state.{name}.{key}", layout, held)

    def _list_scalar(self, key: str) -> None:
        """List a single number for each parameter: the same bytes for all, with copies in other ranks' files."""
        tensors = self._parameters.tensors
        first, *others = (_tensor(share, key) for share, _, _ in self._every)
        names = [name for name in self._shapes[0] if not self._parameters.is_left_out(name)]
        fqns = [f"optimizer.state.{name}.{key}" for name in names]
        if fqns:
            tensors.add_whole(fqns[0], first)
            for copy in others:
                if copy.shape == first.shape:
                    tensors.add_copy(fqns[0], copy)
            for fqn in fqns[1:]:
                tensors.add_again(fqn, fqns[0])

    def _runs(self, tp: int, name: str, key: str) -> Iterator[ElementRun]:
        for part in self._parts[tp][name]:
            tensor = _tensor(self._shares[tp][part.rank], key)
            if part.at + part.stop - part.start > tensor.numel:
                file = self._files[tp][part.rank].file
                raise CorruptError(
                    f"{self._where}/{file}: {key} of buffer {self._number} has {tensor.numel} elements; expected "
                    f"{name} at {part.at}–{part.at + part.stop - part.start}. Do the files belong together?"
                )
            yield ElementRun(part.start, part.stop, tensor.file, tensor.offset + part.at * tensor.itemsize)

    def _placed(self, tp: int) -> dict[str, list[FlatPart]]:
        shapes, of_rank, shares = self._shapes[tp], self._files[tp], self._shares[tp]
        # ZeRO-3 cuts each parameter alone; the other stages cut the concatenation of all parameters.
        if of_rank[0].stage == 3:
            return dict(parts_of_each_cut(shapes, len(of_rank)))
        gaps = shares[0].gaps or [0] * len(shapes)
        if len(gaps) != len(shapes) or any(list(share.gaps or gaps) != list(gaps) for share in shares):
            raise CorruptError(
                f"{self._where}/{of_rank[0].file}: param_alignment_paddings for {len(gaps)} parameters of buffer "
                f"{self._number}, which has {len(shapes)}, or different ones on another rank. Read another copy"
            )
        share_numel, needed = self._whole[tp], numel_of(shapes, gaps)
        if share_numel * len(shares) < needed:
            lengths = first_three(share.master.numel for share in shares)
            raise CorruptError(
                f"{self._where}/{of_rank[0].file}: buffer {self._number} has {needed} elements, and its ranks hold "
                f"{lengths}; expected equal shares that hold all. Do the files belong together?"
            )
        parts = dict(parts_of_even_cut(shapes, gaps, max(share_numel, 1)))
        self._compare_addresses(tp, parts)
        return parts

    def _compare_addresses(self, tp: int, placed: Mapping[str, Sequence[FlatPart]]) -> None:
        """Add a remark if `param_slice_mappings` contradict `param_shapes`, which decide."""
        expected: list[dict[str, tuple[int, int]]] = [{} for _ in self._files[tp]]
        for name, parts in placed.items():
            for part in parts:
                expected[part.rank][name] = (part.at, part.stop - part.start)
        for share, state, addresses in zip(self._shares[tp], self._files[tp], expected, strict=True):
            stated = share.addresses
            if stated is not None and {name: place for name, place in stated.items() if place[1]} != addresses:
                self._parameters.tensors.remark(
                    f"{state.file}: param_slice_mappings of buffer {self._number} contradict "
                    "param_shapes, as with round_robin_gradients. They were ignored: param_shapes state the order"
                )
                return


def _is_flat(value: object, share: FlatShare, whole: int) -> bool:
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not value.is_contiguous:
        return False
    return value.numel in (share.master.numel, whole)


def _tensor(share: FlatShare, key: str) -> StoredTensor:
    value = share.master if key == MASTER else share.state[key]
    assert isinstance(value, StoredTensor)
    return value

"""Packs by the name of their action, and the packings that a tensor offers to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from holdfast.activations.profile.unit_profile import Packing
from holdfast.activations.runtime.bounded import GROUP, pack_codes
from holdfast.activations.runtime.dense import PackedTensor, elements_of
from holdfast.activations.runtime.exact import pack_bits, pack_narrow, pack_pieces
from holdfast.activations.runtime.frame import KeptTensor
from holdfast.activations.runtime.measure import least_seconds
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.activations.runtime.traced import UnitTrace
from holdfast.base.clock import Clock

EXACT_ACTIONS = ("bits", "narrow", "sparse", "planes")

BOUNDED_ACTIONS = ("q8", "q4")

_RESERVED_PART_MAX = 0.9
"""A packing that reserves more than this part of the raw bytes is not offered."""

_ROUNDS = 3
"""Measurements, of which the shortest counts."""


def pack(
    tensor: torch.Tensor, action: str, *, error_bound: float = 0.0, device_bytes_max: int | None = None
) -> PackedTensor | None:
    """Return a tensor packed by an action; None if its content does not fit (overflow), or cannot be packed this way.

    Args:
        tensor: Any tensor. It is only read.
        action: One of `EXACT_ACTIONS` and `BOUNDED_ACTIONS`.
        error_bound: For bounded actions: the largest error of an element, as a share of the tensor's rms.
        device_bytes_max: More bytes than this overflow; the `device_bytes` of the packing that a plan chose.
    """
    if action in BOUNDED_ACTIONS:
        packed = pack_codes(tensor, int(action[1:]), error_bound=error_bound, device_bytes_max=device_bytes_max)
    elif action in ("bits", "narrow"):
        packed = pack_bits(tensor) if action == "bits" else pack_narrow(tensor)
    else:
        packed = pack_pieces(tensor, action, device_bytes_max=device_bytes_max)
    is_overflow = packed and device_bytes_max is not None and packed.device_bytes > device_bytes_max
    return None if is_overflow else packed


def packings_of(tensor: torch.Tensor, *, error_bound: float = 0.0, clock: Clock | None = None) -> tuple[Packing, ...]:
    """Return the packings that a tensor offers with its present content.

    Args:
        tensor: An activation. It is only read.
        error_bound: Bounded packings are offered above 0 alone.
        clock: Measures the seconds.
    """
    bytes_max = int(_RESERVED_PART_MAX * tensor.nbytes)
    offered = []
    for action in EXACT_ACTIONS + (BOUNDED_ACTIONS if error_bound else ()):
        once = partial(pack, tensor, action, error_bound=error_bound, device_bytes_max=bytes_max)
        packed = once()
        if packed is None or packed.reserved_bytes > bytes_max:
            continue
        seconds = sum(least_seconds(each, tensor.device, _ROUNDS, clock) for each in (once, packed.unpack))
        spare_bytes = packed.reserved_bytes - packed.device_bytes
        is_lossy = action in BOUNDED_ACTIONS
        content = _worst_like(tensor) if is_lossy else tensor
        made, peak = peak_bytes(partial(pack, content, action, error_bound=error_bound), tensor.device)
        workspace_bytes = max(peak - made.device_bytes, 0) if made is not None else peak
        offered.append(Packing(action, packed.reserved_bytes, seconds, is_lossy, spare_bytes, workspace_bytes))
    return tuple(offered)


def with_packings(trace: UnitTrace, held: Mapping[tuple[int | None, int], KeptTensor], error_bound: float) -> UnitTrace:
    """Return a trace with the packings of each storable result, tried on the saved tensors.

    Args:
        trace: A trace.
        held: The saved tensors by group and slot.
        error_bound: Bounded packings are offered above 0 alone.
    """
    ops = list(trace.ops)
    for op in filter(lambda op: op.number and op.is_storable and op.is_needed, trace.ops):
        slot, geometry = trace.packed_geometry(op.number)
        kept = held.get((op.number, slot))
        tensor = None if kept is None else geometry.whole(kept.storage())
        # Without a replay only a pack that fits any content is right.
        if tensor is None or (trace.why_not and tensor.dtype is not torch.bool):
            continue
        found = [
            # The op's other results are kept.
            replace(each, device_bytes=each.device_bytes + op.bytes - tensor.nbytes)
            for each in packings_of(tensor, error_bound=error_bound)
            if not trace.why_not or each.action == "bits"
        ]
        ops[op.number] = replace(op, packings=tuple(found))
    return replace(trace, ops=tuple(ops))


def _worst_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bounded packs take the most workspace: an outlier and a NaN in each group."""
    worst = torch.zeros_like(tensor)
    if (elements := elements_of(worst)) is not None:
        elements[::GROUP], elements[GROUP // 2 :: GROUP] = 1, torch.nan
    return worst

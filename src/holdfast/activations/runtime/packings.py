"""Packs by the name of their action, and the packings that a tensor offers to a plan."""

from __future__ import annotations

from functools import partial

import torch

from holdfast.activations.profile.unit_profile import Packing
from holdfast.activations.runtime.bounded import pack_codes
from holdfast.activations.runtime.dense import PackedTensor
from holdfast.activations.runtime.exact import pack_bits, pack_narrow, pack_pieces
from holdfast.activations.runtime.measure import timed
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
    packed: PackedTensor | None
    if action in BOUNDED_ACTIONS:
        packed = pack_codes(tensor, int(action[1:]), error_bound=error_bound, device_bytes_max=device_bytes_max)
    elif action == "bits":
        packed = pack_bits(tensor)
    elif action == "narrow":
        packed = pack_narrow(tensor)
    else:
        packed = pack_pieces(tensor, action, device_bytes_max=device_bytes_max)
    if packed is None or device_bytes_max is None or packed.device_bytes <= device_bytes_max:
        return packed
    return None


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
        seconds: list[float] = []
        reserved_bytes = 0
        while len(seconds) < _ROUNDS and reserved_bytes <= bytes_max:
            there_and_back = partial(_packed_and_unpacked, tensor, action, error_bound, bytes_max)
            packed, taken = timed(there_and_back, tensor.device, clock)
            if packed is None:
                break
            seconds.append(taken)
            reserved_bytes = packed.reserved_bytes
        if len(seconds) == _ROUNDS:
            offered.append(Packing(action, reserved_bytes, min(seconds), action in BOUNDED_ACTIONS))
    return tuple(offered)


def _packed_and_unpacked(tensor: torch.Tensor, action: str, error_bound: float, bytes_max: int) -> PackedTensor | None:
    packed = pack(tensor, action, error_bound=error_bound, device_bytes_max=bytes_max)
    if packed is not None:
        packed.unpack()
    return packed

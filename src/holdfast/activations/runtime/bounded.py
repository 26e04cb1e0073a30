"""Bounded packs: no element is off by more than a share of its tensor's rms.

A tensor is cut into groups of 256 consecutive elements in memory order. Each group has a step; a code is the number of
steps, in 8 or 4 bits. An element whose code would miss the limit is an outlier, stored exactly with its index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from holdfast.activations.runtime.dense import PackedTensor, TensorGeometry, block_elements, elements_of

GROUP = 256
"""Elements of a group."""

_LARGEST_CODE = {8: 127, 4: 7}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_STEP_PART = 0.999
"""Part of the limit that a step uses. The rest covers the rounding of float32 arithmetic, 5 · 10⁻⁵ at most."""

_CHECKED_PART = 0.9999
"""Part of the limit by which a decoded element may be off. The rest covers the rounding of rms and of differences."""

_SMALL, _LARGE = 1e-15, 1e18
"""Between these the sum of 256 squares neither vanishes nor overflows in float32."""

_TINY_LIMIT = 1e-33
"""Below this limit steps may be no normal numbers, so every element is checked."""

_LIMIT_MAX = 1e38
"""The limit is lessened to this: twice the limit must be a float32 number."""

_NEAR_OVERFLOW = 3e38
"""Above this a decoded element may become infinite."""


def pack_codes(
    tensor: torch.Tensor, bits: int, *, error_bound: float, device_bytes_max: int | None = None
) -> PackedTensor | None:
    """Return a tensor as codes: |x̂ − x| ≤ `error_bound` · rms(x) for every element, rms over the finite elements.

    NaN and infinities keep their bits. None: more outliers than fit, or a tensor that cannot be coded.

    Args:
        tensor: Any tensor.
        bits: 8 or 4.
        error_bound: Above 0 and at most 1.
        device_bytes_max: More bytes than this overflow.
    """
    elements = elements_of(tensor)
    if elements is None or elements.dtype not in _DTYPES or len(elements) >= 1 << 31:
        return None
    largest = _LARGEST_CODE[bits]
    outlier_bytes = 4 + elements.element_size()  # Index and element.
    absmax, rms, is_finite, finite = _group_sizes(elements)
    limit = min(error_bound * rms, _LIMIT_MAX)
    steps, is_checked = _steps(absmax, rms, limit, largest=largest, dtype=elements.dtype)
    is_checked |= ~is_finite
    codes = torch.empty(len(steps), GROUP * bits // 8, dtype=torch.int8, device=elements.device)
    room = math.inf
    if device_bytes_max is not None:
        room = (device_bytes_max - codes.nbytes - steps.nbytes) // outlier_bytes
        if room < len(elements) - finite:
            return None
    places, outliers = [], []
    # A limit that is no normal number would be rounded, so no error is allowed there.
    error_max = _CHECKED_PART * limit if limit > 1e-37 else 0.0
    start = 0
    for block, coded, step, is_loose in _split(elements, codes, steps.unsqueeze(1), is_checked):
        rows = _rows(block)
        scaled = (rows * step.reciprocal()).round_()
        if len(found := is_loose.nonzero().squeeze(1)):
            scaled.nan_to_num_(0.0, largest, -largest).clamp_(-largest, largest)
            misses = _misses(found, rows, scaled, step, error_max=error_max, dtype=elements.dtype, most=room)
            if misses is None:
                return None
            room -= len(misses)
            places.append((start + misses).int())
            outliers.append(block[misses])
        coded.copy_(scaled if bits == 8 else torch.add(scaled[:, : GROUP // 2], scaled[:, GROUP // 2 :], alpha=16))
        start += len(block)
    none = elements.new_empty(0)
    parts = codes, steps, torch.cat([none.int(), *places]), torch.cat([none, *outliers])
    # 1.5 times as many outliers, and 64 more.
    reserve_bytes = (len(parts[2]) // 2 + 64) * outlier_bytes
    return PackedTensor(TensorGeometry.of(tensor), parts, _fill_from_codes, reserve_bytes)


def _fill_from_codes(
    elements: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor, places: torch.Tensor, outliers: torch.Tensor
) -> None:
    """Write elements, each within the limit; outliers have their bits.

    Args:
        elements: The elements.
        codes: A row for each group: a code in each byte, or code i plus 16 times code i + 128.
        steps: The step of each group, float32.
        places: Indices of the outliers in memory order, int32.
        outliers: The outliers.
    """
    for block, coded, step in _split(elements, codes, steps):
        is_target = block.dtype is torch.float32 and len(block) % GROUP == 0
        rows = block.view(len(coded), GROUP) if is_target else step.new_empty(len(coded), GROUP)
        if coded.shape[1] == GROUP:
            rows.copy_(coded)
        else:
            both = coded.float()
            upper = torch.mul(both, 1 / 16, out=rows[:, GROUP // 2 :]).round_()
            torch.sub(both, upper, alpha=16, out=rows[:, : GROUP // 2])
        rows.mul_(step.unsqueeze(1))
        if not is_target:
            block.copy_(rows.view(-1)[: len(block)])
    if len(places):
        elements[places.long()] = outliers


def _split(elements: torch.Tensor, *of_groups: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return blocks of elements, each with the part of its groups of other tensors. All are views."""
    size = block_elements(elements.device)
    return zip(torch.split(elements, size), *(torch.split(each, size // GROUP) for each in of_groups), strict=True)


def _rows(block: torch.Tensor) -> torch.Tensor:
    """Return elements as float32, a row for each group. Zeros fill the last row of the tensor."""
    rows = block.float()
    if missing := -len(rows) % GROUP:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.view(len(rows) // GROUP, GROUP)


def _misses(
    found: torch.Tensor,
    rows: torch.Tensor,
    scaled: torch.Tensor,
    step: torch.Tensor,
    *,
    error_max: float,
    dtype: torch.dtype,
    most: float,
) -> torch.Tensor | None:
    """Return the indices of elements in a block that are decoded with too large an error, or to NaN.

    Args:
        found: The rows to check.
        rows: The elements.
        scaled: The codes.
        step: The step of each row, in a column.
        error_max: The largest error.
        dtype: Element type, to which decoding rounds.
        most: None is returned for more indices.
    """
    is_part = 2 * len(found) < len(rows)
    if is_part:
        rows, scaled, step = (each.index_select(0, found) for each in (rows, scaled, step))
    decoded = scaled * step
    if dtype is not torch.float32:
        decoded = decoded.to(dtype).float()
    # Not a comparison, which takes longer than all this. NaN is a miss, too.
    is_miss = decoded.sub_(rows).abs_().sub_(error_max).clamp_(min=0).bool()
    # Most are not, so eight are looked at together.
    words = is_miss.view(-1).view(torch.int64).nonzero().squeeze(1)
    if len(words) > most:
        return None
    word, byte = is_miss.view(-1, 8).index_select(0, words).nonzero(as_tuple=True)
    if len(word) > most:
        return None
    misses = words.index_select(0, word).mul_(8).add_(byte)
    return (found[misses // GROUP] * GROUP).add_(misses % GROUP) if is_part else misses


def _group_sizes(elements: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor, int]:
    """Return the largest absolute finite element of each group, rms, which groups are finite, and how many elements."""
    absmax = torch.empty(-(-len(elements) // GROUP), dtype=torch.float32, device=elements.device)
    norms = torch.empty_like(absmax)
    for block, largest, norm in _split(elements, absmax, norms):
        rows = _rows(block)
        torch.linalg.vector_norm(rows, dim=1, out=norm)
        torch.amax(rows.abs(), 1, out=largest)
    squares = norms.double().square_()
    is_finite, finite = torch.ones_like(absmax, dtype=torch.bool), len(elements)
    # False for NaN, too.
    is_exact = ((absmax > _SMALL) & (absmax < _LARGE)).logical_or_(absmax == 0)
    if not is_exact.all():
        for block, *parts, is_known in _split(elements, absmax, squares, is_finite, is_exact):
            found = is_known.logical_not().nonzero().squeeze(1)
            # A part at a time, since float64 takes twice the memory.
            for some in torch.split(found, len(is_known) // 8 + 1):
                exact = _rows(block).index_select(0, some).double()
                is_number = exact.isfinite()
                exact.masked_fill_(is_number.logical_not(), 0)
                values = exact.abs().amax(1).float(), exact.square().sum(1), is_number.all(1)
                for part, value in zip(parts, values, strict=True):
                    part[some] = value
                finite -= is_number.numel() - int(is_number.sum())
    return absmax, math.sqrt(float(squares.sum()) / max(1, finite)), is_finite, finite


def _steps(
    absmax: torch.Tensor, rms: float, limit: float, *, largest: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step of each group, and which groups may have outliers.

    A step is as small as the largest element allows, and no larger than the limit allows.

    Args:
        absmax: Largest absolute element of each group.
        rms, limit: Of the tensor.
        largest: The largest code.
        dtype: Element type. Decoding rounds to it, which a step of the limit alone does not allow for.
    """
    epsilon = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps
    # Rounding of an element of the size of rms. At most half the limit: a decoded element is rounded to an element
    # that is no farther away than the packed one.
    rounding = min(epsilon / 2 * rms, limit / 2)
    widest = 2 * _STEP_PART * (limit - rounding)
    smallest = torch.finfo(torch.float32).tiny
    steps = (absmax / largest).clamp_(smallest, max(widest, smallest))
    error = steps / 2
    if epsilon:
        spacing = torch.ldexp(torch.full_like(absmax, epsilon / 2), absmax.frexp().exponent)
        error += torch.minimum(spacing / 2, error).clamp_(min=torch.finfo(dtype).smallest_normal * epsilon / 2)
    is_sure = (absmax <= min(widest * largest, _NEAR_OVERFLOW)) & (error <= (_STEP_PART + 2e-4) * limit)
    return steps, is_sure.logical_not_() if limit > _TINY_LIMIT else torch.ones_like(is_sure)

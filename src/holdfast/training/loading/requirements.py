"""What must hold before a load changes a value: names, shapes, dtypes and memory of the state fit the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import get_args

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES, PAIRS, are_floats_and_integers
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Catalog, Misfit, Restoration, Wanted
from holdfast.base.types.plan import LoadPlan
from holdfast.core.engine.view_target import ViewTarget
from holdfast.errors import NAMES_SHOWN, InvalidError, first_three
from holdfast.training.coordination.job import Job
from holdfast.training.loading.messages import Unfit, UnfitKind
from holdfast.training.loading.proposals import NameAdvice
from holdfast.training.loading.statuses import GatheredStatuses

_UNFIT_SENT_MAX = 1000
"""Most names that a rank sends of those that cannot take what the checkpoint has."""


def unfit_names(
    restoration: Restoration,
    wanted: Sequence[Wanted],
    tensors: Mapping[str, TensorSpec],
    *,
    strict: bool,
    cast: bool,
) -> tuple[Unfit, ...]:
    """Return the names of this rank's state that refuse the load: all of them, so that one error can list them.

    Args:
        restoration: What the state wants.
        wanted: Its tensors, by stored name.
        tensors: What the checkpoint has.
        strict: Whether values and objects of another kind refuse it too.
        cast: Whether another dtype is converted; never floats to integers or back, since one side is quantised.
    """
    found = [Unfit("shape", misfit.text, misfit.fqn) for misfit in restoration.misfits if misfit.is_shape]
    unlike = [each for each in wanted if tensors[each.stored_fqn].dtype != each.dtype]
    # Several stored tensors may make one of the state.
    for tensor in {each.fqn: each for each in unlike}.values():
        saved = tensors[tensor.stored_fqn]
        # One element is a count: a float in one version of an optimizer, an integer in another.
        mixes_numbers = PAIRS in (saved.dtype, tensor.dtype) or (
            math.prod(saved.global_shape) > 1 and are_floats_and_integers(saved.dtype, tensor.dtype)
        )
        if mixes_numbers or not cast:
            text = f"{tensor.fqn} ({saved.dtype} saved, {tensor.dtype} wanted)"
            found.append(Unfit("number" if mixes_numbers else "dtype", text))
    found += [
        Unfit("kind", misfit.text, misfit.fqn)
        for misfit in restoration.misfits
        if strict and misfit.is_certain and not misfit.is_shape
    ]
    return tuple(found[:_UNFIT_SENT_MAX])


def warn_of_misfits(job: Job, misfits: Sequence[Misfit], url: str, *, strict: bool) -> None:
    """Log what does not fit the checkpoint and does not refuse the load."""
    for misfit in misfits:
        if not misfit.is_shape and not (strict and misfit.is_certain):
            job.warn_once(url, misfit.text)


def require_same_call(calls: Mapping[int, str], url: str) -> None:
    """Refuse ranks that pass different `layout`, `rename`, `partial` or `hyperparameters`: these fill different names.

    Args:
        calls: These arguments, by rank.
        url: The checkpoint's.
    Raises:
        InvalidError: Names two ranks.
    """
    first = min(calls)
    other = next((rank for rank, call in calls.items() if call != calls[first]), None)
    if other is not None:
        raise InvalidError(
            f"{url}: ranks pass different arguments: rank {first} {calls[first] or 'none'}, rank {other} "
            f"{calls[other] or 'none'}; expected the same rename, partial, hyperparameters and layout on every rank. "
            "Nothing was changed"
        )


def filled_regions(restoration: Restoration) -> dict[str, tuple[int, ...]]:
    """Return what a load fills: elements along each dimension, from index 0, by FQN."""
    whole = {tensor.fqn: tensor.global_shape for tensor in restoration.wanted}
    return whole | {tensor.fqn: tensor.filled for tensor in restoration.partly}


def require_begun_filled(
    begun: Mapping[str, tuple[int, ...]], restoration: Restoration, url: str, *, strict: bool
) -> None:
    """Refuse a step that lacks names, or parts of them, that a newer, damaged step had begun to fill.

    Raises:
        InvalidError: Names them.
    """
    # A strict load raises for every missing name anyway.
    unfilled = set() if strict else {*begun}.intersection(restoration.missing)
    for tensor in restoration.partly:
        if any(had > has for had, has in zip(begun.get(tensor.fqn, ()), tensor.filled, strict=False)):
            unfilled.add(tensor.fqn)
    if unfilled:
        raise InvalidError(
            f"{url}: lacks {len(unfilled)} names, or parts of them, that a newer, damaged step had begun to fill: "
            f"{first_three(sorted(unfilled))}. They would keep values of the damaged step; expected all values from "
            "one step. Make the state anew and load again: that load skips the damaged step"
        )


def filled_bytes(restoration: Restoration, wanted: Sequence[Wanted], plan: LoadPlan) -> int:
    """Return the bytes of this rank's memory that a plan fills: all that the state holds and the checkpoint has.

    The held bytes are measured on memory and the filled bytes on the plan, so a mistake in either shows.

    Raises:
        InvalidError: They differ.
    """
    itemsizes = [DTYPES[each.dtype].itemsize for each in wanted]
    # Of a layout with strides, a box has elements that are not taken. The type is compared, since `isinstance` with a
    # class of a protocol takes a microsecond, for each of 100,000 tensors.
    counts = {number: each.target.count for number, each in enumerate(wanted) if type(each.target) is ViewTarget}
    chunks = chain.from_iterable([read.chunks for run in plan.runs for read in (run, *run.bases)])
    parts = chain.from_iterable([chunk.parts for chunk in chunks])
    if counts:
        sized = [(part.wanted_number, counts.get(part.wanted_number, _all_of)(part.box)) for part in parts]
        filled = sum([count * itemsizes[number] for number, count in sized])
    else:
        filled = sum([part.box.numel * itemsizes[part.wanted_number] for part in parts])
    partly = {tensor.fqn for tensor in restoration.partly}
    held = sum(restoration.held.values())
    held -= sum(restoration.held.get(fqn, 0) for fqn in {*restoration.missing, *partly})
    for one in restoration.wanted if partly else ():
        held += sum(box.numel for box in one.boxes) * DTYPES[one.dtype].itemsize if one.fqn in partly else 0
    if held != filled:
        raise InvalidError(
            f"the state holds {held} bytes of tensors that the checkpoint has, and the plan fills {filled}; expected "
            "the same. Nothing was changed. This is a fault in Holdfast: report it"
        )
    return filled


def _all_of(box: Box) -> int:
    return box.numel


def require_fitting(
    gathered: GatheredStatuses,
    missing: Sequence[str],
    keys: Collection[str],
    catalog: Catalog,
    url: str,
    *,
    strict: bool,
) -> None:
    """Refuse a state that differs from the checkpoint, on every rank with the same error. It lists all differences.

    Args:
        gathered: What all ranks found.
        missing: Names that the checkpoint lacks, sorted.
        keys: Top-level keys of the state.
        catalog: The checkpoint, under the names of the state.
        url: The checkpoint's.
        strict: Whether missing and unexpected names count, and not only shapes, dtypes and a load that fills nothing.
    Raises:
        InvalidError: Something differs.
    """
    fills_nothing = bool(missing) and not gathered.any_fills
    if not (gathered.any_unfit or fills_nothing or (strict and (missing or not _lacks_none(gathered)))):
        return
    unfit, whole = gathered.unfit, gathered.is_whole
    told = {each.fqn for each in unfit}
    unfilled = [name for name in missing if name not in told]
    unexpected = sorted(name for name in gathered.unexpected if name not in told)
    advice = NameAdvice(unfilled, unexpected, keys, catalog)
    at_least = "" if whole and len(unfit) < _UNFIT_SENT_MAX else "at least "
    kinds = {kind: [each.text for each in unfit if each.kind == kind] for kind in get_args(UnfitKind)}
    listed = [
        f"{number} {what}: {first_three(names)}"
        for number, what, names in (
            (f"{at_least}{len(kinds['shape']):,}", "of another shape", kinds["shape"]),
            (f"{at_least}{len(kinds['dtype']):,}", "of another dtype", kinds["dtype"]),
            (f"{at_least}{len(kinds['number']):,}", "floats on one side and integers on the other", kinds["number"]),
            (f"{'' if whole else 'at least '}{len(unfilled):,}", "missing from the checkpoint", unfilled),
            (f"{len(unexpected):,}", "unexpected in the checkpoint", unexpected),
        )
        if names or (names is unfilled and not whole)
    ]
    subject = "nothing of the state is in the checkpoint" if fills_nothing else "the state and the checkpoint differ"
    lead = f"{subject}: {'; '.join(listed)}" if listed else "" if kinds["kind"] else subject
    if kinds["kind"]:
        more = f"; and {len(kinds['kind']) - NAMES_SHOWN:,} more" if len(kinds["kind"]) > NAMES_SHOWN else ""
        texts = "; ".join(kinds["kind"][:NAMES_SHOWN]) + more
        lead += f"{'; ' if lead else ''}{texts}, or strict=False to load what fits"
    strict_helps = strict and bool(unfilled or unexpected or not whole)
    says = _advice(kinds, unfilled, unexpected, catalog, advice, strict=strict_helps)
    raise InvalidError(f"{url}: {lead}. Nothing was changed{says}")


def _lacks_none(gathered: GatheredStatuses) -> bool:
    return gathered.is_whole and not gathered.unexpected


def _advice(
    kinds: Mapping[str, Sequence[str]],
    missing: Sequence[str],
    unexpected: Sequence[str],
    catalog: Catalog,
    names: NameAdvice,
    *,
    strict: bool,
) -> str:
    """Return what to do, as sentences that follow a message."""
    said = []
    if kinds["shape"]:
        said.append(
            "Expected the same shapes; partial= fills the overlap of a resized tensor, skip= leaves it as it is"
        )
    if kinds["dtype"]:
        said.append("Expected the same dtypes; pass cast=True to convert")
    if kinds["number"]:
        said.append(
            "Expected floats on both sides, or integers: one side is quantised, and its codes are no weights. Quantise "
            "the model as it was saved, load a checkpoint of the same form, or leave them out with skip="
        )
    if (top := names.tops()) is not None:
        said.append(f"At its top the checkpoint has {top}")
    if (rename := names.rename()) is not None:
        said.append(f"Expected the same names; pass {rename}")
    elif (missing or unexpected) and _are_gradients(missing, unexpected, catalog):
        said.append(
            "Expected the same names; it was saved with gradients: pass grads=True to load them, or skip='*.grad' to "
            "leave them out"
        )
    elif strict:
        if similar := names.similar():
            said.append(f"Under similar names it has {', '.join(similar)}")
        said.append("Expected the same names; pass strict=False to load what matches, or only=/skip= to choose")
    return "".join(f". {each}" for each in said)


def _are_gradients(missing: Sequence[str], unexpected: Sequence[str], catalog: Catalog) -> bool:
    stored = {*catalog.tensors, *catalog.aliases} if unexpected and not missing else set()
    return bool(stored) and all(name.endswith(".grad") and name.removesuffix(".grad") in stored for name in unexpected)

"""What must hold before a load changes a value: dtypes, memory and names of the state fit the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.coordination.job import Job
from holdfast.errors import NAMES_SHOWN, InvalidError, first_three
from holdfast.geometry.dtype import DTYPES
from holdfast.geometry.tensor import TensorSpec
from holdfast.ports.framework import Misfit, Restoration, Wanted
from holdfast.types.plan import LoadPlan


def require_saved_dtypes(wanted: Sequence[Wanted], tensors: Mapping[str, TensorSpec]) -> None:
    """Refuse targets whose dtype differs from the saved one.

    Raises:
        InvalidError: Names them.
    """
    differing = [
        f"{tensor.fqn} ({tensors[tensor.stored_fqn].dtype} saved, {tensor.dtype} wanted)"
        for tensor in wanted
        if tensors[tensor.stored_fqn].dtype != tensor.dtype
    ]
    if differing:
        raise InvalidError(
            f"{len(differing)} tensors have another dtype than was saved: {first_three(differing)}. "
            "Expected the same; pass cast=True to convert"
        )


def judge_misfits(job: Job, misfits: Sequence[Misfit], url: str, *, strict: bool) -> None:
    """Refuse or log what does not fit the checkpoint.

    Raises:
        InvalidError: The load is strict, and something is known not to fit.
    """
    certain = [misfit.text for misfit in misfits if misfit.is_certain]
    if strict and certain:
        more = f"; and {len(certain) - NAMES_SHOWN:,} more" if len(certain) > NAMES_SHOWN else ""
        texts = "; ".join(certain[:NAMES_SHOWN]) + more
        raise InvalidError(f"{url}: {texts}, or strict=False to load what fits. Nothing was changed")
    for misfit in misfits:
        job.warn_once(url, misfit.text)


def require_begun_filled(begun: Collection[str], restoration: Restoration, url: str) -> None:
    """Refuse a step that lacks names that a newer, damaged step had begun to fill.

    Raises:
        InvalidError: Names them.
    """
    unfilled = sorted({*begun} & {*restoration.missing})
    if unfilled:
        raise InvalidError(
            f"{url}: lacks {len(unfilled)} names that a newer, damaged step had begun to fill: "
            f"{first_three(unfilled)}. They would keep values of the damaged step; expected all values from one step. "
            "Make the state anew and load again: that load skips the damaged step"
        )


def filled_bytes(restoration: Restoration, plan: LoadPlan) -> int:
    """Return the bytes of this rank's memory that a plan fills: all that the state holds and the checkpoint has.

    The held bytes are measured on memory and the filled bytes on the plan, so a mistake in either shows.

    Raises:
        InvalidError: They differ.
    """
    itemsizes = [DTYPES[wanted.dtype].itemsize for wanted in restoration.wanted]
    parts = (part for run in plan.runs for chunk in run.chunks for part in chunk.parts)
    filled = sum(part.box.numel * itemsizes[part.wanted_number] for part in parts)
    missing = set(restoration.missing)
    held = sum(count for fqn, count in restoration.held.items() if fqn not in missing)
    if held != filled:
        raise InvalidError(
            f"the state holds {held} bytes of tensors that the checkpoint has, and the plan fills {filled}; expected "
            "the same. Nothing was changed. This is a fault in Holdfast: report it"
        )
    return filled


def require_complete(
    missing: Sequence[str], unexpected: Sequence[str], stored: Collection[str], url: str, *, is_whole: bool
) -> None:
    """Refuse a state whose names differ from the checkpoint's.

    Args:
        missing: Names that the checkpoint lacks.
        unexpected: Names that the state lacks.
        stored: Names of all stored tensors, aliases included.
        url: The checkpoint's.
        is_whole: Whether `missing` holds every name; otherwise those of some ranks were too many to send.
    Raises:
        InvalidError: A name is missing or unexpected.
    """
    differences = [
        f"{number} {kind}: {first_three(names)}"
        for kind, number, names in (
            ("missing from the checkpoint", f"{'' if is_whole else 'at least '}{len(missing)}", missing),
            ("unexpected in the checkpoint", f"{len(unexpected)}", unexpected),
        )
        if names or not (is_whole or names is unexpected)
    ]
    if not differences:
        return
    advice = "pass strict=False to load what matches, or only=/skip= to choose"
    gradients = [name for name in unexpected if name.endswith(".grad") and name.removesuffix(".grad") in stored]
    if unexpected and len(gradients) == len(unexpected) and not missing:
        advice = "it was saved with gradients: pass grads=True to load them, or skip='*.grad' to leave them out"
    raise InvalidError(
        f"{url}: the state and the checkpoint differ: {'; '.join(differences)}. Nothing was changed. "
        f"Expected the same names; {advice}"
    )

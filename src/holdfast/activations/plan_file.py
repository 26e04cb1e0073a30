"""Plan files: a plan as JSON, with a version and a digest. Neither torch nor scipy is needed to read one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import UnitColumn, UnitProfile
from holdfast.base.clock import SystemClock
from holdfast.base.types.inspected import inspected
from holdfast.errors import CorruptError, InvalidError, MissingError, UnavailableError

KIND = "activation plan"
VERSION = 1

FILE_BYTES_MAX = 64 << 20
"""Largest plan file that is read. The plan of 256 units of 100 ops in 10 classes has about 1 MB."""


class PlanEnvelope(msgspec.Struct):
    """The fields of a plan file."""

    holdfast: str
    """Kind of the file."""
    version: int
    """Version of the plan's fields."""
    digest: str
    """SHA-256 of the text of `plan`."""
    plan: msgspec.Raw
    """The plan, as text."""


def plan_digest(plan: SolvedPlan) -> str:
    """Return the digest of a plan, equal for equal plans."""
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()


def write_plan(plan: SolvedPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan file. A reader finds the old file, or the whole new one.

    Raises:
        UnavailableError: The file cannot be written.
    """
    text = msgspec.json.encode(plan)
    digest = hashlib.sha256(text).hexdigest()
    data = msgspec.json.encode(PlanEnvelope(holdfast=KIND, version=VERSION, digest=digest, plan=msgspec.Raw(text)))
    final = Path(path)
    hidden = final.with_name(f".{final.name}.{SystemClock().random_bytes(4).hex()}")
    try:
        try:
            with hidden.open("xb") as file:
                file.write(data + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(hidden, final)
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as error:
        raise UnavailableError(f"{final}: the plan cannot be written: {error}") from error


def read_plan(path: str | os.PathLike[str]) -> SolvedPlan:
    """Return the plan in a file.

    Raises:
        MissingError: The file does not exist.
        InvalidError: The file is no plan file, or a newer version of Holdfast wrote the file.
        CorruptError: The file is truncated or changed, or values contradict each other.
        UnavailableError: The file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise MissingError(f"{path}: no such plan file") from error
    except OSError as error:
        raise UnavailableError(f"{path}: the plan cannot be read: {error}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes; expected a plan file")
    return decode_plan(data, str(path))


def decode_plan(data: bytes, where: str) -> SolvedPlan:
    """Return the plan in the content of a file.

    Args:
        data: The content.
        where: The file, for messages.
    Raises:
        InvalidError: The content is no plan, or a newer version of Holdfast wrote the plan.
        CorruptError: The content is truncated or changed, or values contradict each other.
    """
    try:
        envelope = msgspec.json.decode(data, type=inspected(PlanEnvelope, msgspec.json.Decoder))
    except msgspec.ValidationError as error:
        raise InvalidError(f"{where}: not a plan file: {error}. Pass a file that plan.save() wrote") from error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"{where}: damaged or not a plan file: {error}. Use another copy, or fit again") from error
    if envelope.holdfast != KIND:
        raise InvalidError(f"{where}: kind is {envelope.holdfast[:40]!r}; expected {KIND!r}")
    if envelope.version != VERSION:
        remedy = "upgrade Holdfast, or fit again" if envelope.version > VERSION else "fit again"
        raise InvalidError(f"{where}: version is {envelope.version}; expected {VERSION}; {remedy}")
    text = bytes(envelope.plan)
    if (actual := hashlib.sha256(text).hexdigest()) != envelope.digest:
        raise CorruptError(f"{where}: the plan hashes to {actual}, not to its digest. Use another copy, or fit again")
    try:
        plan = msgspec.json.decode(text, type=inspected(SolvedPlan, msgspec.json.Decoder))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"{where}: {error}. Use another copy, or fit again") from error
    for problem in _contradictions(plan):
        raise CorruptError(f"{where}: {problem}. Use another copy, or fit again")
    return plan


def _contradictions(plan: SolvedPlan) -> Iterator[str]:
    """Yield where values of a plan contradict each other. Later checks rely on earlier ones."""
    profile, units = plan.profile, len(plan.profile.order)
    if not units or not len(profile.gradient_bytes) == len(plan.choice) == units:
        yield f"{units} units, {len(profile.gradient_bytes)} gradients, {len(plan.choice)} choices; expected one each"
    if len(plan.columns) != len(profile.classes):
        yield f"{len(profile.classes)} classes have {len(plan.columns)} lists of columns"
    for unit, ((name, kind), index) in enumerate(zip(profile.order, plan.choice, strict=True)):
        if not 0 <= kind < len(profile.classes) or name not in profile.classes[kind].units:
            yield f"unit {unit}: {name[:80]!r} is not in class {kind}"
        if not 0 <= index < len(plan.columns[kind]):
            yield f"unit {unit}: column is {index}; expected 0 to {len(plan.columns[kind]) - 1}"
    for kind, (each, columns) in enumerate(zip(profile.classes, plan.columns, strict=True)):
        yield from (f"class {kind}, op {number}: {problem}" for number, problem in _op_problems(each))
        for index, column in enumerate(columns):
            yield from (f"class {kind}, column {index}: {problem}" for problem in _column_problems(each, column))
    if plan.gradient_errors and (plan.gradient_errors[0][0] or len(plan.gradient_errors) < 2):
        yield "the errors of gradients do not begin with that of all gradients as one"


def _op_problems(unit: UnitProfile) -> Iterator[tuple[int, str]]:
    for number, op in enumerate(unit.ops):
        if op.number != number or (op.overload == "input") != (number == 0):
            yield number, f"is {op.overload[:80]!r} with number {op.number}; expected the input, then ops in order"
        earlier = (*op.reads, *([] if op.base is None else [op.base]))
        if not all(0 <= each < number and unit.ops[each].base is None for each in earlier):
            yield number, f"reads or shows ops {earlier[:3]}; expected earlier ops with storage"


def _column_problems(unit: UnitProfile, column: UnitColumn) -> Iterator[str]:
    store = dict(column.store)
    if not all(0 <= number < len(unit.ops) for number in (*store, *column.run, *column.draw)):
        yield f"names an op outside 0 to {len(unit.ops) - 1}"
    for number, action in column.store:
        if action not in ("keep", *(packing.action for packing in unit.ops[number].packings)):
            yield f"op {number} has no packing {action[:40]!r}"
    if len(store) != len(column.store) or column.spare_bytes > column.device_bytes:
        yield "stores an op twice, or spares more bytes than stored"
    if not unit.is_replayable and (column.run or column.draw):
        yield "runs ops of a unit that is never recomputed"

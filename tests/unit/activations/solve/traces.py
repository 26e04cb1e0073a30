"""Traces, profiles and columns for tests of the solver, and a check of a column by the rules alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from holdfast.activations.profile.unit_profile import ModelProfile, Packing, UnitColumn, UnitOp, UnitProfile

MIB = 1 << 20


def op(number: int, reads: Sequence[int] = (), **changed: object) -> UnitOp:
    """Return an op that makes 1 MiB in 1 ms, and whose output is not needed."""
    plain = UnitOp(
        number=number,
        overload="input" if number == 0 else f"op{number}",
        bytes=MIB,
        seconds=0.0 if number == 0 else 1e-3,
        reads=tuple(reads),
        base=None,
        is_needed=False,
        is_storable=True,
        is_random=False,
        has_effect=False,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def unit(ops: Sequence[UnitOp], *names: str, **changed: object) -> UnitProfile:
    plain = UnitProfile(
        fingerprint="trace",
        units=names or ("layers.0",),
        ops=tuple(ops),
        cast_bytes=0,
        recompute_workspace_bytes=sum(each.bytes for each in ops[1:]) + MIB,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def drawn_unit(rng: random.Random, ops_count: int, *, effects: bool = False) -> UnitProfile:
    """Return a unit of random ops: packings, random ops, views, in-place ops, unstorable outputs."""
    ops = [op(0, bytes=rng.randint(1, 8) * MIB, is_needed=rng.random() < 0.5)]
    for number in range(1, ops_count):
        bases = [each.number for each in ops if each.base is None]
        if rng.random() < 0.2 and len(bases) > 1:
            base = rng.choice(bases[1:])
            # Sometimes an in-place op that reads another storage.
            reads = tuple({base, *rng.sample(bases, rng.randint(0, 1))})
            seconds = rng.choice((0.0, 1e-3))
            ops.append(op(number, reads, base=base, bytes=0, seconds=seconds, is_random=rng.random() < 0.2))
            continue
        size = rng.randint(1, 8) * MIB
        packings = [
            Packing("bits", size // rng.randint(2, 8), rng.randint(1, 20) / 1e4),
            Packing("q8", size // 9, 1e-4, is_lossy=True),
        ]
        ops.append(
            op(
                number,
                sorted(rng.sample(bases, rng.randint(1, min(2, len(bases))))),
                bytes=size,
                seconds=rng.randint(1, 100) / 1e4,
                is_needed=rng.random() < 0.6,
                is_storable=rng.random() < 0.85,
                is_random=rng.random() < 0.3,
                has_effect=effects and rng.random() < 0.2,
                packings=tuple(packings[: rng.randint(0, 2)]),
            )
        )
    return unit(ops)


def rejects(profile: UnitProfile, store: dict[int, str], run: set[int], *, lossy: bool = False) -> str:
    """Return why a column is wrong, or an empty text.

    Written from the rules, without the solver's code.

    Args:
        profile: The class.
        store: Action of each stored base.
        run: Bases that run again.
        lossy: Whether packings that lose bits are allowed.
    """
    base_of = [each.number if each.base is None else each.base for each in profile.ops]
    group = {base: [each for each in profile.ops if base_of[each.number] == base] for base in set(base_of)}
    reads = {base: {read for each in members for read in each.reads} - {base} for base, members in group.items()}
    effects = {base for base, members in group.items() if any(each.has_effect for each in members)}
    fixed = effects | {base for base in group if reads[base] & effects}
    if run & (fixed | {0}) or (run and not profile.is_replayable):
        return "runs an op that must not run again"
    for base, action in store.items():
        if action != "keep" and base in fixed:
            return "packs the output of an op with an effect, or of a reader"
        if not profile.ops[base].is_storable and base != 0 and profile.is_replayable:
            return "stores an output that is not storable"
        if base in run:
            return "stores and runs"
        kinds = {each.action: each for each in profile.ops[base].packings}
        if action != "keep" and (action not in kinds or (kinds[action].is_lossy and (base == 0 or not lossy))):
            return "no such packing"
    for base, members in group.items():
        if any(each.is_needed for each in members) and base not in store and base not in run:
            return "backward needs an output that is neither stored nor run"
    if any(read not in store and read not in run for base in run for read in reads[base]):
        return "a replayed op reads a skipped output"
    packs = {base for base, action in store.items() if action != "keep"}
    if 0 not in store and (run or (profile.is_replayable and packs - {0})):
        return "the input is gone"
    if any(profile.ops[number].has_effect for number in draws(profile, run)):
        return "draws from an op with an effect"

    def reruns(base: int, below: tuple[int, ...]) -> bool:
        if base == 0 and not effects & {0}:
            return True
        return base not in fixed and all(
            read in below or store.get(read) == "keep" or reruns(read, (*below, base)) for read in reads[base]
        )

    if profile.is_replayable and not all(reruns(base, ()) for base in packs):
        return "an overflow could not be recomputed"
    return ""


def draws(profile: UnitProfile, run: set[int]) -> set[int]:
    """Return the random ops before a random op that runs again, without those that run themselves."""
    base_of = [each.number if each.base is None else each.base for each in profile.ops]
    random_ops = [each.number for each in profile.ops if each.is_random]
    late = max((number for number in random_ops if base_of[number] in run), default=-1)
    return {number for number in random_ops if number < late and base_of[number] not in run}


def column(device_mib: float, seconds: float, **changed: object) -> UnitColumn:
    """Return a column of which only bytes and seconds matter."""
    size = int(device_mib * MIB)
    plain = UnitColumn(
        store=(),
        run=(),
        draw=(),
        device_bytes=size,
        seconds=seconds,
        forward_workspace_bytes=size,
        backward_workspace_bytes=MIB,
        is_lossy=False,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def model(*classes: UnitProfile, units: int = 4, **changed: object) -> ModelProfile:
    """Return a model whose units take the classes in turn."""
    order = tuple((f"layers.{index}", index % len(classes)) for index in range(units))
    named = tuple(
        replace(each, units=tuple(name for name, of in order if of == kind)) for kind, each in enumerate(classes)
    )
    plain = ModelProfile(
        classes=named,
        order=order,
        gradient_bytes=tuple(MIB * (units - 1 - index) for index in range(units)),
        outside_bytes=2 * MIB,
        keep_all_peak_bytes=100 * MIB,
        step_seconds=0.05,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def large_model(units: int = 256) -> tuple[ModelProfile, tuple[tuple[UnitColumn, ...], ...], int]:
    """Return a model of many units of four classes, 32 columns for each class, and a budget."""
    rng = random.Random(0)
    kinds = [unit([op(0, bytes=4 * MIB), op(1, [0], is_needed=True)]) for _ in range(4)]
    gradients = tuple((units - at) * MIB // 10 for at in range(units))
    profile = model(*kinds, units=units, gradient_bytes=gradients, step_seconds=units * 0.15)
    columns = tuple(
        tuple(column(72 - 2.2 * at * rng.uniform(0.97, 1.03), (at / 31) ** 1.5 * 37e-3) for at in range(32))
        for _ in kinds
    )
    return profile, columns, units * 72 * MIB // 3

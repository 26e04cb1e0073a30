"""The profile of a job has the worst values of all ranks, and the packings that every rank offers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.activations.profile.unit_profile import ModelProfile, Packing
from holdfast.activations.profile.worst import worst_profile
from holdfast.errors import InvalidError
from tests.unit.activations.solve.traces import op, unit

BITS, PLANES, NARROW = Packing("bits", 10, 0.2), Packing("planes", 30, 0.1), Packing("narrow", 50, 0.1)


def profile(*packings: Packing, **changed: object) -> ModelProfile:
    seconds = 0.3 if len(packings) == 1 else 0.1
    ops = [op(0), op(1, [0], packings=packings, seconds=seconds)]
    plain = ModelProfile(
        classes=(unit(ops, "layers.0", "layers.1"),),
        order=(("layers.0", 0), ("layers.1", 0)),
        gradient_bytes=(20, 10),
        outside_bytes=5,
        keep_all_peak_bytes=100,
        step_seconds=1.0,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def test_bytes_and_seconds_are_the_most_of_all_ranks() -> None:
    other = profile(
        replace(BITS, device_bytes=40, seconds=0.1, spare_bytes=35), gradient_bytes=(10, 15), outside_bytes=7
    )
    last = profile(BITS, PLANES, NARROW, keep_all_peak_bytes=90, step_seconds=2.0)
    worst = worst_profile([profile(BITS, PLANES), other, last])
    assert (worst.gradient_bytes, worst.outside_bytes) == ((20, 15), 7)
    assert (worst.keep_all_peak_bytes, worst.step_seconds) == (100, 2.0)
    assert worst.classes[0].ops[1].packings == (Packing("bits", 40, 0.2, spare_bytes=30),)
    assert worst.classes[0].ops[1].seconds == 0.3
    assert worst_profile([last]) == last


def test_ranks_with_other_units_are_named() -> None:
    first = profile(BITS)
    shorter = replace(first, order=first.order[:1], gradient_bytes=(20,))
    with pytest.raises(InvalidError, match=r"^rank 2: unit layers\.0, op 0 input .*; expected unit layers\.1 of class"):
        worst_profile([first, first, shorter])
    (kind,) = first.classes
    renamed = replace(first, classes=(replace(kind, fingerprint="other"),))
    with pytest.raises(InvalidError, match=r"^rank 1: unit layers\.0, trace other; expected unit layers\.0, trace tra"):
        worst_profile([first, renamed])

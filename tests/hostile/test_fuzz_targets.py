"""The targets of `make fuzz`, on their seeds and on some bytes near them, without the fuzzer."""

from __future__ import annotations

import random

import pytest

from fuzz.seeds import seeds_of
from fuzz.targets import TARGETS

ROUNDS = 150


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_lies_near_them(name: str) -> None:
    chance = random.Random(name)
    seeds = seeds_of(name)
    assert seeds
    for seed in seeds:
        TARGETS[name](seed)
    for _ in range(ROUNDS):
        changed = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(changed) + 1)
            changed[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        TARGETS[name](bytes(changed))

"""Each refused type is named with what to pass instead, and that can be saved. No code of the value runs for it."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import random
import re
import types
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest

from holdfast.base.types.per_rank import PerRank, RngState
from holdfast.core.format.values.values import encode
from holdfast.errors import InvalidError


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: tuple[int, ...] = (1, 2)


class Named(NamedTuple):
    x: int
    y: int


class Custom:
    def __init__(self) -> None:
        self.a = 1


class Slotted:
    __slots__ = ()


class Converted:
    def to_dict(self) -> dict[str, object]:
        return {"hidden": 4}


class Dumped:
    def model_dump(self) -> dict[str, object]:
        return {"hidden": 4}


class Described:
    def state_dict(self) -> dict[str, object]:
        return {"a": 1}


class Stateful(Described):
    def load_state_dict(self, state: dict[str, object]) -> None: ...


class Text(str):
    pass


class Trap:
    """Runs code for every attribute."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)

    def __repr__(self) -> str:
        raise AssertionError


INSTEAD: list[tuple[object, str]] = [
    (argparse.Namespace(lr=0.1), "vars(value)"),
    (types.SimpleNamespace(lr=0.1), "vars(value)"),
    (Custom(), "vars(value)"),
    (Config(), "dataclasses.asdict(value)"),
    (Color.RED, "value.name"),
    (Level.LOW, "value.name"),
    (Word.RED, "value.name"),
    (Named(1, 2), "value._asdict()"),
    (Converted(), "value.to_dict()"),
    (Dumped(), "value.model_dump()"),
    (Described(), "value.state_dict()"),
    (np.random.default_rng(0), "value.bit_generator.state"),
    (np.random.PCG64(0), "value.state"),
    (np.random.RandomState(0), "value.get_state()"),
    (random.Random(0), "value.getstate()"),
    (collections.defaultdict(list), "dict(value)"),
    (types.MappingProxyType({"a": 1}), "dict(value)"),
    (collections.UserDict(a=1), "dict(value)"),
    (collections.deque([1, 2]), "list(value)"),
    (collections.UserList([1]), "list(value)"),
    ({1: 2}.keys(), "set(value)"),
    ({1: 2}.values(), "list(value)"),
    (Text("a"), "str(value)"),
    (range(2), "(value.start, value.stop, value.step)"),
    (slice(1), "(value.start, value.stop, value.step)"),
    (np.array([{}], dtype=object), "value.tolist()"),
    (np.ma.masked_array([1.0], mask=[False]), "numpy.asarray(value)"),
    (np.dtype("float32"), "str(value)"),
    (uuid.UUID(int=5), "str(value)"),
    (decimal.Decimal("1.1"), "str(value)"),
    (fractions.Fraction(1, 3), "str(value)"),
    (type("Stamp", (datetime.datetime,), {})(2026, 1, 2), "value.isoformat()"),
    (len, "value.__name__"),
    (np.add, "value.__name__"),
    (Custom, "value.__name__"),
    (re, "value.__name__"),
]


@pytest.mark.parametrize(("value", "instead"), INSTEAD, ids=lambda value: type(value).__name__)
def test_the_way_out_is_named_and_can_be_saved(value: Any, instead: str) -> None:
    with pytest.raises(InvalidError, match=r"^cfg\.x: .* cannot be saved") as caught:
        encode(value, "cfg.x")
    assert instead in str(caught.value) and str(caught.value).endswith("or leave it out with skip=['cfg.x']")
    assert encode(eval(instead, {"value": value, "dataclasses": dataclasses, "numpy": np}), "cfg.x") is not None


@pytest.mark.parametrize("value", [Stateful(), PerRank(1), RngState()], ids=lambda value: type(value).__name__)
def test_objects_belong_into_the_state(value: object) -> None:
    with pytest.raises(InvalidError, match="entry of a dict with str keys, of a list or of a tuple"):
        encode({0: value}, "x")


@pytest.mark.parametrize("value", [Slotted(), ..., object(), functools.partial(int, base=2), lambda: 1])
def test_other_types_are_told_what_there_is(value: object) -> None:
    with pytest.raises(
        InvalidError, match=r"^x: a value of type .* cannot be saved\. (Convert it to plain|It is code)"
    ):
        encode(value, "x")


def test_an_object_is_told_that_a_load_does_not_set_its_attributes() -> None:
    with pytest.raises(InvalidError, match=r"Give its class state_dict\(\) .* set the attributes after a load"):
        encode(Custom(), "buffer")


def test_no_code_of_the_value_runs() -> None:
    with pytest.raises(InvalidError, match=r"vars\(value\)"):
        encode(Trap(), "x")


# ------------------------------------------------------------------------------------------------- all at once


def test_every_refused_value_is_noted_and_the_walk_goes_on() -> None:
    refused: list[str] = []
    encode({"a": Custom(), "b": [1, {"c": Color.RED, "d": {(1, 2): ..., Slotted(): 1}}], "e": 5}, "cfg", refused)
    key = f"<{Slotted.__module__}.Slotted>"
    paths = ["cfg.a", "cfg.b[1].c", "cfg.b[1].d{(1, 2)}", f"cfg.b[1].d{{{key}}}"]
    assert [text.partition(":")[0] for text in refused] == paths


@pytest.mark.parametrize(
    ("value", "skip"),
    [
        ({"a": {"b": ...}}, "x.a.b"),
        ({"a": [0, {"b": ...}]}, "x.a"),
        ({"a": {1: {"b": ...}}}, "x.a"),
        (collections.OrderedDict(a=...), "x.a"),
        (collections.Counter(a=...), "x"),
        ({"$a": ...}, "x.$a"),
        ({"a": ({"b": ...},), "c": 1}, "x.a"),
        ({"a*": {"b[0]": ...}}, "x.a[*].b[[]0]"),
    ],
)
def test_the_name_to_skip_is_one_that_skip_takes(value: object, skip: str) -> None:
    with pytest.raises(InvalidError) as caught:
        encode(value, "x")
    assert str(caught.value).endswith(f"skip=[{skip!r}]")

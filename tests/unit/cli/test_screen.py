"""Lines for people: sizes, ranks, names that would steer a terminal, trees of values."""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict
from pathlib import PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import api
from holdfast.base.types.values import FrameworkValue, Group, Skipped, TensorRef
from holdfast.errors import printable, shown_bytes, shown_ranks


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**2, "1.0 MiB"),
        (5 * 1024**3 // 2, "2.5 GiB"),
        (1024**4, "1.0 TiB"),
        (5000 * 1024**5, "5,000.0 PiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert shown_bytes(count) == text


@given(st.integers(0, 1 << 60))
def test_sizes_never_show_four_digits_before_the_point_below_the_last_unit(count: int) -> None:
    number, unit = shown_bytes(count).split()
    assert unit in ("B", "PiB") or 1 <= float(number) < 1024


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 3, 7], "0-3, 7"), ([1, 3, 5], "1, 3, 5")]
)
def test_ranks(ranks: list[int], text: str) -> None:
    assert shown_ranks(ranks) == text


@given(st.text(st.characters()))
def test_what_is_printable_stays_and_the_rest_is_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
))  # fmt: skip
def test_any_value_is_shown_and_harmless(value: object) -> None:
    lines = api.value_lines({"key": value}, whole_names=True)
    assert lines
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("key:")


def test_a_tree_of_everything_that_is_kept() -> None:
    values = {
        "none": None,
        "huge": 1 << 20000,
        "counter": Counter("aab"),
        "ordered": OrderedDict(a=1),
        "pairs": [{"a": 1}, (2, [3])],
        "keys": {1: "x", (1, 2): "y", None: "z"},
        "empty": [[], (), {}, set()],
        "array": np.arange(3, dtype=np.int8),
        "long": np.zeros((4, 5)),
        "scalar": np.float32(1.5),
        "when": datetime.date(2024, 5, 6),
        "where": PurePosixPath("/a/b"),
        "dtype": FrameworkValue("torch.dtype", "bfloat16"),
        "small": FrameworkValue("torch.tensor", {"dtype": "uint8", "shape": (4,), "data": b"\x01\x02\x03\x04"}),
        "reference": [TensorRef("model.weight")],
        "skipped": Skipped("x.y"),
        "group": Group("dict", {"inner": 1}),
    }
    text = "\n".join(api.value_lines(values, whole_names=True))
    for line in (
        "none: None",
        "(20,001 bits)",
        "  a: 2",
        "  [1]:",
        "  (1, 2): 'y'",
        "array: int8 array [3]: 0, 1, 2",
        "long: float64 array [4, 5]: 0.0, 0.0,",
        "scalar: float32 1.5",
        "when: 2024-05-06",
        "where: /a/b",
        "dtype: torch.dtype: bfloat16",
        "small: torch.tensor: uint8 (4,) 4 bytes: 01020304",
        "tensor model.weight",
        "skipped: left out of the checkpoint",
        "  inner: 1",
    ):
        assert line in text, f"{line!r} not in\n{text}"


def test_children_that_are_alike_are_told_once_unless_something_of_them_is_cut() -> None:
    same = {f"p{number}": {"lr": 0.1, "eps": 1e-8} for number in range(5)}
    assert api.value_lines(same, whole_names=True) == ["p0, p1, p2, p3, p4:", "  lr: 0.1", "  eps: 1e-08"]
    assert api.value_lines(same, whole_names=False)[0] == "p0, p1 and 3 more alike:"
    same["p2"] = {"lr": 0.2, "eps": 1e-8}
    assert api.value_lines(same, whole_names=True)[::3] == ["p0, p1, p3, p4:", "p2:"]
    cut = {"a": {"text": "x" * 1000}, "b": {"text": "x" * 999 + "y"}}
    assert [line for line in api.value_lines(cut, whole_names=True) if not line.startswith(" ")] == ["a:", "b:"]
    plain = {"a": 1, "b": 1}
    assert api.value_lines(plain, whole_names=True) == ["a: 1", "b: 1"]

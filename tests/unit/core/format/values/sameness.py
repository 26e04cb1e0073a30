"""Exact sameness of values, and values that have gone wrong somewhere before, each by its name."""

import datetime
import math
import pathlib
import struct
from collections import Counter, OrderedDict
from datetime import timedelta, timezone

import numpy as np

from holdfast.base.types.values import FrameworkValue, Group, Skipped, TensorRef


def assert_same(found, expected, at="value"):
    """Compare type, content, order and every bit, recursively."""
    assert type(found) is type(expected), f"{at}: {type(found)} is not {type(expected)}"
    if isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype and found.dtype.str == expected.dtype.str, at
        if isinstance(expected, (np.str_, np.bytes_)):  # numpy drops their trailing NULs in comparisons and copies
            base = str if isinstance(expected, np.str_) else bytes
            assert base.__len__(found) == base.__len__(expected) and base.__eq__(found, expected), at
        else:
            assert found.shape == expected.shape and found.tobytes() == expected.tobytes(), at
    elif isinstance(expected, float):
        assert struct.pack("<d", found) == struct.pack("<d", expected), at
    elif isinstance(expected, complex):
        assert struct.pack("<2d", found.real, found.imag) == struct.pack("<2d", expected.real, expected.imag), at
    elif isinstance(expected, dict):
        assert len(found) == len(expected), at
        for (key, item), (expected_key, expected_item) in zip(found.items(), expected.items(), strict=True):
            assert_same(key, expected_key, f"{at} key")
            assert_same(item, expected_item, f"{at}{{{expected_key!r}}}")
        if hasattr(expected, "__dict__"):
            assert_same(vars(found), vars(expected), f"{at} attributes")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), at
        for index, (item, expected_item) in enumerate(zip(found, expected, strict=True)):
            assert_same(item, expected_item, f"{at}[{index}]")
    elif isinstance(expected, (set, frozenset)):
        assert sorted(map(_fingerprint, found)) == sorted(map(_fingerprint, expected)), at
    elif isinstance(expected, (datetime.datetime, datetime.time)):
        assert found == expected and found.fold == expected.fold, at
        assert repr(found.tzinfo) == repr(expected.tzinfo), at
    elif isinstance(expected, Group):
        assert found.kind == expected.kind
        assert_same(found.items, expected.items, at)
    elif isinstance(expected, FrameworkValue):
        assert_same((found.kind, found.value), (expected.kind, expected.value), at)
    else:
        assert found == expected, at


def _fingerprint(member):
    """A text that is equal only for members of the same type and bits."""
    if isinstance(member, tuple):
        return f"({','.join(map(_fingerprint, member))})"
    if isinstance(member, frozenset):
        return f"frozen({','.join(sorted(map(_fingerprint, member)))})"
    if isinstance(member, np.generic):
        return f"{type(member)}{member.dtype.str}{member.tobytes()!r}"
    if isinstance(member, float):
        return f"float {struct.pack('<d', member)!r}"
    if isinstance(member, complex):
        return f"complex {struct.pack('<2d', member.real, member.imag)!r}"
    return f"{type(member)} {member!r} {getattr(member, 'fold', None)}"


def ordered(content, metadata):
    """Return an OrderedDict that carries `_metadata` as the state of a module does, unless it is None."""
    result = OrderedDict(content)
    if metadata is not None:
        result._metadata = metadata
    return result


NAMED = {
    "none": None,
    "true": True,
    "one": 1,
    "text one": "1",
    "big": 10**5000,
    "negative big": -(10**5000),
    "minus zero": -0.0,
    "nan": math.nan,
    "negative nan": -math.nan,
    "inf": -math.inf,
    "smallest": 5e-324,
    "largest": 1.7976931348623157e308,
    "third": 1 / 3,
    "huge float": 1e22,
    "lone surrogate": "a\ud800",
    "pair of lone surrogates": "\ud83d\ude00",
    "the character they would become": "\U0001f600",
    "keys equal but for type": [{1: "a"}, {True: "a"}, {"1": "a"}, {1.0: "a"}, {None: "a"}],
    "dollar keys": {"$int": "0x1", "$": {"$tuple": []}},
    "keys of mixed type": {"a": 1, 2: [3], (1, ("b", None)): 4.0, None: 5, False: 6, 2.5: 7},
    "minus zero key": {-0.0: 1},
    "nan keys": {math.nan: 1, float("nan"): 2},
    "empty containers": [[], (), set(), frozenset(), {}, OrderedDict(), Counter(), b"", bytearray()],
    "order of keys": {"b": 1, "a": 2, "c": 3},
    "nested sets": {frozenset({frozenset(), frozenset({1})})},
    "counter": Counter({3: 2, 1: 0, "x": -1}),
    "float64, a subclass of float": np.float64(0.1),
    "float64 nan": np.float64("nan"),
    "float16": np.float16(0.1),
    "bool_": np.bool_(True),
    "uint64": np.uint64(2**64 - 1),
    "trailing NULs": [np.str_("a\0\0"), np.bytes_(b"a\0\0"), np.str_(""), np.bytes_(b"")],
    "complex64": np.complex64(1 + 2j),
    "NaT": [np.datetime64("NaT"), np.timedelta64("NaT", "s"), np.datetime64(3, "25s")],
    "void": np.void(b"abc"),
    "0-d": np.array(3.5),
    "empty array": np.zeros((0, 3, 2), np.float16),
    "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "strings": np.array(["a", "\U0001f600b"]),
    "offset with seconds": datetime.datetime(1, 1, 1, tzinfo=timezone(timedelta(seconds=-3661, microseconds=7))),
    "fold": [datetime.datetime(2024, 10, 27, 2, 30, fold=1), datetime.time(2, 30, fold=1)],
    "spans": [timedelta.min, timedelta.max, timedelta(microseconds=-1)],
    "undecodable path": pathlib.Path("/tmp/\udcff"),
    "windows path": pathlib.PureWindowsPath("c:/a/b"),
    "group": Group("optimizer", {"param_groups": {"w": {"lr": 0.1}}, "state": {"w": {"exp_avg": TensorRef("o.w")}}}),
    "framework": FrameworkValue("torch.tensor", {"dtype": "float32", "shape": (1,), "data": b"\0\0\0\0"}),
    "skipped": [Skipped("model.x"), TensorRef("model.y\ud800")],
}

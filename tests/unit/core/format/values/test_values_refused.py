"""What encode refuses: other types, containers within themselves, too deep, too large; each by its path."""

import collections
import datetime
import enum
import functools
import math
import re
import sys
import traceback
from collections import Counter, OrderedDict
from datetime import timedelta, timezone

import numpy as np
import pytest

from holdfast.base.types.values import FrameworkValue, Group, TensorRef
from holdfast.core.format.values import values
from holdfast.core.format.values.values import DEPTH_MAX, ENCODED_BYTES_MAX, decode, dumps, encode, loads
from holdfast.errors import CorruptError, InvalidError
from tests.unit.core.format.values.sameness import assert_same, ordered


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    __slots__ = ()


class Table(dict):
    pass


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


Point = collections.namedtuple("Point", "x y")


def attributed(kind):
    content = kind()
    content.note = 1
    return content


REFUSED = {
    "object": (object(), "object"),
    "no repr": (Unprintable(), "Unprintable"),
    "function": (assert_same, "function"),
    "lambda": (lambda: 0, "function"),
    "partial": (functools.partial(int), "functools.partial"),
    "class": (int, "type"),
    "module": (math, "module"),
    "enum": (Colour.RED, "Colour"),
    "int enum": (Level.LOW, "int(value)"),
    "str subclass": (Name("x"), "str(value)"),
    "dict subclass": (Table(), "dict(value)"),
    "defaultdict": (collections.defaultdict(int), "dict(value)"),
    "namedtuple": (Point(1, 2), "tuple(value)"),
    "deque": (collections.deque(), "collections.deque"),
    "range": (range(3), "range"),
    "generator": ((number for number in ()), "generator"),
    "memoryview": (memoryview(b"a"), "memoryview"),
    "object array": (np.array([object()]), "dtype('O')"),
    "structured array": (np.zeros(2, [("a", "i4")]), "numpy.ndarray"),
    "record scalar": (np.zeros(2, [("a", "i4")])[0], "numpy.void"),
    "long double": (np.longdouble(1), "numpy.longdouble"),
    "long double array": (np.zeros(2, np.longdouble), "numpy.ndarray"),
    "matrix": (np.ma.masked_array([1]), "numpy.asarray(value)"),
    "metadata": (np.zeros(1, np.dtype("i4", metadata={"a": 1})), "numpy.ndarray"),
    "invalid characters": (np.array([0x110000], "<u4").view("<U1"), "beyond Unicode"),
    "float64 subclass": (type("Loss", (np.float64,), {})(1.0), "Loss"),
    "offset below a second": (datetime.time(0, 0, tzinfo=timezone(timedelta(microseconds=1))), "whole seconds"),
    "named zone": (datetime.datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET")), "astimezone"),
    "zone": (datetime.time(1, tzinfo=type("Zone", (datetime.tzinfo,), {"utcoffset": lambda *_: None})()), "time"),
    "attributes on a counter": (attributed(Counter), "note"),
    "attributes on an ordered dict": (attributed(OrderedDict), "note"),
    "group of no kind": (Group("other", {}), "other"),
    "group keyed by int": (Group("dict", {1: 2}), "int"),
    "group of pairs": (Group("dict", [1]), "dict"),
    "reference without a name": (TensorRef(3), "int"),
    "framework value without a kind": (FrameworkValue(None, 1), "NoneType"),
    "int key of numpy": ({np.int64(1): 2}, "numpy.int64"),
    "bytes key": ({b"a": 2}, "bytes"),
    "enum key": ({Colour.RED: 1}, "Colour"),
    "key with no repr": ({Unprintable(): 1}, "Unprintable"),
    "tuple key with more": ({(1, frozenset()): 1}, "tuple"),
    "member with no repr": ({Unprintable()}, "Unprintable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused_with_path_type_and_advice(name):
    value, shown = REFUSED[name]
    with pytest.raises(InvalidError) as caught:
        encode({"a": [0, (value,)]}, "train.sampler")
    message = str(caught.value)
    assert message.startswith("train.sampler.a[1][0]"), message
    assert shown in message
    if "group" not in name and "kind" not in name:
        assert "skip=[" in message and "train.sampler" in message.split("skip=")[1]


def test_paths_in_errors_go_down():
    odd = object()
    for value, path in [
        (Group("optimizer", {"param_groups": {"w": {"lr": odd}}}), "optimizer.param_groups.w.lr"),
        ([0, 1, 2, odd], "optimizer[3]"),
        ({(1, 2): odd}, "optimizer{(1, 2)}"),
        ({3: {"a": odd}}, "optimizer{3}.a"),
        ({"$x": [odd]}, "optimizer.$x[0]"),
        ({"a\n": odd}, "optimizer{'a\\n'}"),
        ({(odd,)}, "optimizer{<tuple>}[0]"),
        (FrameworkValue("torch.size", [odd]), "optimizer[0]"),
        (ordered({}, {"": odd}), "optimizer._metadata."),
    ]:
        with pytest.raises(InvalidError, match="^" + re.escape(path) + ":"):
            encode(value, "optimizer")


def test_an_empty_path_starts_with_the_key():
    with pytest.raises(InvalidError, match=r"^model\.a:"):
        encode({"model": {"a": object()}}, "")


@pytest.mark.parametrize("make", ["list", "dict", "deep", "group", "ordered", "metadata", "array of pairs"])
def test_self_reference_is_refused_by_path(make):
    if make == "list":
        value = [1]
        value.append(value)
    elif make == "dict":
        value = {}
        value["me"] = value
    elif make == "deep":
        value = {"a": [({"b": []},)]}
        value["a"][0][0]["b"].append(value)
    elif make == "group":
        value = Group("dict", {})
        value.items["me"] = value
    elif make == "ordered":
        value = OrderedDict()
        value[(1,)] = [value]
    elif make == "metadata":
        value = OrderedDict()
        value._metadata = value
    else:
        value = {1: {}}
        value[1]["x"] = FrameworkValue("k", value)
    with pytest.raises(InvalidError, match=r"^x[.\[{].*contains itself"):
        encode(value, "x")


def nested(levels, wrap):
    value = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: {"a": inner},
        lambda inner: {1: inner},
        lambda inner: OrderedDict(a=inner),
        lambda inner: ordered({}, inner),
        lambda inner: frozenset({inner}),
        lambda inner: Group("dict", {"$a": inner}),
        lambda inner: FrameworkValue("k", inner),
    ],
)
def test_what_encode_accepts_is_read_and_deeper_is_refused(wrap):
    levels = 1
    while levels <= DEPTH_MAX + 2:
        try:
            document = encode(nested(levels, wrap), "x")
        except InvalidError as error:
            assert "nested deeper" in str(error)
            break
        assert_same(
            decode(loads(dumps({"envelope": [{"value": document}]}))["envelope"][0]["value"], "x"), nested(levels, wrap)
        )
        levels += 1
    assert DEPTH_MAX // 5 < levels <= DEPTH_MAX + 2


def test_very_deep_values_are_refused_not_a_recursion_error():
    with pytest.raises(InvalidError, match="nested deeper"):
        encode(nested(100_000, lambda inner: [inner]), "x")


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (InvalidError, lambda: encode(nested(90, lambda inner: (inner,)), "x")),
        (CorruptError, lambda: decode(nested(90, lambda inner: {"$tuple": [inner]}), "x")),
    ],
)
def test_a_spent_stack_is_a_typed_error(kind, call):
    call()
    depth = sum(1 for _ in traceback.walk_stack(None))

    def descend(frames):
        if frames:
            descend(frames - 1)
        else:
            with pytest.raises(kind, match="stack"):
                call()

    descend(sys.getrecursionlimit() - depth - 80)


@pytest.mark.parametrize(
    "make",
    [bytes, bytearray, lambda size: np.zeros(size, np.uint8), lambda size: "a" * size, lambda size: 1 << (8 * size)],
)
def test_large_content_is_refused_and_a_tensor_suggested(make):
    with pytest.raises(InvalidError, match=r"^buffer\.data: .*tensor"):
        encode({"data": make(ENCODED_BYTES_MAX + 8)}, "buffer")


def test_many_small_contents_count_together():
    part = bytes(ENCODED_BYTES_MAX // 4)
    encode([part] * 3, "x")
    with pytest.raises(InvalidError, match=r"^x\[3\]: .*tensor"):
        encode([part] * 5, "x")


def test_containers_shared_ever_again_end_in_an_error(monkeypatch):
    # A smaller limit is reached sooner, in the same way.
    monkeypatch.setattr(values, "ENCODED_BYTES_MAX", 1 << 20)
    value = [0]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(InvalidError, match="tensor"):
        encode(value, "x")

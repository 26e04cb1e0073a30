"""Values: every type of the closed set comes back as it was, everything else is refused by name."""

import datetime
import math
import pathlib
import random
import struct
from collections import Counter, OrderedDict
from datetime import UTC, timedelta, timezone

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from holdfast.base.types.values import FrameworkValue, Group, Skipped, TensorRef
from holdfast.core.format.values.values import decode, dumps, encode, loads
from tests.unit.core.format.values.sameness import NAMED, assert_same, ordered


def round_trip(value):
    return decode(loads(dumps(encode(value, "x"))), "x")


# ------------------------------------------------------------------------------------------ strategies

any_bits_float = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
floats = st.floats() | any_bits_float
integers = st.integers() | st.integers(-(2**80), 2**80) | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
lone_surrogates = st.text(st.characters() | st.characters(categories=["Cs"]))
texts = (
    st.text() | lone_surrogates | st.sampled_from(["", "$", "$int", "\0", "\ud83d\ude00", "\u2028", "a.b", "\ufeff"])
)
offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23))
zones = st.none() | offsets.filter(lambda each: abs(each) >= timedelta(seconds=1)).map(timezone) | st.just(UTC)
moments = st.datetimes(timezones=zones) | st.datetimes(timezones=zones).map(lambda moment: moment.replace(fold=1))
times = st.times(timezones=zones) | st.times().map(lambda time: time.replace(fold=1))
path_texts = st.text(st.characters(blacklist_categories=[]), max_size=8) | st.sampled_from(
    ["", "/", "..", "a/b", "//x"]
)
paths = path_texts.map(pathlib.Path) | path_texts.map(pathlib.PurePosixPath)
dtypes = (
    npst.boolean_dtypes()
    | npst.integer_dtypes()
    | npst.unsigned_integer_dtypes()
    | npst.floating_dtypes(sizes=(16, 32, 64))
    | npst.complex_number_dtypes(sizes=(64, 128))
    | npst.datetime64_dtypes()
    | npst.timedelta64_dtypes()
    | npst.byte_string_dtypes(min_len=1)
    | npst.unicode_string_dtypes(min_len=1)
    | st.sampled_from(["V3", "<M8", "<m8", "<M8[25s]", ">m8[7ms]"]).map(np.dtype)
)


@st.composite
def arrays(draw):
    dtype = draw(dtypes)
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    elements_bytes = math.prod(shape) * dtype.itemsize
    if dtype.kind in "Ub":
        array = draw(npst.arrays(dtype, shape))
    else:  # any bits at all, so that NaN payloads and NaT are among them
        array = np.frombuffer(draw(st.binary(min_size=elements_bytes, max_size=elements_bytes)), dtype)
        array = np.ndarray(shape, dtype) if array.size == 0 else array.reshape(shape)
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    return array


scalars_of_numpy = (
    arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
    | texts.map(np.str_)
    | st.binary().map(np.bytes_)
    | floats.map(np.float64)
    | st.floats(width=32).map(np.float32)
    | st.integers(0, 2**64 - 1).map(np.uint64)
    | st.booleans().map(np.bool_)
)


def has_hash(scalar):
    try:
        hash(scalar)
    except (TypeError, ValueError):  # void scalars, and spans without a unit
        return False
    return True


hashables = st.recursive(
    st.none()
    | st.booleans()
    | integers
    | floats
    | st.complex_numbers()
    | texts
    | st.binary()
    | moments
    | times
    | st.dates()
    | st.timedeltas()
    | paths
    | scalars_of_numpy.filter(has_hash)
    | texts.map(TensorRef),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
keys = st.recursive(
    st.none() | st.booleans() | integers | floats | texts,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
leaves = (
    hashables
    | st.binary().map(bytearray)
    | arrays()
    | scalars_of_numpy
    | texts.map(Skipped)
    | st.builds(pathlib.PureWindowsPath, st.sampled_from(["c:/a", "a\\b", "//host/share/x", "c:", "."]))
)


values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(texts, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(ordered, st.dictionaries(keys, inner, max_size=3), st.none() | inner)
        | st.dictionaries(keys, st.integers(-5, 5), max_size=4).map(Counter)
        | st.builds(
            Group,
            st.sampled_from(["dict", "module", "optimizer", "stateful"]),
            st.dictionaries(texts, inner, max_size=3),
        )
        | st.builds(FrameworkValue, texts, inner)
    ),
    max_leaves=12,
)


# ------------------------------------------------------------------------------------------ round trips


@settings(deadline=None, max_examples=400)
@given(values)
def test_every_value_of_the_closed_set_comes_back_as_it_was(value):
    document = encode(value, "x")
    assert_same(decode(document, "x"), value)
    assert_same(decode(loads(dumps(document)), "x"), value)
    assert_same(decode(loads(dumps(document, indent=2)), "x"), value)


@settings(deadline=None)
@given(arrays())
def test_arrays_come_back_writable_in_c_order_and_their_own(array):
    found = round_trip(array)
    assert_same(found, array)
    assert found.flags.writeable and found.flags.c_contiguous and found.flags.owndata


@settings(deadline=None)
@given(floats)
def test_floats_keep_every_bit(number):
    assert struct.pack("<d", round_trip(number)) == struct.pack("<d", number)


@settings(deadline=None)
@given(values)
def test_the_text_holds_only_what_every_json_reader_keeps(value):
    document = loads(dumps(encode(value, "x")))
    pending = [document]
    while pending:
        part = pending.pop()
        if type(part) is dict:
            tags = [key for key in part if key.startswith("$")]
            assert not tags or len(part) == 1
            pending.extend(part.values())
        elif type(part) is list:
            pending.extend(part)
        else:
            assert part is None or type(part) in (bool, int, float, str)


@pytest.mark.parametrize("name", NAMED)
def test_named_values_come_back_as_they_were(name):
    value = NAMED[name]
    assert_same(round_trip(value), value)
    assert_same(round_trip({"inner": [value], 7: (value,)}), {"inner": [value], 7: (value,)})


def test_module_versions_on_anordered_dict_are_kept():
    state = OrderedDict(weight=TensorRef("m.weight"))
    state._metadata = OrderedDict({"": {"version": 2}})
    found = round_trip(state)
    assert_same(found, state)
    assert found._metadata[""] == {"version": 2}


def test_random_state_of_python_and_numpy_round_trips():
    state = random.Random(7).getstate()
    assert_same(round_trip(state), state)
    for bits in (np.random.MT19937(7), np.random.PCG64(7), np.random.Philox(7), np.random.SFC64(7)):
        assert_same(round_trip(bits.state), bits.state)
    legacy = np.random.RandomState(7).get_state()
    assert_same(round_trip(legacy), legacy)


def test_the_document_shares_nothing_with_the_value():
    value = {"list": [1], "array": np.zeros(2), "bytes": bytearray(b"a")}
    document = encode(value, "x")
    value["list"].append(2)
    value["array"][0] = 1
    value["bytes"][0] = 0
    assert_same(decode(document, "x"), {"list": [1], "array": np.zeros(2), "bytes": bytearray(b"a")})


def test_a_container_held_twice_is_stored_twice():
    shared = [1]
    found = round_trip([shared, shared])
    assert found == [[1], [1]]
    assert found[0] is not found[1]


def test_equal_sets_give_equal_bytes_whatever_their_order():
    forward, backward = set(), set()
    for number in range(0, 1 << 14, 64):  # these collide in a small table, so that the order of adding shows
        forward.add(number)
    for number in reversed(range(0, 1 << 14, 64)):
        backward.add(number)
    assert dumps(encode(forward, "x")) == dumps(encode(backward, "x"))
    assert encode({"b", "a"}, "x") == {"$set": ["a", "b"]}


def test_plain_values_are_plain_json():
    value = {"lr": 0.1, "steps": [1, 2], "name": "adam", "none": None, "flag": True, "nested": {"a": {}}}
    assert encode(value, "x") == value
    assert dumps(value) == b'{"lr":0.1,"steps":[1,2],"name":"adam","none":null,"flag":true,"nested":{"a":{}}}'


def test_the_encoding_of_each_tag_is_the_documented_one():
    examples = [
        (2**64, {"$int": "0x10000000000000000"}),
        (math.inf, {"$float": "inf"}),
        ("\ud800", {"$str": "7aCA"}),
        (b"hi", {"$bytes": "aGk="}),
        (bytearray(b"hi"), {"$bytearray": "aGk="}),
        (1 + math.nan * 1j, {"$complex": [{"$float": "nan"}, {"$float": "nan"}]}),
        ((1, "a"), {"$tuple": [1, "a"]}),
        (frozenset({1}), {"$frozenset": [1]}),
        ({1: 2}, {"$dict": [[1, 2]]}),
        (OrderedDict(a=1), {"$ordered_dict": [["a", 1]]}),
        (Counter("a"), {"$counter": [["a", 1]]}),
        (np.zeros((2,), "<i2"), {"$ndarray": {"dtype": "<i2", "shape": [2], "data": "AAAAAA=="}}),
        (np.float32(0.5), {"$scalar": {"dtype": "<f4", "value": 0.5}}),
        (np.complex64(0), {"$scalar": {"dtype": "<c8", "data": "AAAAAAAAAAA="}}),
        (np.str_("a"), {"$scalar": {"dtype": "U", "value": "a"}}),
        (np.bytes_(b"hi"), {"$scalar": {"dtype": "S", "data": "aGk="}}),
        (datetime.datetime(2024, 1, 2, tzinfo=UTC), {"$datetime": "2024-01-02T00:00:00+00:00"}),
        (datetime.datetime(2024, 1, 2, fold=1), {"$datetime": ["2024-01-02T00:00:00", 1]}),
        (datetime.date(2024, 1, 2), {"$date": "2024-01-02"}),
        (datetime.time(1, 2), {"$time": "01:02:00"}),
        (timedelta(days=1, microseconds=2), {"$timedelta": [1, 0, 2]}),
        (pathlib.Path("a/b"), {"$path": "a/b"}),
        (pathlib.PurePosixPath("a"), {"$pure_posix_path": "a"}),
        (pathlib.PureWindowsPath("a/b"), {"$pure_windows_path": "a\\b"}),
        (TensorRef("a.b"), {"$tensor": "a.b"}),
        (Skipped("a.b"), {"$skipped": "a.b"}),
        (Group("dict", {"a": 1}), {"$group": {"kind": "dict", "items": {"a": 1}}}),
        (FrameworkValue("torch.size", (1,)), {"$framework": {"kind": "torch.size", "value": {"$tuple": [1]}}}),
    ]
    for value, document in examples:
        assert encode(value, "x") == document
        assert_same(decode(document, "x"), value)

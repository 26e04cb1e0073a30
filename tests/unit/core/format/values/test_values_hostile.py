"""Documents and texts that no value encodes to: each is a CorruptError naming its path, and none takes memory."""

import base64
import copy
import json
import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.format.values.json_text import TEXT_DEPTH_MAX
from holdfast.core.format.values.values import DEPTH_MAX, decode, dumps, encode, loads
from holdfast.errors import CorruptError, InvalidError
from tests.unit.core.format.values.sameness import NAMED


def array(dtype="<f4", shape=(2,), data=b"\0" * 8, **more):
    text = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    return {"$ndarray": {"dtype": dtype, "shape": list(shape), "data": text, **more}}


def scalar(**content):
    return {"$scalar": content}


def deep(levels, wrap):
    document = 1
    for _ in range(levels):
        document = wrap(document)
    return document


def made(document):
    """Return a document; one of many levels is made now, or every process that shares the suite would keep it."""
    return document() if callable(document) else document


HOSTILE = {
    "unknown tag": {"$pickle": "gASVAAAA"},
    "empty tag": {"$": 1},
    "tag of a later version": {"$tuple2": []},
    "two tags": {"$int": "0x10000000000000000", "$str": "7aCA"},
    "tag beside a name": {"$tuple": [], "a": 1},
    "name before a tag": {"a": 1, "$tuple": []},
    "key that is no text": {1: 2},
    "key with a surrogate": {"\ud800": 1},
    "text with a surrogate": "\ud800",
    "float that is not finite": float("nan"),
    "integer beyond 64 bits": 1 << 64,
    "tuple": (1,),
    "object": object(),
    "bytes": b"a",
    "$int of a number": {"$int": 5},
    "$int in decimal": {"$int": "99999999999999999999"},
    "$int that is small": {"$int": "0x5"},
    "$int with leading zero": {"$int": "0x010000000000000000"},
    "$int with underscore": {"$int": "0x1_0000_0000_0000_0000"},
    "$int of other digits": {"$int": "0x١0000000000000000"},
    "$int with newline": {"$int": "0x10000000000000000\n"},
    "$float of a number": {"$float": 1.5},
    "$float finite": {"$float": "1.5"},
    "$float of finite bits": {"$float": "nan:3ff0000000000000"},
    "$float short": {"$float": "nan:7ff8"},
    "$float list": {"$float": []},
    "$str without surrogate": {"$str": "YQ=="},
    "$str not UTF-8": {"$str": "/w=="},
    "$str null": {"$str": None},
    "$bytes not base64": {"$bytes": "a?b="},
    "$bytes without padding": {"$bytes": "YQ"},
    "$bytes with too much padding": {"$bytes": "YWI=="},
    "$bytes with a line break": {"$bytes": "YWJj\nYWJj"},
    "$bytes not ASCII": {"$bytes": "é==="},
    "$bytes of a list": {"$bytes": [1, 2]},
    "$bytearray of a number": {"$bytearray": 3},
    "$complex of one": {"$complex": [1.0]},
    "$complex of integers": {"$complex": [1, 2]},
    "$complex of text": {"$complex": "1+2j"},
    "$complex of tags": {"$complex": [1.0, {"$int": "0x10000000000000000"}]},
    "$tuple of an object": {"$tuple": {}},
    "$tuple of text": {"$tuple": "abc"},
    "$set of lists": {"$set": [[1]]},
    "$set of dicts": {"$set": [{}]},
    "$set of arrays": {"$set": [array()]},
    "$set with a repeat": {"$set": [1, 2, 1]},
    "$set with 1 and true": {"$set": [1, True]},
    "$set with 1 and 1.0": {"$set": [1, 1.0]},
    "$set of text": {"$set": "ab"},
    "$frozenset with a repeat": {"$frozenset": [{"$tuple": []}, {"$tuple": []}]},
    "$dict of an object": {"$dict": {"a": 1}},
    "$dict of triples": {"$dict": [[1, 2, 3]]},
    "$dict of scalars": {"$dict": [1]},
    "$dict with a list as key": {"$dict": [[[1], 2]]},
    "$dict with bytes as key": {"$dict": [[{"$bytes": "YQ=="}, 2]]},
    "$dict with a list in a key": {"$dict": [[{"$tuple": [[1]]}, 2]]},
    "$dict with a repeated key": {"$dict": [[1, 2], [1, 3]]},
    "$dict with keys 0 and false": {"$dict": [[0, 2], [False, 3]]},
    "$counter of an object": {"$counter": {}},
    "$ordered_dict with unknown field": {"$ordered_dict": {"items": [], "update": 1}},
    "$ordered_dict without metadata": {"$ordered_dict": {"items": []}},
    "$ndarray of a list": {"$ndarray": []},
    "$ndarray with more fields": array(order="F"),
    "$ndarray without data": {"$ndarray": {"dtype": "<f4", "shape": [2]}},
    "$ndarray of objects": array(dtype="|O"),
    "$ndarray of objects, sized": array(dtype="|O8", shape=(1,)),
    "$ndarray of a structure": array(dtype="f4,f4", shape=(1,)),
    "$ndarray of a list dtype": array(dtype=[["a", "<f4"]]),
    "$ndarray of a dtype by name": array(dtype="float32"),
    "$ndarray of native order": array(dtype="=f4"),
    "$ndarray of a long double": array(dtype="<f16", shape=(1,), data=b"\0" * 16),
    "$ndarray of a repeated dtype": array(dtype="2<f4", shape=(1,)),
    "$ndarray of an odd size": array(dtype="<f3"),
    "$ndarray of a padded size": array(dtype="<f04"),
    "$ndarray of no order": array(dtype="|f4"),
    "$ndarray of an order it has not": array(dtype="<b1", shape=(8,)),
    "$ndarray of a huge item": array(dtype="<U9999999999", shape=(1,)),
    "$ndarray of empty items": array(dtype="<U0", shape=(1 << 40,), data=b""),
    "$ndarray of an unknown unit": array(dtype="<M8[fortnight]", shape=(1,)),
    "$ndarray of no unit": array(dtype="<M8[0s]", shape=(1,)),
    "$ndarray of a huge unit": array(dtype="<M8[9999999999s]", shape=(1,)),
    "$ndarray too short": array(shape=(3,)),
    "$ndarray too long": array(shape=(1,)),
    "$ndarray one byte short": array(data=b"\0" * 7),
    "$ndarray one byte long": array(data=b"\0" * 9),
    "$ndarray of negative shape": array(shape=(-2, -1)),
    "$ndarray of a shape of floats": array(shape=(2.0,)),
    "$ndarray of a shape of bools": array(shape=(True, 2)),
    "$ndarray of a shape in text": {"$ndarray": {"dtype": "<f4", "shape": "2", "data": "AAAAAAAAAAA="}},
    "$ndarray of a huge shape": array(shape=(1 << 62, 1 << 62)),
    "$ndarray whose product wraps": array(shape=(1 << 32, 1 << 32), data=b""),
    "$ndarray of nothing, huge": array(shape=(0, 1 << 62, 1 << 62), data=b""),
    "$ndarray of too many dimensions": array(shape=(1,) * 65, data=b"\0" * 4),
    "$ndarray of not quite too many dimensions": array(shape=(1,) * 10_000, data=b"\0" * 4),
    "$ndarray of bad base64": array(data="AAAA????AAA="),
    "$ndarray of numbers": array(data=[0, 0]),
    "$ndarray beyond Unicode": array(dtype="<U2", shape=(1,), data=b"\0\0\x11\0" * 2),
    "$scalar of a list": {"$scalar": [1]},
    "$scalar without a value": scalar(dtype="<f8"),
    "$scalar of both": scalar(dtype="<f8", value=1.0, data="AAAAAAAAAAA="),
    "$scalar of another type": scalar(dtype="<f8", value=1),
    "$scalar of a bool": scalar(dtype="<i8", value=True),
    "$scalar out of range": scalar(dtype="|u1", value=256),
    "$scalar negative": scalar(dtype="<u4", value=-1),
    "$scalar not of its precision": scalar(dtype="<f4", value=0.1),
    "$scalar beyond its range": scalar(dtype="<f2", value=1e300),
    "$scalar complex as a value": scalar(dtype="<c8", value=1.0),
    "$scalar of objects": scalar(dtype="|O", data="AAAAAAAAAAA="),
    "$scalar of short data": scalar(dtype="<f8", data="AAAA"),
    "$scalar of sized text": scalar(dtype="<U1", data="YQAAAA=="),
    "$scalar text of a number": scalar(dtype="U", value=1),
    "$scalar bytes of a number": scalar(dtype="S", data=1),
    "$scalar text as data": scalar(dtype="U", data="YQ=="),
    "$datetime of a number": {"$datetime": 0},
    "$datetime of a week": {"$datetime": "2024-W01-1"},
    "$datetime of a bad month": {"$datetime": "2024-13-01T00:00:00"},
    "$datetime with Z": {"$datetime": "2024-01-01T00:00:00Z"},
    "$datetime of a huge offset": {"$datetime": "2024-01-01T00:00:00+99:00"},
    "$datetime with fold 2": {"$datetime": ["2024-01-01T00:00:00", 2]},
    "$datetime with fold true": {"$datetime": ["2024-01-01T00:00:00", True]},
    "$date with a time": {"$date": "2024-01-01T00:00:00"},
    "$time of T": {"$time": "T01:02"},
    "$timedelta of floats": {"$timedelta": [1.0, 0, 0]},
    "$timedelta not normalised": {"$timedelta": [0, 86400, 0]},
    "$timedelta too large": {"$timedelta": [1 << 62, 0, 0]},
    "$timedelta of two": {"$timedelta": [1, 2]},
    "$path of a list": {"$path": ["a"]},
    "$path of untagged surrogates": {"$path": "\udcff"},
    "$pure_windows_path null": {"$pure_windows_path": None},
    "$tensor of a number": {"$tensor": 1},
    "$tensor of an object": {"$tensor": {"fqn": "a"}},
    "$skipped null": {"$skipped": None},
    "$group of a list": {"$group": []},
    "$group of an unknown kind": {"$group": {"kind": "pickle", "items": {}}},
    "$group of a kind that is no text": {"$group": {"kind": ["dict"], "items": {}}},
    "$group without items": {"$group": {"kind": "dict"}},
    "$group of a list of items": {"$group": {"kind": "dict", "items": []}},
    "$group with keys that are no text": {"$group": {"kind": "dict", "items": {"$dict": [[1, 2]]}}},
    "$framework of a list": {"$framework": ["torch.size", 1]},
    "$framework of a kind that is no text": {"$framework": {"kind": 1, "value": 1}},
    "$framework with code": {"$framework": {"kind": "torch.size", "value": 1, "reduce": "os.system"}},
    "too many lists": partial(deep, DEPTH_MAX + 2, lambda inner: [inner]),
    "too many objects": partial(deep, DEPTH_MAX + 2, lambda inner: {"a": inner}),
    "too many tuples": partial(deep, DEPTH_MAX, lambda inner: {"$tuple": [inner]}),
    "a hundred thousand lists": partial(deep, 100_000, lambda inner: [inner]),
    "a hundred thousand groups": partial(
        deep, 100_000, lambda inner: {"$group": {"kind": "dict", "items": {"a": inner}}}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_refused_by_path(name):
    document = made(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError) as caught:
            decode({"a": [0, document]}, "step-7.values")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("step-7.values.a[1]"), caught.value
    assert len(str(caught.value)) < 4000
    assert peak_bytes < 1 << 20


def test_messages_say_where_inside():
    for document, path in [
        ({"$dict": [[1, {"$no": 1}]]}, r"x\{1\}:"),
        ({"$group": {"kind": "dict", "items": {"w": {"lr": {"$no": 1}}}}}, r"x\.w\.lr:"),
        ({"$tuple": [0, {"$bytes": 1}]}, r"x\[1\]:"),
        ({"$framework": {"kind": "k", "value": [{"$no": 1}]}}, r"x\[0\]:"),
        ({"$ordered_dict": {"items": [], "metadata": {"$no": 1}}}, r"x\._metadata:"),
    ]:
        with pytest.raises(CorruptError, match=f"^{path}"):
            decode(document, "x")


@pytest.mark.parametrize("shape", [(1,), (1 << 40,), (1 << 20, 1 << 20, 0), (5_999_999,)])
def test_lengths_are_compared_before_memory_is_taken(shape):
    document = array(dtype="|u1", shape=shape, data=bytes(6_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"^x: \$ndarray: expected"):
            decode(document, "x")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < (1 << 20 if shape != (5_999_999,) else 7_000_000)


def test_arrays_of_64_dimensions_are_typed_errors_or_arrays():
    # numpy 1 has 32 dimensions at most, numpy 2 has 64.
    document = array(shape=(1,) * 64, data=b"\0" * 4)
    try:
        found = decode(document, "x")
    except CorruptError:
        return
    assert found.shape == (1,) * 64


# ------------------------------------------------------------------------------------------ text

TEXTS = {
    "empty": b"",
    "blank": b"  ",
    "not JSON": b"{",
    "two documents": b"1 2",
    "NaN": b"[NaN]",
    "Infinity": b"Infinity",
    "-Infinity": b'{"a":-Infinity}',
    "a float beyond doubles": b"[1e999]",
    "a repeated key": b'{"a":1,"b":2,"a":1}',
    "a repeated key, spelt differently": b'{"a":1,"\\u0061":2}',
    "a repeated key within": b'[{"x":{"a":1,"a":1}}]',
    "a 65-bit integer": b"[9223372036854775808]",
    "a negative 65-bit integer": b"[-9223372036854775809]",
    "a twenty-digit integer": b"[99999999999999999999]",
    "an integer of 5000 digits": b"1" * 5000,
    "an integer of a million digits": b"[-" + b"7" * 1_000_000 + b"]",
    "not UTF-8": b'["\xff"]',
    "an encoded surrogate": b'["\xed\xa0\x80"]',
    "UTF-16": '["a"]'.encode("utf-16"),
    "a byte-order mark": b"\xef\xbb\xbf[]",
    "a control character": b'["\x01"]',
    "single quotes": b"['a']",
    "a trailing comma": b"[1,]",
    "a comment": b"[1] // a",
    "nested lists": b"[" * 100_000 + b"]" * 100_000,
    "nested lists without end": b"[" * 1_000_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "nested just beyond": b"[" * (TEXT_DEPTH_MAX + 1) + b"]" * (TEXT_DEPTH_MAX + 1),
    "nested behind quotes": b'["\\\\",' * 3000 + b"1" + b"]" * 3000,
    "nested behind escaped quotes": b'["\\"]",' * 3000 + b"1" + b"]" * 3000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_texts_are_refused(name):
    with pytest.raises(CorruptError, match="JSON text"):
        loads(TEXTS[name])


def test_texts_at_the_limits_are_read():
    text = b"[" * TEXT_DEPTH_MAX + b"]" * TEXT_DEPTH_MAX
    assert dumps(loads(text)) == text
    assert loads(b"[9223372036854775807,-9223372036854775808]") == [(1 << 63) - 1, -(1 << 63)]
    assert loads(dumps(["\\", "[" * 1000, "\\"])) == ["\\", "[" * 1000, "\\"]
    brackets = '[{"[' * 1000 + '\\"'
    assert loads(dumps([brackets] * 5)) == [brackets] * 5
    assert loads(b"[" + b"[],{}," * 5000 + b"1]")[-1] == 1


@pytest.mark.parametrize(
    "document",
    [
        float("nan"),
        [float("inf")],
        1 << 63,
        {"a": "\ud800"},
        {"\ud800": 1},
        {1: 2},
        {None: 1},
        (1,),
        {"a": (1,)},
        b"a",
        np.float64(1.0),
        {1, 2},
        pytest.param(partial(deep, TEXT_DEPTH_MAX + 1, lambda inner: [inner]), id="list"),
        pytest.param(partial(deep, 100_000, lambda inner: {"a": inner}), id="dict"),
    ],
    ids=lambda document: type(document).__name__,
)
def test_dumps_refuses_what_loads_would_not_give_back(document):
    with pytest.raises(InvalidError, match="document"):
        dumps(made(document))


def test_dumps_refuses_a_document_that_holds_itself():
    document = [1]
    document.append(document)
    with pytest.raises(InvalidError, match="itself"):
        dumps(document)


json_documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@settings(deadline=None)
@given(json_documents, st.sampled_from([None, 0, 2]))
def test_texts_give_back_their_document(document, indent):
    text = dumps(document, indent=indent)
    assert repr(loads(text)) == repr(document)
    assert repr(json.loads(text)) == repr(document)


@settings(deadline=None)
@given(json_documents, st.sampled_from([1, 2]))
def test_indented_texts_are_those_of_the_standard_library(document, indent):
    """Bytes on disk must not change with what encodes them."""
    assert dumps(document, indent=indent) == json.dumps(document, ensure_ascii=False, indent=indent).encode()


# ------------------------------------------------------------------------------------------ damage

tag_names = [
    "$int", "$float", "$str", "$bytes", "$bytearray", "$complex", "$tuple", "$set", "$frozenset", "$dict", "$counter",
    "$ordered_dict", "$ndarray", "$scalar", "$datetime", "$date", "$time", "$timedelta", "$path", "$pure_posix_path",
    "$pure_windows_path", "$tensor", "$skipped", "$group", "$framework", "$other",
]  # fmt: skip
fields = ["dtype", "shape", "data", "value", "kind", "items", "metadata"]
dtype_texts = ["<f4", ">i8", "|b1", "<U3", "|S2", "|V3", "<M8[s]", "<m8", "U", "S", "|O", "<f16", "<U0"]
near_documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=16).map(lambda data: base64.b64encode(data).decode())
    | st.sampled_from([*dtype_texts, "dict", "inf", "nan", "0x10000000000000000", "2024-01-01"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(tag_names), inner, min_size=1, max_size=1)
        | st.dictionaries(st.sampled_from(tag_names), st.dictionaries(st.sampled_from(fields), inner), max_size=1)
        | st.builds(
            lambda dtype, shape, data: {"$ndarray": {"dtype": dtype, "shape": shape, "data": data}},
            st.sampled_from(dtype_texts),
            st.lists(st.integers(-1, 4), max_size=3),
            st.binary(max_size=24).map(lambda data: base64.b64encode(data).decode()),
        )
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=1000)
@given(near_documents)
def test_any_document_is_a_value_or_a_corrupt_error(document):
    before = copy.deepcopy(document)
    try:
        value = decode(document, "x")
    except CorruptError as error:
        assert str(error).startswith("x")
    else:
        again = encode(value, "x")  # whatever is read can be saved again
        assert repr(encode(decode(again, "x"), "x")) == repr(again)
    assert repr(document) == repr(before)


SAVED = dumps(encode(list(NAMED.values()), "x"))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(SAVED) * 8 - 1), st.integers(0, len(SAVED)))
def test_flipped_bits_and_cut_texts_are_values_or_corrupt_errors(bit, length):
    flipped = bytearray(SAVED)
    flipped[bit // 8] ^= 1 << (bit % 8)
    for text in (bytes(flipped), SAVED[:length]):
        try:
            decode(loads(text), "x")
        except CorruptError:
            pass

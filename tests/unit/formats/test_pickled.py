"""Pickles of plain values, of every protocol, read without running them; objects of other classes stay inert."""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import pickle  # noqa: TID251 - writes what is read here without it
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CorruptError, InvalidError
from holdfast.formats.pickled import Instance, unpickled

PROTOCOLS = range(6)

_fixed_offsets = st.integers(-1439, 1439).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
_keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
_leaves = (
    _keys
    | st.integers(-(1 << 4000), 1 << 4000)
    | st.binary()
    | st.binary().map(bytearray)
    | st.complex_numbers(allow_nan=False)
    | st.datetimes(timezones=st.none() | _fixed_offsets)
    | st.dates()
    | st.times(timezones=st.none() | _fixed_offsets)
    | st.timedeltas()
    | st.sets(_keys)
    | st.frozensets(_keys)
    | st.dictionaries(st.text(), st.integers()).map(Counter)
    | st.lists(st.text("abc/.", min_size=1), max_size=3).map(lambda parts: pathlib.PurePosixPath(*parts))
    | st.lists(st.text("abc", min_size=1), max_size=3).map(lambda parts: pathlib.Path(*parts))
)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(value=_values, protocol=st.sampled_from(PROTOCOLS))
def test_what_pickle_writes_reads_back_equal_and_of_its_type(value: object, protocol: int) -> None:
    found = unpickled(pickle.dumps(value, protocol), "here")
    assert found == value
    assert _types(found) == _types(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "<i8", ">f4", "f2", "f8", "c8", "c16", "U3", "S2"])
def test_numpy_arrays_and_scalars(dtype: str, protocol: int) -> None:
    for value in (
        np.arange(6).astype(dtype).reshape(2, 3),
        np.asfortranarray(np.arange(6).astype(dtype).reshape(3, 2)),
        np.zeros((0, 2), dtype),
        np.array(3).astype(dtype),
        np.arange(3).astype(dtype)[1],
    ):
        data = pickle.dumps(value, protocol)
        found: Any = unpickled(data, "here")
        theirs = pickle.loads(data)  # An array in the other byte order comes back in this machine's.
        assert type(found) is type(theirs)
        assert found.dtype == theirs.dtype
        assert found.shape == theirs.shape
        assert found.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_containers_stay_one(protocol: int) -> None:
    shared = [1, 2]
    found: Any = unpickled(pickle.dumps([shared, shared, {"a": shared}], protocol), "here")
    assert found[0] is found[1] is found[2]["a"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_default_dict_is_a_dict(protocol: int) -> None:
    value = defaultdict(list, {"a": [1]})
    found = unpickled(pickle.dumps(value, protocol), "here")
    assert type(found) is dict
    assert found == {"a": [1]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_of_a_known_class_is_inert(protocol: int) -> None:
    found = unpickled(pickle.dumps(argparse.Namespace(lr=0.1, name="x"), protocol), "here")
    assert isinstance(found, Instance)
    assert found.qualname == "argparse.Namespace"
    assert found.state == {"lr": 0.1, "name": "x"}


class Settings:
    """A class nobody else has."""

    def __init__(self) -> None:
        self.lr = 1.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_of_another_class_is_refused_by_name_unless_named(protocol: int) -> None:
    data = pickle.dumps(Settings(), protocol)
    with pytest.raises(InvalidError, match=r"over there.*test_pickled\.Settings"):
        unpickled(data, "over there")
    found = unpickled(data, "here", also={f"{Settings.__module__}.Settings"})
    assert isinstance(found, Instance)
    assert found.attribute("lr") == 1.0


class Calls:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("function", [os.system, os.remove, eval, exec, print, __import__, open, compile])
def test_nothing_is_called(function: Any, protocol: int, tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    there.touch()
    with pytest.raises(InvalidError, match=function.__name__):
        unpickled(pickle.dumps(Calls(function, str(there)), protocol), "here")
    assert there.exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_cut_short_anywhere_is_corrupt(protocol: int) -> None:
    data = pickle.dumps({"a": [1, 2.5, "text", b"bytes"], "b": (None, True, 1 << 80)}, protocol)
    for length in range(len(data)):
        with pytest.raises(CorruptError, match="over there, byte"):
            unpickled(data[:length], "over there")


def _types(value: object) -> object:
    if isinstance(value, dict):
        return type(value), [(_types(key), _types(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_types(each) for each in value]
    return type(value)

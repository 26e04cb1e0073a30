"""Pickles of plain values, of every protocol, read without running them; objects of other classes stay inert."""

from __future__ import annotations

import argparse
import os
import pathlib
import pickle  # noqa: TID251 - writes what is read here without it
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.errors import CorruptError, InvalidError
from tests.unit.backends.foreign.plain_values import types_in, values

PROTOCOLS = range(6)


@settings(max_examples=400, deadline=None)
@given(value=values, protocol=st.sampled_from(PROTOCOLS))
def test_what_pickle_writes_reads_back_equal_and_of_its_type(value: object, protocol: int) -> None:
    found = unpickled(pickle.dumps(value, protocol), "here")
    assert found == value
    assert types_in(found) == types_in(value)


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
    assert isinstance(found, OpaqueObject)
    assert found.qualname == "argparse.Namespace"
    assert found.state == {"lr": 0.1, "name": "x"}


class Settings:
    """A class nobody else has."""

    def __init__(self) -> None:
        self.lr = 1.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_of_another_class_is_refused_by_name_unless_named(protocol: int) -> None:
    data = pickle.dumps(Settings(), protocol)
    with pytest.raises(InvalidError, match=r"over there.*test_reader\.Settings"):
        unpickled(data, "over there")
    found = unpickled(data, "here", also={f"{Settings.__module__}.Settings"})
    assert isinstance(found, OpaqueObject)
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

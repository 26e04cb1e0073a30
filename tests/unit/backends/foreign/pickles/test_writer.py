"""Pickles written by ourselves: the library of that name and our own reader read them back equal, of the same type."""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - reads what is written here without it
import pickletools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from holdfast.backends.foreign.pickles.objects import GlobalName
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.backends.foreign.pickles.writer import DEPTH_MAX, Made, PersistentId, pickled
from holdfast.errors import InvalidError
from tests.unit.backends.foreign.plain_values import types_in, values

ARRAYS = [
    np.arange(6, dtype="i4").reshape(2, 3),
    np.array(["añ", "b"]),
    np.array([b"x"]),
    np.array(["2020-01-01"], "M8[s]"),
    np.zeros((0, 3), "f2"),
    np.float64(0.1),
    np.int8(-3),
    np.bool_(True),
    np.str_("text"),
    np.datetime64("2020-01-01", "ns"),
    np.complex64(1 - 2j),
]


@settings(max_examples=400, deadline=None)
@given(value=values)
def test_what_is_written_reads_back_equal_and_of_its_type(value: object) -> None:
    data = pickled(value)
    for found in (pickle.loads(data), unpickled(data, "here")):
        assert found == value
        assert types_in(found) == types_in(value)


@pytest.mark.parametrize("value", ARRAYS, ids=lambda each: f"{each.dtype.str}-{each.ndim}")
def test_arrays_and_scalars_of_numpy_read_back(value: Any) -> None:
    read = [pickle.loads(pickled(value))]
    if value.dtype.kind != "M":  # Our reader refuses moments of numpy.
        read.append(unpickled(pickled(value), "here"))
    for found in read:
        assert type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
        assert found.tobytes() == value.tobytes()


def test_the_bits_of_floats_stay() -> None:
    bits = np.array([0x7FF8000000000001, 0xFFF0000000000000, 1 << 63, 1], np.uint64)
    for each in bits.view(np.float64).tolist():
        assert np.float64(pickle.loads(pickled(each))).tobytes() == np.float64(each).tobytes()


def test_a_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    kept: OrderedDict[str, Any] = OrderedDict((name, name) for name in state)
    kept._metadata = state._metadata  # type: ignore[attr-defined]
    found = pickle.loads(pickled(kept))
    assert found == kept and found._metadata == kept._metadata


def test_long_containers_are_filled_in_batches() -> None:
    value = {"list": list(range(5000)), "dict": {str(each): each for each in range(5000)}}
    assert pickle.loads(pickled(value)) == unpickled(pickled(value), "here") == value
    depth = held = 0
    for code, _, _ in pickletools.genops(pickled(value)):
        held = 0 if code.name in ("MARK", "APPENDS", "SETITEMS") else held + 1
        depth = max(depth, held)
    assert depth < 5000


def test_objects_are_called_made_and_shared() -> None:
    shared = Made(GlobalName("collections.OrderedDict"), items=[("a", 1)], shared=True)
    found = pickle.loads(pickled([shared, shared, Made(GlobalName("decimal.Decimal"), ("1.5",))]))
    assert found[0] is found[1] and found[0] == OrderedDict(a=1) and str(found[2]) == "1.5"
    made = Made(GlobalName("types.SimpleNamespace"), state={"x": 1}, new=True)
    assert pickle.loads(pickled(made)).x == 1
    once = Made(GlobalName("collections.OrderedDict"))
    first, second = pickle.loads(pickled([once, once]))
    assert first is not second


def test_a_persistent_id_is_what_the_reader_is_asked_for() -> None:
    class Asked(pickle.Unpickler):
        def persistent_load(self, content: Any) -> Any:
            return "found", content

    assert Asked(io.BytesIO(pickled([PersistentId((1, "a"))]))).load() == [("found", (1, "a"))]


def test_what_has_no_place_in_a_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match="a slice cannot"):
        pickled([slice(1)])
    assert pickle.loads(pickled([slice(1)], lambda value: "a slice")) == ["a slice"]
    deep: list[object] = []
    for _ in range(DEPTH_MAX + 1):
        deep = [deep]
    with pytest.raises(InvalidError, match="deeper than"):
        pickled(deep)

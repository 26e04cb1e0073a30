"""Plain values of every type that states hold, drawn at random."""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict

from hypothesis import strategies as st

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
values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


def types_in(value: object) -> object:
    if isinstance(value, dict):
        return type(value), [(types_in(key), types_in(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types_in(each) for each in value]
    return type(value)

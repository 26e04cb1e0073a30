"""Torch files that would cost far more memory or time than bytes: refused, or read at a cost that follows size."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from holdfast.backends.foreign.pickles import limits, opcodes
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from tests.hostile.torch_files import archive, listed, state, text

MIB = 1 << 20
OBJECT = b"cargparse\nNamespace\nq\0"


def _cost(data: bytes, folder: Path) -> tuple[int, float, str]:
    """Return the peak of memory, the seconds while it is traced, and the message if it is refused."""
    tracemalloc.start()
    try:
        seconds, met = _timed(data, folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak, seconds, met


def _timed(data: bytes, folder: Path) -> tuple[float, str]:
    """Return the seconds, and the message if it is refused."""
    begun = time.process_time()
    met = ""
    try:
        listed(archive(state(data)), folder)
    except CheckpointError as error:
        met = str(error)
    return time.process_time() - begun, met


def test_names_of_members_do_not_grow_without_limit(tmp_path: Path) -> None:
    grow = text("a" * 200) + b"q\1" + b"0" + b"cbuiltins\ngetattr\nq\2"
    data = b"\x80\x04" + grow + b"h\2" * 3000 + b"cargparse\nNamespace\n" + b"h\1\x86R\x94" * 3000 + b"."
    peak, _, met = _cost(data, tmp_path)
    assert "a member whose name has" in met
    assert peak < 8 * MIB


@pytest.mark.parametrize("item", [b"h\0)R", b"N"])
def test_a_long_name_is_not_written_for_everything_below_it(tmp_path: Path, item: bytes) -> None:
    data = b"\x80\x04" + OBJECT + b"0}" + text("k" * 4000) + b"}" + text("l" * 4000) + b"(" + item * 20_000 + b"lss."
    peak, seconds, met = _cost(data, tmp_path)
    assert "state" in met or "k" * 200 in met
    assert "a name of 8001 characters; expected 4096 at most" in met
    assert peak < 32 * MIB
    assert seconds < 30


def test_objects_left_out_beyond_those_told_of_keep_no_name(tmp_path: Path) -> None:
    data = b"\x80\x04" + OBJECT + b"0}" + text("k" * 4000) + b"(" + b"h\0)R" * 20_000 + b"ls."
    peak, _, met = _cost(data, tmp_path)
    assert not met
    assert peak < 32 * MIB


def test_what_many_objects_share_is_not_walked_for_each(tmp_path: Path) -> None:
    data = b"\x80\x04" + OBJECT + b"(" + b"N" * 100_000 + b"lq\x010(" + b"h\0)Rh\1b" * 1000 + b"l."
    seconds, met = _timed(data, tmp_path)
    assert "shared so often" in met
    assert seconds < 15
    one = b"\x80\x04" + OBJECT + b"(" + b"N" * 100_000 + b"lq\x010h\0)Rh\1bq\2(" + b"h\2" * 10_000 + b"l."
    seconds, met = _timed(one, tmp_path)
    assert not met
    assert seconds < 15


def test_a_storage_goes_by_a_short_name(tmp_path: Path) -> None:
    data = b"\x80\x04(" + text("storage") + b"ctorch\nFloatStorage\n" + text("k" * 201) + text("cpu") + b"K\0tQ."
    with pytest.raises(CorruptError, match="the name of a storage has 201 characters"):
        listed(archive(state(data)), tmp_path)


@pytest.mark.parametrize("key", [text("k" * 4097), b"B\1\x10\0\0" + b"k" * 4097, text("k" * 2049) * 2 + b"\x86"])
@pytest.mark.parametrize("container", [b"}(%bNu", b"\x8f(%b\x90", b"(%b\x91"])
def test_a_key_is_no_long_text(key: bytes, container: bytes) -> None:
    with pytest.raises(CorruptError, match="a key of over 4096 characters"):
        unpickled(b"\x80\x04" + container % key + b".", "here")


def test_text_that_is_no_key_may_be_long() -> None:
    assert unpickled(b"\x80\x04" + text("k" * 100_000) + b".", "here") == "k" * 100_000


MANY = {
    "lists": b"(" + b"]" * 1001 + b"l",
    "dicts": b"(" + b"}" * 1001 + b"l",
    "sets": b"(" + b"\x8f" * 1001 + b"l",
    "frozensets": b"(" + b"(\x91" * 1001 + b"l",
    "tuples": b"N" + b"\x85" * 100 + b"0(" + b"N\x85" * 901 + b"l",
    "tuples of marks": b"(" + b"(Nt" * 1001 + b"l",
    "lists of marks": b"(" + b"(l" * 1001 + b"l",
    "dicts of marks": b"(" + b"(d" * 1001 + b"l",
    "objects": OBJECT + b"0(" + b"h\0)R" * 1001 + b"l",
    "paths": b"cpathlib\nPosixPath\nq\0" + b"0(" + b"h\0)R" * 1001 + b"l",
    "values that are kept": b"N" + b"\x94" * 1001,
}


@pytest.mark.parametrize("data", MANY.values(), ids=MANY)
def test_containers_and_what_is_kept_are_counted(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unpickled(b"\x80\x04" + data + b".", "here") is not unpickled
    monkeypatch.setattr(opcodes, "CONTAINERS_MAX", 1000)
    with pytest.raises(InvalidError, match=r"here, byte \d+: over 1000 (containers|memo entries)"):
        unpickled(b"\x80\x04" + data + b".", "here")


def test_containers_that_a_walk_meets_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x80\x04}K\1K\1sq\0(" + b"h\0" * 100 + b"lq\1(" + b"h\1" * 11 + b"l."
    assert unpickled(data, "here") == [[{1: 1}] * 100] * 11
    monkeypatch.setattr(limits, "CONTAINERS_MAX", 1000)
    with pytest.raises(InvalidError, match="here: containers are shared so often"):
        unpickled(data, "here")


def test_marks_are_counted() -> None:
    with pytest.raises(CorruptError, match="open marks"):
        unpickled(b"\x80\x04" + b"(" * 200_000 + b".", "here")


def test_bytes_behind_the_end_allow_nothing() -> None:
    data = b"\x80\x04}K\1K\1sq\0(" + b"h\0" * 1000 + b"lq\1(" + b"h\1" * 1000 + b"l."
    with pytest.raises(InvalidError, match="here: containers are shared so often"):
        unpickled(data + bytes(8 * MIB), "here")


def test_a_walk_writes_nothing_down() -> None:
    count = 200_000
    data = b"\x80\x04(" + b"]" * count + b"l."
    tracemalloc.start()
    try:
        unpickled(data, "here")
        assert tracemalloc.get_traced_memory()[1] < 100 * count
    finally:
        tracemalloc.stop()


def test_keys_that_are_watched_for_their_hash_cost_what_they_may() -> None:
    with pytest.raises(InvalidError, match="values in proportion"):
        unpickled(b"\x80\x04" + b"})Ns0" * 200_000 + b"N.", "here")

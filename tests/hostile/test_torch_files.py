"""Hostile torch files: refused with a typed error that names the file, in bounded time and memory; nothing runs."""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251 - writes what is read here without it
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.foreign.pickles.limits import DEPTH_MAX
from holdfast.backends.foreign.pickles.reader import unpickled
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from tests.hostile.proportion import OUT_OF_PROPORTION
from tests.hostile.torch_files import Entry, archive, listed, named, numbers, state, tensor, text
from tests.support.forked_processes import REPOSITORY, environment

MEMORY = bytes(range(16))


def test_the_crafted_file_is_one_that_is_read(tmp_path: Path) -> None:
    listing = listed(archive(state(named(tensor()), MEMORY)), tmp_path)
    [piece] = listing.pieces["model.w"]
    assert (tmp_path / "state.pt").read_bytes()[piece.offset : piece.offset + 16] == MEMORY


# ------------------------------------------------------------------------------------------ code that would run


class Runs:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_command_is_not_run(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps({"w": Runs(f"touch {mark}")}, protocol)
    with pytest.raises(InvalidError, match=r"state\.pt.*posix\.system"):
        listed(archive(state(data)), tmp_path)
    assert not mark.exists()


CODE = {
    "a function": b"cos\nsystem\n(" + text("true") + b"tR",
    "by text": text("os") + text("system") + b"\x93" + text("true") + b"\x85R",
    "an old class": b"(" + text("true") + b"ios\nsystem\n",
    "an old class from the stack": b"(cos\nsystem\n" + text("true") + b"o",
    "a new object": b"csubprocess\nPopen\n(" + text("true") + b"t\x81",
    "a new object with keywords": b"csubprocess\nPopen\n)}\x92",
    "an attribute of a builtin": b"cbuiltins\ngetattr\ncbuiltins\nobject\n" + text("__subclasses__") + b"\x86R",
    "an attribute of text": b"cbuiltins\ngetattr\n" + text("x") + text("format") + b"\x86R",
    "by the old name": b"c__builtin__\neval\n(" + text("1") + b"tR",
    "through torch": b"ctorch.hub\nload\n(" + text("x") + b"tR",
    "torch's own pickles": b"ctorch.storage\n_load_from_bytes\nC\x01.\x85R",
    "import by torch": b"ctorch._utils\n_import_dotted_name\n(" + text("os.system") + b"tR",
    "numpy's loader": b"cnumpy\nload\n(" + text("x") + b"tR",
    "codecs": b"c_codecs\nlookup\n(" + text("x") + b"tR",
    "an extension": b"\x82\x01",
    "a buffer elsewhere": b"\x97",
    "another id than a storage": text("hello") + b"Q",
    "a call of text": text("os.system") + text("true") + b"\x85R",
    "a call of a type": b"ctorch\nfloat32\n)R",
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_code_is_refused(code: bytes, tmp_path: Path) -> None:
    with pytest.raises((InvalidError, CorruptError), match=r"state\.pt.*byte \d+"):
        listed(archive(state(named(code))), tmp_path)


def test_a_class_of_a_known_package_is_only_named(tmp_path: Path) -> None:
    code = b"cdeepspeed.utils\nrun_anything\n(" + text("true") + b"tR"
    listing = listed(archive(state(named(code))), tmp_path)
    [remark] = listing.remarks
    assert remark.startswith("w: left out; it is a deepspeed.utils.run_anything")


# ------------------------------------------------------------------------------------------ pickles out of proportion


STATED = {
    "a memo index": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a memo index in decimal": b"Np" + b"9" * 30 + b"\n.",
    "a memo index below": b"Np-1\n.",
    "an unknown memo index": b"\x80\x04h\x05.",
    "a frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "text": b"X\xff\xff\xff\xffabc.",
    "long text": b"\x8d" + b"\xff" * 8 + b"abc.",
    "bytes": b"\x8e" + b"\xff" * 7 + b"\x7fabc.",
    "a bytearray": b"\x96" + b"\xff" * 7 + b"\x7fabc.",
    "an integer": b"\x8b\xff\xff\xff\xffabc.",
    "a protocol": b"\x80\x09N.",
    "a code": b"\x80\x04\xff.",
    "no code at all": b"",
    "marks": b"\x80\x04" + b"e" * 10,
    "a stack": b"\x80\x04\x87.",
    "text that is none": b"X\x02\0\0\0\xff\xfe.",
    "a float": b"Fabc\n.",
    "odd items": b"\x80\x04}(K\1u.",
    "a list as a key": b"\x80\x04}]Ns.",
    "items of a number": b"\x80\x04K\1(K\1K\2u.",
    "attributes of a list": b"\x80\x04]}b.",
    "a name that is none": b"\x80\x04K\1K\2\x93.",
    "a long name": b"\x80\x04c" + b"a" * 5000 + b"\n" + b"b" * 5000 + b"\n.",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What became of each pickle out of proportion, by name."""
    command = [sys.executable, "-W", "error", "-m", "tests.hostile.proportion"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.long
@pytest.mark.parametrize("name", OUT_OF_PROPORTION)
def test_a_pickle_out_of_proportion_is_refused_soon(outcomes: dict[str, Any], name: str) -> None:
    outcome = outcomes[name]
    assert outcome["met"] == "CheckpointError" and outcome["message"].startswith("here"), outcome
    assert outcome["peak"] < 64 * 1024 * 1024 + 150 * len(OUT_OF_PROPORTION[name])
    assert outcome["seconds"] < 60  # Seconds of a busy machine; not hours.


@pytest.mark.parametrize("data", STATED.values(), ids=STATED)
def test_what_a_pickle_states_is_held_against_its_bytes(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"^here"):
            unpickled(data, "here")
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_what_is_nested_as_deep_as_allowed_is_read() -> None:
    value: object = 1
    for _ in range(DEPTH_MAX):
        value = [value]
    assert unpickled(pickle.dumps(value, 4), "here") == value
    with pytest.raises(InvalidError, match=f"nested deeper than {DEPTH_MAX}"):
        unpickled(pickle.dumps([value], 4), "here")


def test_objects_may_lie_within_one_another_however_deep() -> None:
    found: Any = unpickled(b"\x80\x04N" + b"q\0cdeepspeed\nA\nh\0\x85R" * 100_000 + b".", "here")
    assert found.qualname == found.args[0].qualname == "deepspeed.A"
    del found  # Freed without running out of stack.


@settings(max_examples=1500, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_typed_error(data: bytes) -> None:
    try:
        unpickled(data, "here")
    except CheckpointError as error:
        assert str(error).startswith("here")


def test_any_change_of_a_real_pickle_is_a_value_or_a_typed_error() -> None:
    chance = random.Random(7)
    value = {"a": [1, 2.5, (None, True)], "b": {"c": b"bytes", 3: {1, 2}}, "long": 1 << 70}
    for protocol in range(6):
        data = pickle.dumps(value, protocol)
        for _ in range(1500):
            changed = bytearray(data)
            for _ in range(chance.randrange(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            try:
                unpickled(bytes(changed), "here")
            except CheckpointError as error:
                assert str(error).startswith("here")


# ------------------------------------------------------------------------------------------ tensors that lie

_GOOD = named(tensor())

LYING_TENSORS = {
    "a shape beyond its storage": named(tensor(shape=numbers((5,)))),
    "a shape of petabytes": named(tensor(shape=numbers((1 << 50,)))),
    "a shape that overflows": named(tensor(shape=numbers((1 << 40, 1 << 40)), strides=numbers((0, 0)))),
    "a huge expanded one": named(tensor(shape=numbers((1 << 45,)), strides=numbers((0,)))),
    "a negative length": named(tensor(shape=numbers((-4,)))),
    "a negative stride": named(tensor(strides=numbers((-1,)))),
    "a stride beyond": named(tensor(strides=numbers((2,)))),
    "an offset beyond": named(tensor(offset=1)),
    "a negative offset": named(tensor(offset=-1)),
    "a huge offset": named(tensor(offset=1 << 100)),
    "more strides than lengths": named(tensor(strides=numbers((1, 1)))),
    "a hundred dimensions": named(tensor(shape=numbers((1,) * 100), strides=numbers((1,) * 100))),
    "a shape of text": named(tensor(shape=text("4"))),
    "a shape of floats": named(tensor(shape=b"G" + struct.pack(">d", 4.0) + b"\x85")),
    "a shape of bools": named(tensor(shape=b"\x88\x85")),
    "a storage larger than its entry": named(tensor(numel=5)),
    "a negative storage": named(tensor(numel=-1)),
    "a storage that is not there": named(tensor(key=text("1"))),
    "a storage that is the pickle": named(tensor(key=text("../data.pkl"))),
    "a storage by a number": named(tensor(key=b"K\0")),
    "a storage of another type": named(tensor(kind="QInt8Storage")),
    "no storage": named(b"ctorch._utils\n_rebuild_tensor_v2\n(" + b"NK\0))\x89NtR"),
    "a tensor of nothing": named(b"ctorch._utils\n_rebuild_tensor_v2\n)R"),
    "a dtype that is not stored": named(tensor(kind="UntypedStorage", numel=16, function="_rebuild_tensor_v3",
                                               tail=b"\x89Nctorch\nbits8\n")),
    "a dtype that is text": named(tensor(kind="UntypedStorage", numel=16, function="_rebuild_tensor_v3",
                                         tail=b"\x89N" + text("float32"))),
    "one storage of two types": b"\x80\x04}" + text("v") + tensor(kind="IntStorage") + b"s" + text("w") + tensor()
    + b"s.",
    "no dtype at all": named(tensor(kind="UntypedStorage", numel=16)),
}  # fmt: skip


@pytest.mark.parametrize("data", LYING_TENSORS.values(), ids=LYING_TENSORS)
def test_a_tensor_that_lies_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises((CorruptError, InvalidError), match=r"state\.pt"):
        listed(archive(state(data, MEMORY)), tmp_path)


# ------------------------------------------------------------------------------------------ archives that lie


def _zip64(*fields: int) -> bytes:
    return struct.pack(f"<2H{len(fields)}Q", 1, 8 * len(fields), *fields)


def _with(entry: Entry) -> list[Entry]:
    """Return a good file's entries with the storage replaced."""
    return [entry if each.name == "archive/data/0" else each for each in state(_GOOD, MEMORY)]


_WIDE = 0xFFFFFFFF
_STORAGE = "archive/data/0"
_WHOLE = archive(state(_GOOD, MEMORY))


def _with_zip64(whole: bytes, **lies: int) -> bytes:
    """Return an archive with the records of zip64 before its end, which torch goes by where they stand."""
    count, size, at = struct.unpack("<8xHHLL2x", whole[-22:])[1:]
    told = {"count": count, "size": size, "at": at} | lies
    end = len(whole) - 22
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, *told.values())
    return whole[:end] + wide + struct.pack("<4sLQL", b"PK\6\7", 0, end, 1) + whole[end:]


LYING_ARCHIVES = {
    "empty": b"",
    "only its end": _WHOLE[-22:],
    "without its end": _WHOLE[:-22],
    "another file": b"\x7fELF" + bytes(4000),
    "a pickle": pickle.dumps({"w": 1}),
    "deflated": archive(_with(Entry(_STORAGE, MEMORY, method=8))),
    "encrypted": archive(_with(Entry(_STORAGE, MEMORY, flags=1))),
    "a bomb": archive(_with(Entry(_STORAGE, MEMORY, stated_bytes=1 << 31, stored_bytes=16))),
    "larger than the file": archive(_with(Entry(_STORAGE, MEMORY, stated_bytes=1 << 20))),
    "larger than the file, zip64": archive(
        _with(Entry(_STORAGE, MEMORY, stated_bytes=_WIDE, extra=_zip64(1 << 60, 1 << 60)))
    ),
    "zip64 without its field": archive(_with(Entry(_STORAGE, MEMORY, stated_bytes=_WIDE))),
    "overlapping the next": archive(_with(Entry(_STORAGE, MEMORY, stated_bytes=17))),
    "inside another": archive(_with(Entry(_STORAGE, MEMORY, place=0))),
    "outside": archive(_with(Entry(_STORAGE, MEMORY, place=1 << 31))),
    "outside, zip64": archive(_with(Entry(_STORAGE, MEMORY, place=_WIDE, extra=_zip64(1 << 62)))),
    "in the directory": archive(_with(Entry(_STORAGE, MEMORY, place=len(_WHOLE) - 100))),
    "no header there": archive(_with(Entry(_STORAGE, MEMORY, place=3))),
    "another name there": archive(_with(Entry(_STORAGE, MEMORY, local_name="archive/data/10"))),
    "one name twice": archive([*state(_GOOD, MEMORY), Entry(_STORAGE, bytes(16))]),
    "two pickles": archive([*state(_GOOD, MEMORY), Entry("other/data.pkl", _GOOD)]),
    "no entries": b"PK\3\4" + archive([]),
    "no entries, and their places": archive(state(_GOOD, MEMORY), count=0, size=0),
    "no pickle": archive([Entry(_STORAGE, MEMORY)]),
    "a program": archive([*state(_GOOD, MEMORY), Entry("archive/constants.pkl", b")."), Entry("archive/code/x.py")]),
    "big endian": archive(state(_GOOD, MEMORY, order=b"big")),
    "more entries than there are": archive(state(_GOOD, MEMORY), count=5),
    "fewer entries than there are": archive(state(_GOOD, MEMORY), count=1, size=46 + 16),
    "millions of entries": archive(state(_GOOD, MEMORY), count=65534),
    "a directory outside": archive(state(_GOOD, MEMORY), at=1 << 31),
    "a directory of gigabytes": archive(state(_GOOD, MEMORY), size=1 << 31),
    "a zip64 end that is not there": archive(state(_GOOD, MEMORY), count=65535),
    "a directory too early": archive(state(_GOOD, MEMORY), at=0),
    "two directories": _with_zip64(_WHOLE, at=0),
    "two directories of other lengths": _with_zip64(_WHOLE, size=46),
    "two counts of entries": _with_zip64(_WHOLE, count=3),
}


@pytest.mark.parametrize("data", LYING_ARCHIVES.values(), ids=LYING_ARCHIVES)
def test_an_archive_that_lies_is_refused(data: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((CorruptError, InvalidError), match=r"state\.pt"):
            listed(data, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_records_of_zip64_that_agree_are_read(tmp_path: Path) -> None:
    assert list(listed(_with_zip64(_WHOLE), tmp_path).tensors) == ["model.w"]


def test_a_real_bomb_is_not_inflated(tmp_path: Path) -> None:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", _GOOD)
        made.writestr("archive/data/0", bytes(100 << 20))
    with pytest.raises(InvalidError, match="compressed"):
        listed(held.getvalue(), tmp_path)


def test_any_change_of_a_real_file_is_a_listing_or_a_typed_error(tmp_path: Path) -> None:
    chance = random.Random(11)
    for _ in range(1500):
        changed = bytearray(_WHOLE)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            listing = listed(bytes(changed), tmp_path)
        except CheckpointError as error:
            assert "state.pt" in str(error)
        else:
            for each in listing.pieces.values():
                assert all(0 <= piece.offset <= len(changed) for piece in each)

"""`MissingError` is the error that Python itself raises of what is not there, and stays one of Holdfast's."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.errors import BY_NAME, CheckpointError, MissingError

DAEMON_POOL: dict[str, Callable[[Path], object]] = {
    "load": lambda path: holdfast.load(path, {"a": torch.zeros(1)}, process_group=False),
    "read": holdfast.read,
    "open_checkpoint": holdfast.open_checkpoint,
    "export": lambda path: holdfast.export(path, path.parent / "out.pt", to="torch"),
    "a step": lambda path: holdfast.read(path.parent / "run", step=5),
    "a tag": lambda path: holdfast.read(path.parent / "run", step="best"),
}


@pytest.mark.parametrize("call", DAEMON_POOL)
def test_a_script_begins_anew_where_nothing_is(tmp_path: Path, call: str) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False) as manager:
        manager.save(3, {"a": torch.zeros(1)}).wait()
    with pytest.raises(FileNotFoundError) as missing:
        DAEMON_POOL[call](tmp_path / "absent")
    assert isinstance(missing.value, MissingError) and missing.value.errno is None
    assert str(missing.value) == missing.value.args[0]


@pytest.mark.parametrize("kind", BY_NAME.values())
def test_an_error_is_the_same_after_a_copy_and_in_another_process(kind: type[CheckpointError]) -> None:
    error = kind("/runs/7: no step 5; expected one of 3, 4. Choose one")
    error.add_note("a note")
    for again in (copy.copy(error), copy.deepcopy(error)):  # As a process that gets it makes it.
        assert (type(again), str(again)) == (kind, str(error))


@pytest.mark.parametrize("verb", ["link", "move"])
def test_a_store_says_once_that_its_object_is_absent(tmp_path: Path, verb: str) -> None:
    """It is no folder that vanished, for which a call is made again, and its text is not translated again."""

    class Counting(Syscalls):
        looks = 0

        def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
            self.looks += name == "pack"
            return super().stat(name, dir_fd=dir_fd)

    calls = Counting()
    store = LocalStore(tmp_path, settings=holdfast.Settings(), syscalls=calls)
    with pytest.raises(MissingError) as missing:
        getattr(store, verb)("pack", "new/other")
    assert str(missing.value) == f"{store.url}/pack: no such object"
    assert calls.looks == 1


@pytest.mark.parametrize("verb", ["link", "move", "get"])
def test_a_store_names_a_folder_in_the_place_of_an_object(tmp_path: Path, verb: str) -> None:
    (tmp_path / "pack").mkdir()
    store = LocalStore(tmp_path, settings=holdfast.Settings())
    with pytest.raises(MissingError, match=r"no such object, but a folder of that name$"):
        getattr(store, verb)("pack", 100 if verb == "get" else "new/pack")

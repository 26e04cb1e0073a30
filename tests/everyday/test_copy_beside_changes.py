"""Someone copies a run with `holdfast cp` while a job saves and removes steps, or starts the copy again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast import api
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import StoreEntry
from holdfast.core.format.names import RUN_FILE, step_folder, step_of_folder
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.offline.copying.copy_run import RunCopy
from holdfast.settings import Settings
from tests.everyday.frozen_run import require_step, step_path

Result = TypeVar("Result")


class Ending(ForwardingStore):
    """A destination whose process dies before the copy is complete, or right after."""

    is_complete = False

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object."""
        if key != RUN_FILE or self.is_complete:
            super().put_if_absent(key, data, folders_durable=folders_durable)
        if key == RUN_FILE:
            raise UnavailableError("the process died")


class Changing(ForwardingStore):
    """A source that lists the newest step first, and in which this step vanishes before any of its packs is read."""

    def __init__(self, inner: LocalStore) -> None:
        super().__init__(inner)
        self.removed: int | None = None
        self._lock = threading.Lock()

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix."""
        yield from sorted(super().list(prefix, after=after, up_to=up_to), key=lambda entry: entry.key, reverse=True)

    def _around(self, name: str, subject: str, call: Callable[[], Result]) -> Result:
        folder = subject.partition("/")[0]
        if name in ("size", "read_into", "get_cached") and folder == step_folder(3).rstrip("/"):
            with self._lock:  # Files are copied side by side: none may be read before all are gone.
                if self.removed is None:
                    self.removed = step_of_folder(folder)
                    shutil.rmtree(Path(self.url) / folder)
        return call()


def store_at(path: Path) -> LocalStore:
    return LocalStore(path, settings=Settings())


def copy_that_dies(run: Path, copy: Path, *, is_complete: bool = False) -> None:
    destination = Ending(store_at(copy))
    destination.is_complete = is_complete
    with pytest.raises(CheckpointError):
        RunCopy(store_at(run), destination, SystemClock()).run()


def test_a_pack_that_was_being_written_is_copied_by_the_next_call(run: Path, tmp_path: Path) -> None:
    (pack,) = step_path(run, 3).glob("*/r00000.safetensors")
    manifest = step_path(run, 3) / "manifest.json"
    content, sealed = pack.read_bytes(), manifest.read_bytes()
    # As it is while the save is under way: space is reserved under the final name, and no manifest is there.
    pack.write_bytes(bytes(len(content)))
    manifest.unlink()
    copy_that_dies(run, tmp_path / "copy")
    pack.write_bytes(content)
    manifest.write_bytes(sealed)
    report = api.copy_run(run, tmp_path / "copy")
    assert (report.steps, report.left_out) == (3, ())
    for step in (1, 2, 3):
        require_step(step_path(tmp_path / "copy", step), step)


def test_a_pack_is_copied_from_any_of_its_names(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(step_path(run, 1))
    source = Changing(store_at(run))
    report = RunCopy(source, store_at(tmp_path / "copy"), SystemClock()).run()
    assert (source.removed, report.steps, report.left_out) == (3, 1, (3,))
    require_step(step_path(tmp_path / "copy", 2), 2)
    assert (tmp_path / "copy" / "latest").read_text().strip() == step_path(run, 2).name


def test_a_copy_that_is_complete_is_not_written_to_again(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_that_dies(run, copy, is_complete=True)
    # A job goes on in the copy: it removes a step there.
    shutil.rmtree(step_path(copy, 3))
    api.copy_run(run, copy)
    assert not step_path(copy, 3).exists() and not (copy / "copying").exists()
    require_step(step_path(copy, 2), 2)

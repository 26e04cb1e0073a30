"""Folders as `save_pretrained` writes them, made from committed steps on a thread of rank 0 while training goes on.

A step gets a tag with its save, so that it stays until its folder is there. A tag that a kill left behind names a
folder that is still to be made.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from holdfast import api
from holdfast.errors import CheckpointError, MissingError, UnavailableError
from holdfast.settings import Settings

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"checkpoint-(\d+)")
_TAG = re.compile(r"hf-(\d+)")

Complete = Callable[[Path, int], None]
"""Adds to a folder what the step does not hold, such as the configuration; for adapters the weights too."""


def tag_of(step: int) -> str:
    """Return the tag of a step whose folder is still to be made."""
    return f"hf-{step}"


def folder_of(parent: Path, step: int) -> Path:
    """Return the folder of a step."""
    return parent / f"checkpoint-{step}"


class ModelFolders:
    """Makes the folders of one run, one after the other, and removes those of steps that are gone."""

    def __init__(
        self,
        root: str,
        parent: Path,
        complete: Complete,
        steps_of_run: Callable[[], list[int]],
        *,
        weights: bool,
        settings: Settings,
    ) -> None:
        """Begin without work.

        Args:
            root: The root of the run.
            parent: Where the folders go.
            complete: Completes a folder.
            steps_of_run: Returns the steps that are stored.
            weights: Whether the weights are exported from the step; if not, `complete` writes them.
            settings: How to read.
        """
        self._root, self._parent, self._complete, self._steps_of_run = root, parent, complete, steps_of_run
        self._weights, self._settings = weights, settings
        self._steps: queue.Queue[tuple[int, Future[api.SaveReport] | None] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._known_steps: set[int] = set()
        """Steps that this run has had: only their folders are removed."""
        self._thread: threading.Thread | None = None
        self._failures: list[tuple[int, Exception]] = []
        self._made: queue.SimpleQueue[int] = queue.SimpleQueue()

    def make_when_committed(self, step: int, committed: Future[api.SaveReport]) -> None:
        """Make the folder of a step once its save is committed."""
        # The thread waits for the save. A callback of it may run after others have seen its end, and after `finish`.
        self._begin(step, committed)

    def make(self, step: int) -> None:
        """Make the folder of a committed step."""
        self._begin(step, None)

    def _begin(self, step: int, committed: Future[api.SaveReport] | None) -> None:
        self._steps.put((step, committed))
        with self._lock:
            if self._thread is None:
                # A daemon: Ctrl-C need not wait for an export. The next job makes the folder.
                self._thread = threading.Thread(target=self._work, name="holdfast-model-folders", daemon=True)
                self._thread.start()

    def make_left_behind(self, resumed: int | None) -> None:
        """Make the folders that an earlier job did not come to. Call it before the first step of this job.

        Args:
            resumed: The step that this job goes on from. A kill may have come between its commit and its tag.
        """
        self._known_steps |= set(self._steps_of_run())
        left = [] if resumed is None or folder_of(self._parent, resumed).exists() else [resumed]
        with suppress(MissingError):
            tags = api.list_steps(self._root, settings=self._settings).tags
            left += [tag.step for tag in tags if _TAG.fullmatch(tag.name) and tag.step not in left]
        for step in left:
            self.make(step)

    def take_newest(self) -> Path | None:
        """Return the newest folder that was made since the last call; None if none was."""
        newest = None
        with suppress(queue.Empty):
            while True:
                newest = self._made.get_nowait()
        return None if newest is None else folder_of(self._parent, newest)

    def finish(self) -> None:
        """Wait until all folders are made."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._steps.put(None)
            thread.join()

    def stop(self) -> None:
        """Let no folder appear from now on. The next training makes those that are left, perhaps in this process."""
        with self._lock:
            self._is_stopped = True
        self._steps.put(None)

    def prune(self) -> None:
        """Remove the folders of steps that were in the run and no longer are."""
        with suppress(CheckpointError):
            kept = set(self._steps_of_run())
            self._known_steps |= kept
            for folder in self._parent.glob("checkpoint-*"):
                found = _FOLDER.fullmatch(folder.name)
                # A root without steps is one that is not mounted. Other folders are of a training with another root.
                if found and kept and int(found[1]) in self._known_steps - kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def raise_failure(self) -> None:
        """Raise the error of the first folder that could not be made.

        Raises:
            UnavailableError: Names the folder, and how many others failed.
        """
        if self._failures:
            step, error = self._failures[0]
            others = f"; and {len(self._failures) - 1} more" if len(self._failures) > 1 else ""
            raise UnavailableError(
                f"{folder_of(self._parent, step)}: the model of step {step} was not exported{others}: {error}. The "
                "step is saved. The next training with save_hf=True tries again"
            ) from error

    def _work(self) -> None:
        while (wanted := self._steps.get()) is not None:
            step, committed = wanted
            if committed is not None and committed.exception() is not None:
                continue
            try:
                if not self._is_stopped and self._make(step):
                    with suppress(MissingError):
                        api.untag(self._root, tag_of(step), settings=self._settings)
                    self.prune()
            except MissingError as error:
                # Only of a tag that a killed job left: its step is gone, or another timeline has that number.
                logger.info("the model of step %d is not exported: %s", step, error)
            except Exception as error:  # noqa: BLE001 - raised at the end of the training
                self._failures.append((step, error))
                logger.warning("the model of step %d was not exported: %s", step, error)

    def _make(self, step: int) -> bool:
        """Make the folder of a step; return whether it is there. It is not if `stop` was called meanwhile."""
        folder, work = folder_of(self._parent, step), self._parent / f".checkpoint-{step}"
        self._parent.mkdir(parents=True, exist_ok=True)
        # Left behind by a kill, or of a step that a newer timeline replaced.
        for stale in (folder, work):
            shutil.rmtree(stale, ignore_errors=True)
        if self._weights:
            api.export(self._root, work, to="safetensors", step=step, settings=self._settings)
        else:
            work.mkdir()
        self._complete(work, step)
        self._narrow(work)
        _sync(work)
        with self._lock:
            if self._is_stopped:
                return False
            work.rename(folder)
        _sync_folder(self._parent)
        self._known_steps.add(step)
        self._made.put(step)
        return True

    def _narrow(self, folder: Path) -> None:
        """Take from all files in a folder the permissions that files of the run do not give."""
        file_mode = self._settings.file_mode
        if file_mode is None:
            try:
                file_mode = os.stat(f"{self._root.removeprefix('file://')}/holdfast.json").st_mode
            except OSError:
                return  # The run is on no disk.
        denied = 0o666 & ~file_mode
        denied |= (denied & 0o444) >> 2
        for parent, _, names in os.walk(folder):
            for path in (Path(parent), *(Path(parent, name) for name in names)):
                mode = stat.S_IMODE(path.stat().st_mode)
                if mode & denied:
                    path.chmod(mode & ~denied)


def copy_files(source: Path, target: Path) -> None:
    """Copy all files and folders in a folder into another one."""
    shutil.copytree(source, target, dirs_exist_ok=True)


def _sync(folder: Path) -> None:
    """Make the files in a folder durable."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync_folder(Path(parent, name))
        _sync_folder(Path(parent))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

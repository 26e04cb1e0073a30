"""The saves of one process under Lightning: at once or in the background, and what is removed after them.

Lightning removes a checkpoint right after it has asked for the one that follows. In the background the new one is not
whole by then. So the removal waits for it, and does not happen if the save fails: what was saved is never lost by that.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import holdfast
from holdfast import SaveHandle, Settings
from holdfast.api import SaveReport, end_idle_threads
from holdfast.base.interrupts import GUARD, Latch
from holdfast.errors import CheckpointError, InvalidError, UnavailableError
from holdfast.integrations.lightning.contents import with_way_out
from holdfast.integrations.lightning.folders import CheckpointPath, local_path, remove, tidy

logger = logging.getLogger(__name__)

_AT_ONCE = ("hpc_ckpt_", ".temp.ckpt", ".lr_find_", ".scale_batch_size_")
"""How names begin of checkpoints that Lightning reads, or ends the job after, as soon as its call returns."""

Path = str | os.PathLike[str]

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class PendingSave:
    """A save in the background, and the removals that wait for it."""

    path: CheckpointPath
    handle: SaveHandle
    removals: list[Path] = field(default_factory=list)
    ended: Latch = field(default_factory=Latch)
    error: Exception | None = None

    def paths(self) -> list[str]:
        """Return the path that is saved, and those that are removed afterwards."""
        return [self.path.path, *map(local_path, self.removals)]


class SavesOfProcess:
    """Saves of one process, alone or as one of the ranks of a strategy."""

    def __init__(self, who: str, process_group: object, settings: Settings, skip: tuple[str, ...]) -> None:
        """Begin without saves.

        Args:
            who: The class that saves, for messages.
            process_group: As for `holdfast.save`.
            settings: How to save.
            skip: Names that are left out.
        """
        self._who, self._group, self._settings, self._skip = who, process_group, settings, skip
        self._last: PendingSave | None = None
        """The save in the background that began last, also after its end."""
        self._failures: list[Exception] = []
        self._in_flight: dict[PendingSave, None] = {}
        self._ends_at_exit = False
        self._folders: set[str] = set()
        """Folders in which it has saved or removed something."""

    def save(self, path: CheckpointPath, state: Mapping[str, object], skip: tuple[str, ...] = ()) -> None:
        """Save, and return once it is committed; `path.publish` is left to the caller.

        Raises:
            CheckpointError: The save failed.
        """
        self._call(holdfast.save, path, state, skip)
        with GUARD:
            self._last = None

    def begin(
        self, path: CheckpointPath, state: Mapping[str, object], skip: tuple[str, ...] = (), *, publishes: bool
    ) -> None:
        """Begin to save, and return once training may change the state.

        Args:
            path: Where it is saved.
            state: What is saved.
            skip: Names that are left out of this save.
            publishes: Whether this rank moves the checkpoint to its path.
        Raises:
            CheckpointError: The state or the call is wrong, or `Settings.failed_saves_max` saves in a row have failed.
        """
        if not self._ends_at_exit:
            self._ends_at_exit = True
            atexit.register(self._wait_at_exit)  # Fabric tears nothing down.
        pending = PendingSave(path, self._call(holdfast.async_save, path, state, skip))
        with GUARD:
            self._last = pending
            self._in_flight[pending] = None
        publish = path.publish if publishes else _nothing
        pending.handle.committed.add_done_callback(lambda committed: self._end(pending, committed, publish))

    def _call(
        self, verb: Callable[..., _Result], path: CheckpointPath, state: Mapping[str, object], skip: tuple[str, ...]
    ) -> _Result:
        """Call a verb of Holdfast that saves; its errors have a way out."""
        self._note(path.path)
        try:
            return verb(
                path.written_at,
                state,
                skip=[*self._skip, *skip],
                overwrite=path.is_replaced,
                process_group=self._group,
                settings=self._settings,
            )
        except CheckpointError as error:
            raise self._explained(error, path) from error.__cause__

    def remove(self, path: Path) -> None:
        """Remove a checkpoint once the save before this call is committed; keep it if that save failed."""
        with GUARD:
            last = self._last
            if last is not None and not last.ended.is_set():
                last.removals.append(path)
                return
        if last is not None and last.error is not None:
            self._keep(path, last)
            return
        self._note(local_path(path))
        remove(path)

    def await_ends(self, path: Path | None = None) -> None:
        """Wait until the saves in the background have ended, of all or of one path; raises nothing.

        A path that is removed after a save counts as one of it: what is saved there next must not be removed.
        """
        wanted = None if path is None else local_path(path)
        with GUARD:
            pending = [save for save in self._in_flight if wanted is None or wanted in save.paths()]
        for save in pending:
            with suppress(CheckpointError):
                # A lazy save is staged only after this thread has checked that the state did not change.
                save.handle.wait("staged")
            save.ended.wait()

    def wait(self) -> None:
        """Wait for every save in the background.

        Raises:
            CheckpointError: One of them failed, and no call has raised its error yet.
        """
        self.await_ends()
        with GUARD:
            failures, self._failures = self._failures, []
        while self._folders:
            tidy(self._folders.pop())
        if len(failures) > 1:
            raise failures[0] from ExceptionGroup(f"{len(failures)} saves failed", failures)
        if failures:
            raise failures[0]

    def end(self) -> None:
        """Wait, as `wait`, and end idle threads; while an error is handled, add a note to it, not raise another."""
        handled = sys.exception()
        try:
            self.wait()
        except CheckpointError as error:
            if handled is None:
                raise
            handled.add_note(f"a save in the background also failed: {error}")
        finally:
            end_idle_threads()  # Lightning's own tests, and those of its users, count what a training leaves.

    def _note(self, path: str) -> None:
        if "://" not in path:
            self._folders.add(os.path.dirname(path))

    def _end(self, pending: PendingSave, committed: Future[SaveReport], publish: Callable[[], None]) -> None:
        """End a save in the background, on the thread that committed it."""
        error = _error_of(committed)
        if error is not None:
            error = self._explained(error, pending.path)
            logger.error("%s: its save failed; it was written at %s", pending.path.path, pending.path.written_at)
        try:
            if error is None:
                publish()
        except UnavailableError as failure:
            error = failure
            logger.error("%s", error)
        with GUARD:
            pending.error = error
            if error is not None:
                self._failures.append(error)
        try:
            self._remove_after(pending)
        finally:
            with GUARD:
                self._in_flight.pop(pending, None)

    def _explained(self, error: Exception, path: CheckpointPath) -> Exception:
        """Return an error of a save with a way out, and a note on the hidden name that it gives."""
        if isinstance(error, InvalidError):
            error = with_way_out(error, self._who)
        if not path.is_replaced:
            error.add_note(f"{path.written_at} is the hidden name of {path.path} until that is whole")
        return error

    def _remove_after(self, pending: PendingSave) -> None:
        """Remove what waited for a save."""
        while True:
            with GUARD:
                if not pending.removals:
                    pending.ended.set()  # Under GUARD: whoever comes later removes by itself.
                    return
                path = pending.removals[0]
            if pending.error is not None:
                self._keep(path, pending)
            else:
                try:
                    remove(path)
                except Exception as error:  # noqa: BLE001 - of the file system of a URL, too; the next save goes on
                    logger.warning("%s: could not be removed: %s", os.fspath(path), error)
            with GUARD:
                pending.removals.pop(0)  # Only now: until then a save to this path waits.

    def _keep(self, path: Path, failed: PendingSave) -> None:
        logger.warning(
            "%s: stays, although Lightning asked to remove it: the save of %s after it failed",
            os.fspath(path),
            failed.path.path,
        )

    def _wait_at_exit(self) -> None:
        try:
            self.wait()
        except CheckpointError:
            pass  # The log has it, and nobody is left to raise to.


def is_needed_at_once(path: Path) -> bool:
    """Return whether Lightning needs a checkpoint to be durable when its call returns, by its name.

    Slurm's requeue ends the job after it. A spawned process, and the search for a learning rate, read it back.
    """
    return os.path.basename(os.fspath(path)).startswith(_AT_ONCE)


def _error_of(committed: Future[SaveReport]) -> Exception | None:
    error = committed.exception()
    return error if error is None or isinstance(error, Exception) else UnavailableError(f"the save ended: {error!r}")


def _nothing() -> None:
    """Do nothing: another rank moves the checkpoint."""

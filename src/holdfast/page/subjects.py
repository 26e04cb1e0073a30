"""The runs and checkpoints that a page shows. A run is read on a thread of its own: a silent store holds up no page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, TypeVar

from holdfast import api
from holdfast.errors import CheckpointError, InvalidError, MissingError, UnavailableError, shown_bytes
from holdfast.observers import Event, Progress
from holdfast.settings import Settings

_ANSWER_SECONDS, _DONE_SECONDS = 10.0, 0.5
_SAVES_AT_ONCE, _READING_SECONDS, _FRESH_SECONDS = 40, 2.0, 10.0
_OPENED_MAX, _RESULTS_MAX, _OPEN_MAX, _REMOVED_MAX = 4, 4, 16, 4096
Answer = TypeVar("Answer")


def shown_moment(unix_seconds: float) -> str:
    """Return a time for people; reports come from strangers, so a time out of range is cut."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(unix_seconds, 0), 1e11)))


class Subject:
    """A run, or one checkpoint."""

    def __init__(self, path: str, watch: api.RunWatch | None, settings: Settings) -> None:
        """Read nothing yet; `watch` is None for one checkpoint."""
        self.path, self.watch, self.settings = path, watch, settings
        self.removed: dict[str, float] = {}
        """When a step was first missed that an earlier listing had, on the wall clock."""
        self._facts: dict[str, Any] = {}
        self._run: api.RunRecord | None = None
        self._opened: dict[str, api.Checkpoint] = {}
        self._reports: dict[str, tuple[float, list[Any]]] = {}
        self._unanswered = f"{path}: the store has not answered; expected an answer. Try again later"
        self._thread = ThreadPoolExecutor(1, "holdfast-page")
        self._pending: Future[None] | None = None
        self._lock = Lock()

    def refresh(self) -> dict[str, Any]:
        """Return the facts about the run as last read: now, or earlier if the store does not answer in time."""
        with self._lock:
            if self._pending is None or self._pending.done():
                self._pending = self._thread.submit(self._read)
            pending = self._pending
        error: BaseException | None = UnavailableError(self._unanswered)
        if wait([pending], _ANSWER_SECONDS).done:
            error = pending.exception()
        if error is not None and not self._facts:
            raise error
        silent, facts = None if error is None else str(error), self._facts
        return {**facts, "silent": silent, "version": f"{facts['version']} {silent}"}

    def answer_of(self, read: Callable[[], Answer]) -> Answer:
        """Return the result of reading from the store of the subject.

        Raises:
            UnavailableError: The store does not answer in time.
        """
        pending = self._thread.submit(read)
        if wait([pending], _ANSWER_SECONDS).done:
            return pending.result()
        pending.cancel()
        raise UnavailableError(self._unanswered)

    def _read(self) -> None:
        assert self.watch is not None, "one checkpoint is not read again"
        if self.watch.has_other_places:
            self.watch = api.watch_run(self.path, events=self.watch.events.paths, settings=self.settings)
        watch, facts, run = self.watch, self._facts, self.watch.refresh()
        left = watch.read_saves(_SAVES_AT_ONCE, _READING_SECONDS)
        if run is not self._run:
            self._opened, self._reports = {}, {}  # Training may have gone back and saved a step again.
            facts = {**facts, "url": run.url, "run_id": run.run_id, "table": api.step_table(run)}
            names, now = {each.name for each in run.steps}, time.time()
            missed = self.removed | {each.name: now for each in facts.get("steps", ())} | self.removed
            gone = [(name, at) for name, at in missed.items() if name not in names]
            self.removed = dict(gone[-_REMOVED_MAX:])
        alerts, under_way = watch.alerts(api.AlertRules()), watch.under_way()
        free_bytes, agent = watch.free_bytes(), watch.agent()
        damaged = [*watch.events.damaged, *map(str, watch.unreadable.values())]
        shown_free = None if free_bytes is None else shown_bytes(free_bytes)
        self._run = run
        self._facts = {
            **facts, "steps": watch.facts(), "alerts": alerts, "under_way": under_way, "left": left,
            "writer": watch.writer, "free_bytes": free_bytes, "agent": agent,
            "has_events": bool(watch.events.paths), "as_of": time.time(),
            "damaged": damaged,
            # Ages are in minutes.
            "version": f"{watch.version} {alerts} {under_way} {agent} {damaged} {shown_free} {time.time() // 60}",
        }  # fmt: skip

    def checkpoint(self, step: str) -> api.Checkpoint:
        """Return the checkpoint of a step, `-` for the one checkpoint of the subject. The last few stay open.

        Raises:
            MissingError: The step was removed.
        """
        if step in self.removed:
            at = shown_moment(self.removed[step])
            raise MissingError(
                f"step {step} was removed at {at}, or a newer timeline left it behind; expected a listed one"
            )
        return self.answer_of(lambda: self.open(step))

    def open(self, step: str) -> api.Checkpoint:
        """Do the same without a time limit, on one thread at a time. A late checkpoint is open for the next visitor."""
        found = self._opened.pop(step, None)
        if found is None or found.is_overwritten:
            path = self.path if self.watch is None else self.watch.place_of(step)
            found = api.open_checkpoint(path, step=None if step == "-" else step, settings=self.settings)
            try:
                _ = found.tensors  # The index is read within the time limit.
            except CheckpointError:
                return found  # A page raises the error again.
        self._opened = dict([*self._opened.items(), (step, found)][-_OPENED_MAX:])
        return found

    def reports(self, step: str) -> list[Any]:
        """Return the reports of a checkpoint, read within the last seconds, and errors for unreadable ones."""
        at, found = self._reports.get(step, (-_FRESH_SECONDS, []))
        checkpoint = self.checkpoint(step)
        if checkpoint.manifest.attempt and time.monotonic() - at > _FRESH_SECONDS:
            number = None if step == "-" else checkpoint.step
            read = self.answer_of(lambda: [*api.reports(self.path, number, settings=self.settings)])
            found = [each for _, each in read]
            self._reports = {step: (time.monotonic(), found)}
        return found


def subjects_at(paths: Sequence[str], events: Sequence[str], settings: Settings) -> list[Subject]:
    """Return the runs and checkpoints at some paths; of a folder that is neither, the runs in it.

    Raises:
        MissingError: A path holds neither a run nor a checkpoint, nor a folder of runs.
    """
    found = []
    for path in paths:
        inside = [] if api.is_run(path, settings=settings) or not os.path.isdir(path) else sorted(os.listdir(path))
        below = [each for name in inside if api.is_run(each := os.path.join(path, name), settings=settings)]
        for each in below or [path]:
            is_run = api.is_run(each, settings=settings)
            watch = api.watch_run(each, events=events, settings=settings) if is_run else None
            found.append(Subject(each, watch, settings))
            if watch is None:
                found[-1].open("-")
    return found


class LongWork:
    """Long work on one thread, as an observer of its progress."""

    def __init__(self, name: str) -> None:
        """Begin nothing yet."""
        self.name, self.done_bytes, self.total_bytes, self.is_stopped = name, 0, 0, False
        self.future: Future[object] = Future()

    def on_event(self, event: Event) -> None:
        """Take the progress of the work; end the work if it is to stop."""
        if self.is_stopped:
            raise InvalidError(f"{self.name} was stopped; expected no stop. Begin again")
        if isinstance(event, Progress):
            self.done_bytes, self.total_bytes = event.done_bytes, event.total_bytes


class WorkQueue:
    """Runs long work, one at a time. The last results stay; an error goes to one visitor, and the next begins again."""

    def __init__(self) -> None:
        """Begin nothing yet."""
        self._thread, self._lock = ThreadPoolExecutor(1, "holdfast-page-work"), Lock()
        self._works: dict[str, LongWork] = {}

    def run(self, name: str, key: str, work_on: Callable[[LongWork], object], *, stop: bool) -> object:
        """Return the result of some work, or the `LongWork`: waiting, running or stopped.

        Args:
            name: Names the work for people.
            key: With the name, equal for the same work.
            work_on: Does the work, and reports progress to the observer that it gets.
            stop: Whether to stop the work.

        Raises:
            UnavailableError: Too many other works wait.
        """

        def done(work: LongWork) -> object:
            work.on_event(Progress(0, 0))
            return work_on(work)

        key = name + key
        with self._lock:
            work = self._works.pop(key, None)
            ended = [each for each, other in self._works.items() if other.future.done()]
            for each in ended[:-_RESULTS_MAX]:
                del self._works[each]
            if work is None or (work.is_stopped and not stop):
                if len(self._works) - len(ended) >= _OPEN_MAX:
                    raise UnavailableError(f"{name}: {_OPEN_MAX} other works wait; expected fewer. Try again later")
                work = LongWork(name)
                work.future = self._thread.submit(done, work)
            self._works[key] = work
        work.is_stopped |= stop
        if not wait([work.future], _DONE_SECONDS).done:
            return work
        if work.future.exception() is not None:
            with self._lock:
                self._works = {each: other for each, other in self._works.items() if other is not work}
            if work.is_stopped:
                return work
        return work.future.result()

"""Fault injection: the n-th operation of a store, a key-value store or the operating system fails, stalls or kills.

A wrapper counts the operations that pass through it and runs an action at the chosen one. The wrapped object is
unchanged, so tests run the real implementation in a real process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import Release
from holdfast.base.ports.store import Store, Upload
from holdfast.errors import CheckpointError

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """One operation that passed through a wrapper."""

    name: str
    """Method called, e.g. "fsync", "put_if_absent", "upload.write", "compare_set"."""

    subject: str
    """Its path or key; several keys are joined by ','; empty if unknown."""


Action = Callable[[FaultPoint], None]
"""What a fault does: raise, stall or kill. If it returns, the operation goes on."""


def fail_with(code: int) -> Action:
    """Return an action that raises `OSError` with this errno."""

    def act(operation: FaultPoint) -> None:
        raise OSError(code, os.strerror(code), operation.subject)

    return act


def raise_error(make: Callable[[str], CheckpointError]) -> Action:
    """Return an action that raises the result of `make`, such as an error class, called with a message."""

    def act(operation: FaultPoint) -> None:
        raise make(f"a fault was injected at {operation.name} of {operation.subject!r}")

    return act


def kill_process() -> Action:
    """Return an action that kills this process with SIGKILL, without cleanup, like the loss of a machine."""

    def act(operation: FaultPoint) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def stall_until(released: threading.Event, *, timeout_seconds: float = 60.0) -> Action:
    """Return an action that blocks the operation until `released` is set, or the timeout has passed."""

    def act(operation: FaultPoint) -> None:
        released.wait(timeout_seconds)

    return act


class Faults:
    """Counts operations of any thread and runs an action at the chosen one."""

    def __init__(
        self,
        action: Action | None = None,
        *,
        at: int = 1,
        names: Collection[str] | None = None,
        lasting: bool = False,
        after: bool = False,
    ) -> None:
        """Arm a fault.

        Args:
            action: What happens; None: operations are only recorded.
            at: Number of the operation that meets the fault, counted from 1.
            names: Names of the operations that count; None: all.
            lasting: Whether every later counted operation meets the fault too, until `heal`.
            after: Whether the operation is made first, so that only its reply is lost.
        """
        self._action = action
        self._at = at
        self._names = None if names is None else frozenset(names)
        self._lasting = lasting
        self._after = after
        self._lock = threading.Lock()
        self.seen: list[FaultPoint] = []
        """Every operation so far, counted or not, in order."""
        self.counted = 0
        """Number of operations so far that counted."""
        self.met = 0
        """How often the fault was met; 0 means that a test has tested nothing."""

    def heal(self) -> None:
        """Disarm the fault."""
        with self._lock:
            self._action = None

    def around(
        self, name: str, subject: str, call: Callable[[], _Result], *, always_done: bool = False, kind: str = ""
    ) -> _Result:
        """Make one operation, or meet the fault instead; with `always_done`, after the operation.

        It counts under its name, and under its kind if it has one.
        """
        operation = FaultPoint(name, subject)
        action = self._due(operation, kind)
        after = self._after or always_done
        if action is not None and not after:
            action(operation)
        result = call()
        if action is not None and after:
            action(operation)
        return result

    def _due(self, operation: FaultPoint, kind: str) -> Action | None:
        with self._lock:
            self.seen.append(operation)
            if self._names is not None and self._names.isdisjoint((operation.name, kind)):
                return None
            self.counted += 1
            due = self.counted >= self._at if self._lasting else self.counted == self._at
            if not due or self._action is None:
                return None
            self.met += 1
            return self._action


class FaultySyscalls:
    """Wraps an object whose methods take descriptors or paths, and injects a fault; pass it in place of that object.

    It remembers the paths passed to `open`, so operations on descriptors are recorded by path. An `open` that may make
    a file counts as `create` too.
    """

    def __init__(self, inner: object, faults: Faults) -> None:
        """Wrap `inner`."""
        self._inner = inner
        self._faults = faults
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self._inner, name)

        def call(*arguments: object, **options: object) -> object:
            subject = self._subject(arguments[0] if arguments else None, options.get("dir_fd"))
            if name == "close" and isinstance(arguments[0], int):
                self._paths.pop(arguments[0], None)
            flags = arguments[1] if name == "open" else 0
            kind = "create" if isinstance(flags, int) and flags & os.O_CREAT else ""
            # A `close` that fails releases the descriptor too.
            result = self._faults.around(
                name, subject, lambda: method(*arguments, **options), always_done=name == "close", kind=kind
            )
            if name == "open" and isinstance(result, int):
                self._paths[result] = subject
            return result

        return call

    def _subject(self, first: object, folder: object) -> str:
        if isinstance(first, int):
            return self._paths.get(first, "")
        above = self._paths.get(folder, "") if isinstance(folder, int) else ""
        return f"{above}/{first}" if above else str(first)


class FaultyStore(ForwardingStore):
    """A store with a fault. Operations: the port's methods, and `upload.write`, `.complete` and `.abort`.

    A fault at `list` is met at the call, not at the first entry.
    """

    def __init__(self, inner: Store, faults: Faults) -> None:
        """Wrap `inner`."""
        super().__init__(inner)
        self._faults = faults

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        return self._faults.around(name, subject, call)

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Begin an upload that meets the same fault."""
        inner = super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)
        return _FaultyUpload(inner, key, self._faults)


class _FaultyUpload:
    def __init__(self, inner: Upload, key: str, faults: Faults) -> None:
        self._inner = inner
        self._key = key
        self._faults = faults

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        return self._inner.room(offset, length_bytes)

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        begun = False

        def write() -> None:
            nonlocal begun
            begun = True
            self._inner.write(offset, data, release)

        try:
            self._faults.around("upload.write", self._key, write)
        finally:
            if release is not None and not begun:
                release()

    def complete(self, total_bytes: int | None = None) -> None:
        self._faults.around("upload.complete", self._key, lambda: self._inner.complete(total_bytes))

    def abort(self) -> None:
        self._faults.around("upload.abort", self._key, self._inner.abort)


class FaultyKeyValueStore:
    """A key-value store with a fault. Operations: the port's methods."""

    def __init__(self, inner: KeyValueStore, faults: Faults) -> None:
        """Wrap `inner`."""
        self._inner = inner
        self._faults = faults

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Set a key."""
        self._faults.around("set", key, lambda: self._inner.set(key, value, timeout_seconds))

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of all keys."""
        return self._faults.around("get_many", ",".join(keys), lambda: self._inner.get_many(keys, timeout_seconds))

    def present(self, *keys: str) -> bool:
        """Return whether all keys are set."""
        return self._faults.around("present", ",".join(keys), lambda: self._inner.present(*keys))

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """Add to a counter."""
        return self._faults.around("add", key, lambda: self._inner.add(key, amount, timeout_seconds))

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """Set a key if it holds `expected`."""
        return self._faults.around(
            "compare_set", key, lambda: self._inner.compare_set(key, expected, desired, timeout_seconds)
        )

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return once every key is set."""
        self._faults.around("wait", ",".join(keys), lambda: self._inner.wait(keys, timeout_seconds))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys."""
        self._faults.around("delete", ",".join(keys), lambda: self._inner.delete(keys))

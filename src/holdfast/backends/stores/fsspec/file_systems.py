"""The file systems of one URL in this process: made when needed, lent to one call at a time, renewed after a failure.

Most file systems of fsspec hold one connection that two threads must not share, and none of them is safe in a process
that was forked. A connection that broke stays broken: fsspec does not connect again.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from holdfast.backends.stores.fsspec.address import FileSystemAddress
from holdfast.backends.stores.fsspec.refusals import not_opened, refusal
from holdfast.backends.stores.wrappers.time_limits import TimeLimits
from holdfast.backends.stores.wrappers.timed_calls import TIMED_CALLS
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.settings import Settings

_Result = TypeVar("_Result")

_REQUESTS_PER_CALL = 4
"""Requests that a call makes one after the other, each with a time limit of its own."""


class FileSystems:
    """Lends file systems to calls. Any thread may call, also in a process that was forked."""

    def __init__(self, address: FileSystemAddress, settings: Settings) -> None:
        """Remember where; does no I/O and loads nothing."""
        self._address = address
        self._limits = TimeLimits.of(settings.object_store)
        self._root: str | None = None
        """Path of the folder in the file system."""
        self._begin()
        _ALL.add(self)

    def _begin(self) -> None:
        self._idle: deque[Any] = deque()
        self._shared: Any = None
        self.trial = threading.Lock()
        """Held by the thread that tries what the file system can do."""

    def _forget_parent(self) -> None:
        """Begin anew in a forked child: what the parent made stays as it is, for the parent still uses it."""
        _inherited.append((self._idle, self._shared))
        self._begin()

    def use(self, doing: str, where: str, call: Callable[[Any], _Result], *, writes: bool = False) -> _Result:
        """Return what a call of a file system returns.

        Args:
            doing: The operation as a verb, for messages.
            where: Store and key, for messages.
            call: Gets the file system, which no other call has meanwhile.
            writes: Whether it stores an object: what is absent then is a folder that another process removed.
        Raises:
            CheckpointError: It failed. No exception of the file system is chained to it.
        """
        system = self._take()
        failure: CheckpointError
        try:
            result = call(system)
        except CheckpointError:
            self._give_back(system)
            raise
        except (AssertionError, NameError):
            raise  # A mistake in a program, which no other try mends.
        except Exception as error:  # noqa: BLE001 - file systems raise dozens of kinds; all are translated
            failure = refusal(doing, where, error, writes=writes)
        else:
            self._give_back(system)
            return result
        if isinstance(failure, UnavailableError):
            # Its connection may be broken, and then most likely those of the others are.
            self._idle.clear()
            self._shared = None
        else:
            self._give_back(system)
        # Raised out here, so that no traceback shows the text of the file system.
        raise failure

    def use_in_time(self, doing: str, where: str, moved_bytes: int, call: Callable[[Any], _Result]) -> _Result:
        """Return what a call returns, as `use`; give the call up when its time is over, for fsspec has no time limits.

        Args:
            doing, where, call: As for `use`. The call touches no memory that is used again.
            moved_bytes: Bytes of content that it sends or receives.
        Raises:
            CheckpointError: It failed.
        """
        return self.in_time(where, moved_bytes, lambda: self.use(doing, where, call))

    def in_time(self, where: str, moved_bytes: int, act: Callable[[], _Result]) -> _Result:
        """Return what an action returns that uses file systems; give it up when its time is over."""
        seconds = _REQUESTS_PER_CALL * self._limits.request_seconds(moved_bytes)
        return TIMED_CALLS.run(act, seconds, where)

    def path(self, key: str) -> str:
        """Return the path of a key in the file system; the root's for an empty one.

        Raises:
            CheckpointError: There is no such file system, or it cannot be reached.
        """
        if self._root is None:
            self._give_back(self._take())
        assert self._root is not None, "who makes a file system learns its root"
        return f"{self._root.rstrip('/')}/{key}" if key else self._root

    def _take(self) -> Any:
        shared = self._shared
        if shared is not None:
            return shared
        with suppress(IndexError):
            return self._idle.pop()
        system = self._new()
        if system.async_impl:
            # It runs all calls on one thread of its own, so all threads share it.
            self._shared = system
        return system

    def _give_back(self, system: Any) -> None:
        if not system.async_impl:
            self._idle.append(system)

    def _new(self) -> Any:
        core: Any = importlib.import_module("fsspec.core")
        failure: CheckpointError
        try:
            # Not from the cache of fsspec: other users of a file system there may close it, or cache its listings.
            system, self._root = core.url_to_fs(self._address.url, skip_instance_cache=True)
        except Exception as error:  # noqa: BLE001 - as above
            failure = not_opened(self._address.protocol, self._address.url, error)
        else:
            # As an option of the maker it would be refused by some, which pass their options on.
            for holder in filter(None, (system, getattr(system, "dircache", None))):
                if hasattr(holder, "use_listings_cache"):
                    holder.use_listings_cache = False
            return system
        raise failure


_ALL: weakref.WeakSet[FileSystems] = weakref.WeakSet()
_inherited: list[object] = []
"""File systems of the parent process. They are never freed: that would end connections that the parent uses."""


def _forget_parents() -> None:
    for each in list(_ALL):
        each._forget_parent()


os.register_at_fork(after_in_child=_forget_parents)

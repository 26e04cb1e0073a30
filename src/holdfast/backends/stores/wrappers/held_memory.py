"""Memory of a caller that several tries of one request may read: it is given back once the last of them is over."""

from __future__ import annotations

import threading

from holdfast.base.ports.readable import Release


class HeldMemory:
    """Counts who may still read memory; calls `release` once nobody may. Any thread may call.

    A request that was given up may still send the memory. So the memory is not filled anew before that request is over,
    also if another try has succeeded meanwhile.
    """

    def __init__(self, release: Release) -> None:
        """Hold the memory once, for the maker."""
        self._release = release
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> Release:
        """Hold the memory once more; return what lets it go. Only its first call counts."""
        with self._lock:
            self._holders += 1
        is_held = True

        def let_go() -> None:
            nonlocal is_held
            with self._lock:
                was_held, is_held = is_held, False
            if was_held:
                self.let_go()

        return let_go

    def let_go(self) -> None:
        """Give up one hold."""
        with self._lock:
            self._holders -= 1
            is_free = not self._holders
        if is_free:
            self._release()

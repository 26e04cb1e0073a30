"""The uploads of a save into a store that lends its memory: the copies of the state go straight there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.base.ports.store import Upload
from holdfast.base.types.plan import PlannedPack


class PackRooms:
    """One upload for each pack. The thread that copies and the thread that writes share them, in whatever order."""

    def __init__(self, begin: Callable[[PlannedPack], Upload]) -> None:
        """Begin no upload yet.

        Args:
            begin: Begins the upload of a pack.
        """
        self._begin, self._uploads = begin, dict[str, Upload]()
        # Threads of saves alone take the lock: a handler of a signal runs on none of them.
        self._lock = threading.Lock()

    def of(self, pack: PlannedPack) -> Upload:
        """Return the upload of a pack; the first call begins the upload.

        Raises:
            CheckpointError: As `Store.upload`.
        """
        with self._lock:
            if pack.key not in self._uploads:
                self._uploads[pack.key] = self._begin(pack)
            return self._uploads[pack.key]

    def room(self, pack: PlannedPack, offset: int, window_bytes: int) -> memoryview | None:
        """Return the memory of one window of a pack; None if the copy needs other memory."""
        count = min(window_bytes, pack.bytes - offset)
        return None if pack.plan.is_coded or count <= 0 else self.of(pack).room(offset, count)

    def abort(self) -> None:
        """Abort the uploads that are not complete, after a failure."""
        with self._lock:
            uploads = list(self._uploads.values())
        for upload in uploads:
            upload.abort()

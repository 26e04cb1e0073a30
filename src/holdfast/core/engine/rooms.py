"""The uploads of a save into a store that lends its memory: the copies of the state go straight there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from holdfast.base.ports.store import Upload
from holdfast.base.types.plan import PlannedPack
from holdfast.errors import CheckpointError, UnavailableError


class PackRooms:
    """One upload for each pack that is not coded. The thread that copies and the thread that writes share them.

    All are begun at once, on one thread, so no lock is needed: a handler of a signal may give the save up meanwhile.
    """

    def __init__(self, begin: Callable[[PlannedPack], Upload], packs: Iterable[PlannedPack]) -> None:
        """Begin the uploads.

        Args:
            begin: Begins the upload of a pack.
            packs: The packs of a save.
        Raises:
            CheckpointError: An upload could not be begun; nothing of the others is left.
        """
        self._uploads: dict[str, Upload] = {}
        try:
            for pack in packs:
                if not pack.plan.is_coded:
                    self._uploads[pack.key] = begin(pack)
        except BaseException:
            self.abort()
            raise

    def of(self, pack: PlannedPack) -> Upload:
        """Return the upload of a pack.

        Raises:
            UnavailableError: The save was given up.
        """
        upload = self._uploads.get(pack.key)
        if upload is None:
            raise UnavailableError(f"{pack.key}: the save was given up before this pack was written")
        return upload

    def room(self, pack: PlannedPack, offset: int, window_bytes: int) -> memoryview | None:
        """Return the memory of one window of a pack; None if the copy needs other memory."""
        upload, count = self._uploads.get(pack.key), min(window_bytes, pack.bytes - offset)
        return None if upload is None or count <= 0 else upload.room(offset, count)

    def abort(self) -> None:
        """Abort the uploads that are not complete. Copies under way end in memory that nothing names any more."""
        uploads, self._uploads = self._uploads, {}
        for upload in uploads.values():
            with suppress(CheckpointError):  # The files of a failed save are removed by key too.
                upload.abort()

"""Whether the near tier has room for a step. If not, a step that is due at the root is saved straight there."""

from __future__ import annotations

from concurrent.futures import Future

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.names import step_of_pack
from holdfast.errors import CheckpointError, UnavailableError, first_three, shown_bytes
from holdfast.stored.repository.catalog import step_folders

_PROBE = "near-room-probe.json"


class NearRoom:
    """What rank 0 knows of the room of a near tier. The folder is one file system for all ranks."""

    def __init__(self, store: Store, bytes_max: int | None) -> None:
        """Look at nothing yet.

        Args:
            store: The near tier.
            bytes_max: Most bytes of all files there; None for what the file system holds.
        """
        self._store, self._bytes_max = store, bytes_max
        self._step_bytes = 0
        """Bytes that the last step wrote."""
        self._failure = ""
        """Why the last save into the near tier failed; empty if the save did not fail."""

    def note_saved(self, manifest: Manifest) -> None:
        """Take note of the size of a step that is near."""
        self._step_bytes = sum(file.bytes for file in manifest.files if step_of_pack(file.name) is None)

    def note_end(self, ended: Future[SaveReport]) -> None:
        """Take note of the end of a save into the near tier."""
        error = ended.exception()
        if error is not None or ended.result().tier == "near":
            self._failure = str(error) if isinstance(error, UnavailableError) else ""

    def why_not(self) -> str:
        """Return why the next step has no place near; empty if the near tier takes the step."""
        try:
            lack = self._lack()
            if lack:
                held = first_three(step_folders(self._store))
                return f"{self._store.url} {lack}; it holds steps [{held}]"
            if self._failure:
                # The failure may be over, as after a full disk.
                self._store.put(_PROBE, bytes(4096))
                self._store.delete([_PROBE])
        except CheckpointError as error:
            return f"the near tier fails: {self._failure or error}"
        return ""

    def _lack(self) -> str:
        free = self._store.free_bytes()
        if free is not None and free < self._step_bytes:
            return f"has {shown_bytes(free)} free, and a step needs {shown_bytes(self._step_bytes)}"
        used = 0 if self._bytes_max is None else sum(entry.bytes for entry in self._store.list(""))
        if self._bytes_max is not None and used + self._step_bytes > self._bytes_max:
            needed = f", and a step needs {shown_bytes(self._step_bytes)}" if self._step_bytes else ""
            return f"has {shown_bytes(used)} of Tier(bytes_max={shown_bytes(self._bytes_max)}){needed}"
        return ""

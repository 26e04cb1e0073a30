"""Recognises and lists DeepSpeed checkpoints: chooses the tag folder and its kind."""

from __future__ import annotations

from holdfast.backends.foreign.deepspeed.folder import find_prefix, read_folder
from holdfast.backends.foreign.deepspeed.listing import list_zero
from holdfast.backends.foreign.deepspeed.universal import list_universal
from holdfast.base.ports.readable import Readable
from holdfast.base.types.listing import ForeignListing
from holdfast.errors import MissingError


class DeepSpeedFormat:
    """Lists checkpoints of DeepSpeed's engine, and universal folders, in place."""

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether a tag folder was named, or a folder whose `latest` or `latest_universal` names one."""
        return not name and find_prefix(files) is not None

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return the content of the tag folder."""
        prefix = find_prefix(files)
        if prefix is None:
            raise MissingError(
                f"{files.url}: no files of a DeepSpeed checkpoint; expected a tag folder, or a latest file beside one"
            )
        folder = read_folder(files, prefix)
        return list_universal(files, folder) if folder.is_universal else list_zero(files, folder)

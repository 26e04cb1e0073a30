"""Requires that another system's files equal their own checksums, before their bytes get digests of Holdfast."""

from __future__ import annotations

from holdfast.errors import CorruptError
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.verify_foreign import ListedVerification


def require_checksums(source: Checkpoint) -> None:
    """Refuse a checkpoint with bytes that differ from a checksum in its own files; reads all bytes that have one.

    Raises:
        CorruptError: Names file, byte range and tensor.
        CheckpointError: A file cannot be read.
    """
    verification = source.verification()
    if isinstance(verification, ListedVerification):
        for damage in verification.checksum_damages():
            tensor = f"{damage.fqn}: " if damage.fqn is not None else ""
            raise CorruptError(
                f"{source.url}: {damage.file}, bytes {damage.start}–{damage.stop}: {tensor}{damage.message}. "
                "Nothing was written. Read another copy"
            )

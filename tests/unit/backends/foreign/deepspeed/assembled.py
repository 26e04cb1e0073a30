"""A listed tensor put together by plain reads: what a listing says, judged without the machine that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.foreign.deepspeed.reader import DeepSpeedFormat
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import run_boxes
from holdfast.base.types.listing import ForeignListing, ListedPiece


def listing_of(folder: Path) -> ForeignListing:
    """Return what the format lists in a folder, which it must recognise."""
    files = ForeignFiles(folder)
    assert DeepSpeedFormat().recognises(files, "")
    return DeepSpeedFormat().listing(files, "")


def assembled(folder: Path, listing: ForeignListing, fqn: str) -> NDArray[np.generic]:
    """Return a tensor; its pieces must cover it exactly once, and copies of it must hold the same."""
    stored = listing.aliases.get(fqn, fqn)
    found, count = _filled(folder, listing, stored, listing.pieces[stored])
    assert (count == 1).all(), f"{fqn}: elements are listed {sorted(set(count.flatten().tolist()))} times"
    copies, count = _filled(folder, listing, stored, listing.replicas.get(stored, ()))
    assert np.array_equal(copies[count > 0].view(np.uint8), found[count > 0].view(np.uint8)), f"{fqn}: copies differ"
    return found


def _filled(
    folder: Path, listing: ForeignListing, fqn: str, pieces: Sequence[ListedPiece]
) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    spec = listing.tensors[fqn]
    dtype = np.dtype(DTYPES[spec.dtype].numpy)
    found, count = np.zeros(spec.global_shape, dtype), np.zeros(spec.global_shape, np.int64)
    for piece in pieces:
        path = folder / piece.file
        assert path.stat().st_size == listing.files[piece.file]
        elements = np.fromfile(path, dtype, piece.region.numel, offset=piece.offset)
        at = 0
        for box in run_boxes(piece.region, spec.global_shape, 0, piece.region.numel):
            where = box.relative_to((0,) * len(spec.global_shape))
            found[where] = elements[at : at + box.numel].reshape(box.shape)
            count[where] += 1
            at += box.numel
    return found, count

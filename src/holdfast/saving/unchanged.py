"""Whether pieces still hold what was saved of them, found out from as few of their bytes as will do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from holdfast.engine.nonfinite import NonFinite
from holdfast.engine.stream import Scratch, chunk_digests
from holdfast.format.digest import digest_of
from holdfast.geometry.chunking import DIGEST_BYTES
from holdfast.ports.framework import Source
from holdfast.settings import PAGE_BYTES
from holdfast.types.plan import PackItem, Piece


def first_page_digests(items: Sequence[PackItem], sources: Sequence[Source], buffer: memoryview) -> list[bytes]:
    """Return a digest of the first page of each piece: where it is another, a piece has changed.

    What is trained changes everywhere, so that this little tells nearly all of it from what is frozen.

    Args:
        items: The pieces, none empty.
        sources: Bytes by shard number.
        buffer: Room for a page at least.
    """
    heads: list[bytes] = []
    together = len(buffer) // PAGE_BYTES
    for first in range(0, len(items), together):
        some = items[first : first + together]
        pages = [buffer[PAGE_BYTES * at :][: min(item.bytes, PAGE_BYTES)] for at, item in enumerate(some)]
        with ExitStack() as copies:
            for item, page in zip(some, pages, strict=True):
                ticket = sources[item.shard_number].copy_into(item.region, 0, len(page), page)
                # Whatever fails, the others are waited for; of the one that failed nobody can tell, so that whoever
                # lent the buffer retires it.
                copies.callback(ticket.wait)
        heads += map(digest_of, pages)
    return heads


def is_unchanged(
    item: PackItem,
    source: Source,
    piece: Piece,
    buffer: memoryview,
    nonfinite: NonFinite | None,
) -> bool:
    """Return whether every chunk of a piece hashes to what is stored of it; the first that does not ends it.

    Args:
        item: The piece.
        source: Its bytes.
        piece: What is stored.
        buffer: Room for copies.
        nonfinite: Looks at what is hashed.
    """
    found, digests = chunk_digests(item, Scratch(buffer), piece.chunk_bytes, source, nonfinite), piece.digests
    return all(each == digests[DIGEST_BYTES * n :][:DIGEST_BYTES] for n, each in enumerate(found))

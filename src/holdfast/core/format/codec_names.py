"""The codecs of this version of the format. The set is closed, so an unknown name is known to be of a newer version."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.base.ports.codec import Base
from holdfast.base.types.manifest import FORMAT_MAJOR, FORMAT_MINOR_MAX
from holdfast.errors import InvalidError

CODEC_BASES: Mapping[str, Base] = {
    "dictionary": "none",
    "planes": "none",
    "residual": "pair",
    "sparse": "none",
    "zstd": "none",
}
"""Every codec by its name, which is frozen, with what its chunks are coded against."""


def needs_pair(codec: str) -> bool:
    """Return whether a codec needs bytes of a paired tensor; False for an unknown one."""
    return CODEC_BASES.get(codec) == "pair"


def require_known_codecs(names: Collection[str], where: str) -> None:
    """Refuse codecs that this version of the format does not have. Nothing is damaged: a newer Holdfast wrote them.

    Raises:
        InvalidError: The message names the first such codec.
    """
    for name in names:
        if name not in CODEC_BASES:
            raise InvalidError(
                f"{where}: chunks are coded by {name[:80]!r}; this Holdfast reads format "
                f"{FORMAT_MAJOR}.{FORMAT_MINOR_MAX} with {', '.join(CODEC_BASES)}. Read it with a newer Holdfast"
            )


def used_codecs(codecs: Sequence[str], numbers: bytes) -> tuple[tuple[str, ...], bytes]:
    """Return the codecs that chunks use, ascending, and the number of the codec of each chunk among them.

    Args:
        codecs: Names of codecs.
        numbers: For each chunk 0 if it is stored raw, else the number of its codec in `codecs`, from 1 on.
    """
    used = tuple(sorted({codecs[number - 1] for number in set(numbers) if number}))
    if used == tuple(codecs):
        return used, bytes(numbers)
    renumbered = {name: number for number, name in enumerate(used, 1)}
    table = bytes([0, *(renumbered.get(name, 0) for name in codecs)])
    return used, numbers.translate(table.ljust(256, b"\0"))

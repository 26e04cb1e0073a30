"""Names of files and folders on storage. It is a closed set, so that no stored text is used as a path unchecked."""

from __future__ import annotations

import re
from numbers import Integral
from typing import TypeVar

from holdfast.base.types.plan import CODED_FOLDER
from holdfast.core.format.digest import hex_digest_of
from holdfast.errors import InvalidError

FILE_SCHEME = "file://"
RUN_FILE = "holdfast.json"
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
OVERVIEW_FILE = "overview.msgpack"
PACK_SUFFIX = ".safetensors"
EPOCHS_FOLDER = "epochs/"
PARTS_FOLDER = "parts/"
PARITY_FOLDER = "parity/"
"""Parity of attempts, in the folder of a node of peers. The store of all nodes lists this folder alone by its name."""

SUPERSEDED_FOLDER = "superseded/"
COPYING_FOLDER = "copying/"
COPY_CLAIM_FILE = f"{COPYING_FOLDER}run.json"

_STEP_FOLDER = re.compile(r"step-(\d{12})", re.ASCII)
_ATTEMPT_FOLDER = re.compile(r"[0-9a-f]{16}")
_PACK = re.compile(r"(?:step-(\d{12})/[0-9a-f]{16}/)?(?:enc/|(coded/))?r(\d{5})(?:-\d{1,6})?\.safetensors", re.ASCII)
_LINK = re.compile(r"step-\d{12}\.[0-9a-f]{16}\.(?:(?:enc|coded)\.)?r\d{5}(?:-\d{1,6})?\.link", re.ASCII)
_PART = re.compile(r"parts/r(\d{5})\.msgpack", re.ASCII)
_EPOCH = re.compile(r"(\d{12})(\.json|\.accepted\.json|\.beat)", re.ASCII)
_SUPERSEDED = re.compile(r"superseded/(\d{12})\.([0-9a-f]{16})\.json", re.ASCII)
_STEP_AND_DIGEST = re.compile(r"(\d{1,12})@([0-9a-f]{4,32})", re.ASCII)
_INDEX = re.compile(r"index-\d{5}\.msgpack", re.ASCII)

STEP_MAX = 10**12 - 1
"""Largest step: a folder name has 12 digits."""

EPOCH_MAX = 10**12 - 1
"""Largest epoch: the name of its record has 12 digits."""

_DRAW_DIGITS = 10

WORLD_SIZE_MAX = 100_000
"""Largest number of ranks: a file name has 5 digits for the rank."""


def step_folder(step: int) -> str:
    """Return the folder of a step, with its trailing slash."""
    return f"step-{step:012d}/"


def step_of_folder(name: str) -> int | None:
    """Return the step of a folder name, or None if it is no step folder."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def epoch_key(number: int) -> str:
    """Return the key of the record of an epoch."""
    return f"{EPOCHS_FOLDER}{number:012d}.json"


def accepted_key(number: int) -> str:
    """Return the key of the list of steps that an epoch accepted."""
    return f"{EPOCHS_FOLDER}{number:012d}.accepted.json"


def beat_key(number: int) -> str:
    """Return the key of an epoch's heartbeat."""
    return f"{EPOCHS_FOLDER}{number:012d}.beat"


def epoch_of_key(key: str) -> int | None:
    """Return the epoch of a key under `epochs/`, or None if the key is unknown."""
    match = _EPOCH.fullmatch(key.removeprefix(EPOCHS_FOLDER))
    return int(match[1]) if match else None


def manifest_key(step: int) -> str:
    """Return the key of the manifest in the folder of a step, under the root of the run."""
    return step_folder(step) + MANIFEST_FILE


def superseded_key(step: int, digest: str) -> str:
    """Return the key of a manifest that made room for a manifest of a newer timeline.

    Args:
        step: Its step.
        digest: Its digest.
    """
    return f"{SUPERSEDED_FOLDER}{step:012d}.{digest[:16]}.json"


def aside_key(step: int, draw: bytes) -> str:
    """Return the key of a manifest that is being removed or replaced; readers take it for a superseded one.

    Args:
        step: Its step.
        draw: Five random bytes, so that no two calls use one key.
    """
    return f"{SUPERSEDED_FOLDER}{step:012d}.{draw.hex()}{_check_digits(draw)}.json"


def is_aside(key: str) -> bool:
    """Return whether a key was made by `aside_key`, rather than from the digest of a manifest."""
    named = superseded_in(key)
    return named is not None and named[1][_DRAW_DIGITS:] == _check_digits(bytes.fromhex(named[1][:_DRAW_DIGITS]))


def _check_digits(draw: bytes) -> str:
    # A name with the digest of a manifest has these digits once in 16 million.
    return hex_digest_of(b"aside" + draw)[: 16 - _DRAW_DIGITS]


def manifest_keys(step: int, digest: str) -> tuple[str, str]:
    """Return where a manifest may be stored, in the order to read.

    The folder first: a manifest that makes room for a newer timeline is copied before it leaves the folder.
    """
    return manifest_key(step), superseded_key(step, digest)


def superseded_in(key: str) -> tuple[int, str] | None:
    """Return step and first 16 digits of the digest of a superseded manifest; None for any other key."""
    match = _SUPERSEDED.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def is_attempt_folder(name: str) -> bool:
    """Return whether a name is that of an attempt's folder."""
    return _ATTEMPT_FOLDER.fullmatch(name) is not None


def part_name(rank: int) -> str:
    """Return the name of a rank's part inside the attempt's folder."""
    return f"{PARTS_FOLDER}r{rank:05d}.msgpack"


def index_name(number: int) -> str:
    """Return the name of one file of the merged index inside the attempt's folder."""
    return f"index-{number:05d}.msgpack"


def is_pack_name(name: str) -> bool:
    """Return whether a name is that of a pack inside an attempt's folder."""
    match = _PACK.fullmatch(name)
    return match is not None and match[1] is None


def is_coded_pack_name(name: str) -> bool:
    """Return whether a name is that of a pack of coded pieces, of this or another step."""
    # A manifest names up to hundreds of thousands of packs, most often none of them coded.
    match = _PACK.fullmatch(name) if CODED_FOLDER in name else None
    return match is not None and match[2] is not None


def step_pack_name(step: int, attempt: str, name: str) -> str:
    """Return the path of a pack from the root of the run, by which other steps refer to it."""
    return f"{step_folder(step)}{attempt}/{name}"


def step_of_pack(name: str) -> int | None:
    """Return the step in a pack's path from the root; None if the name is no such path."""
    match = _PACK.fullmatch(name)
    return int(match[1]) if match and match[1] else None


def link_name(pack: str) -> str:
    """Return the name, inside an attempt's folder, of the link to a pack of another step.

    It does not end like a pack: readers of safetensors files that list the folder would take it for one of this step.

    Args:
        pack: Path of the pack from the root of the run.
    """
    assert step_of_pack(pack) is not None, pack
    return pack.removesuffix(PACK_SUFFIX).replace("/", ".") + ".link"


def is_link_name(name: str) -> bool:
    """Return whether a name is that of a link to a pack of another step, inside an attempt's folder."""
    return _LINK.fullmatch(name) is not None


def file_url(path: str) -> str:
    """Return the URL of a local file: the name of a pack that is imported by reference."""
    return FILE_SCHEME + path


def is_file_url(name: str) -> bool:
    """Return whether a name is the URL of a local file."""
    path = name.removeprefix(FILE_SCHEME)
    return path != name and path.startswith("/") and "\0" not in path and not {"", ".", ".."} & set(path.split("/")[1:])


def is_part_name(name: str) -> bool:
    """Return whether a name is that of a part inside an attempt's folder."""
    return _PART.fullmatch(name) is not None


def is_index_name(name: str) -> bool:
    """Return whether a name is that of an index file inside an attempt's folder."""
    return _INDEX.fullmatch(name) is not None


def rank_of_part(name: str) -> int:
    """Return the rank that wrote a part, from its name."""
    match = _PART.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def is_attempt_file(name: str) -> bool:
    """Return whether a name is that of any file inside an attempt's folder."""
    is_listed = is_pack_name(name) or is_part_name(name) or is_index_name(name)
    return is_listed or is_link_name(name) or name == OVERVIEW_FILE


def rank_of_pack(name: str) -> int:
    """Return the rank that wrote a pack of this or another step, from its name."""
    match = _PACK.fullmatch(name)
    assert match is not None, name
    return int(match[3])


def is_step(step: object) -> bool:
    """Return whether a value is a whole number in the range of steps."""
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= STEP_MAX


_Step = TypeVar("_Step")


def plain_step(step: _Step) -> _Step | int:
    """Return an integer of another type than int, as numpy's are, as an int; anything else as it is."""
    return int(step) if isinstance(step, Integral) and not isinstance(step, int) else step


def require_step(step: object) -> int:
    """Return a step as an int, and refuse what is no step.

    Raises:
        InvalidError: It is not a whole number, or out of range.
    """
    number = plain_step(step)
    if not is_step(number):
        kind = type(step).__name__
        hint = "" if isinstance(step, int) or not hasattr(step, "__int__") else ". Pass int(step)"
        raise InvalidError(f"step={str(step)[:80]!r} ({kind}); expected a whole number from 0 to {STEP_MAX}{hint}")
    assert isinstance(number, int), "is_step lets only integers pass"
    return number


def is_superseded_name(name: str) -> bool:
    """Return whether a name is a step with digits of a digest, such as `300@1f2e`."""
    return _STEP_AND_DIGEST.fullmatch(name) is not None


def step_and_digest(step: object) -> tuple[int, str]:
    """Return the step and the first digits of the manifest's digest in `300` or `300@1f2e`; no digits in the first.

    Raises:
        InvalidError: It is neither.
    """
    if isinstance(step, str):
        match = _STEP_AND_DIGEST.fullmatch(step)
        if match is None:
            raise InvalidError(
                f"step={step[:80]!r}; expected a whole number, or for a superseded step its number, '@' and at least 4 "
                "digits of its digest, as `holdfast ls` lists it: 300@1f2e"
            )
        return int(match[1]), match[2]
    return require_step(step), ""

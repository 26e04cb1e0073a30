"""Names of files and folders on storage: a closed set, so that data never becomes a path."""

from __future__ import annotations

import re

from holdfast.errors import InvalidError

RUN_FILE = "holdfast.json"
MANIFEST_FILE = "manifest.json"
OVERVIEW_FILE = "overview.msgpack"
EPOCHS_FOLDER = "epochs/"

_STEP_FOLDER = re.compile(r"step-(\d{12})", re.ASCII)
_ATTEMPT_FOLDER = re.compile(r"[0-9a-f]{16}")
_PACK = re.compile(r"(?:enc/)?r(\d{5})(?:-\d{1,6})?\.safetensors", re.ASCII)
_STEP_PACK = re.compile(r"step-(\d{12})/[0-9a-f]{16}/(?:enc/)?r(\d{5})(?:-\d{1,6})?\.safetensors", re.ASCII)
_PART = re.compile(r"parts/r(\d{5})\.msgpack", re.ASCII)
_EPOCH = re.compile(r"(\d{12})(\.json|\.accepted\.json|\.beat)", re.ASCII)
_INDEX = re.compile(r"index-\d{5}\.msgpack", re.ASCII)

STEP_MAX = 10**12 - 1
"""The largest step its folder can name."""

EPOCH_MAX = 10**12 - 1
"""The largest epoch its record can be named after."""

WORLD_SIZE_MAX = 100_000
"""The largest rank a file can name, plus one."""


def step_folder(step: int) -> str:
    """Return the folder of a step, with its trailing slash."""
    return f"step-{step:012d}/"


def step_of_folder(name: str) -> int | None:
    """Return the step a folder name stands for, or None if it is no step folder."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def epoch_key(number: int) -> str:
    """Return the key of the record of an epoch."""
    return f"{EPOCHS_FOLDER}{number:012d}.json"


def accepted_key(number: int) -> str:
    """Return the key of what an epoch accepted when it began."""
    return f"{EPOCHS_FOLDER}{number:012d}.accepted.json"


def beat_key(number: int) -> str:
    """Return the key of an epoch's sign of life."""
    return f"{EPOCHS_FOLDER}{number:012d}.beat"


def epoch_of_key(key: str) -> int | None:
    """Return the epoch that a key under `epochs/` is about, or None if it is none of these."""
    match = _EPOCH.fullmatch(key.removeprefix(EPOCHS_FOLDER))
    return int(match[1]) if match else None


def is_attempt_folder(name: str) -> bool:
    """Return whether a folder name is that of an attempt."""
    return _ATTEMPT_FOLDER.fullmatch(name) is not None


def part_name(rank: int) -> str:
    """Return the name of a rank's part inside the attempt's folder."""
    return f"parts/r{rank:05d}.msgpack"


def index_name(number: int) -> str:
    """Return the name of one file of the merged index inside the attempt's folder."""
    return f"index-{number:05d}.msgpack"


def is_pack_name(name: str) -> bool:
    """Return whether a name is that of a pack inside an attempt's folder."""
    return _PACK.fullmatch(name) is not None


def step_pack_name(step: int, attempt: str, name: str) -> str:
    """Return the name under which other steps of a run refer to a pack of an attempt: its path from the root."""
    return f"{step_folder(step)}{attempt}/{name}"


def step_of_pack(name: str) -> int | None:
    """Return the step that a pack lies in, from its name; None where that is not the name of another step's pack."""
    match = _STEP_PACK.fullmatch(name)
    return int(match[1]) if match else None


def is_file_url(name: str) -> bool:
    """Return whether a name is the URL of a file on a file system, as packs that were imported by reference have it."""
    path = name.removeprefix("file://")
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
    """Return whether a name inside an attempt's folder is one that an attempt gives."""
    return is_pack_name(name) or is_part_name(name) or is_index_name(name) or name == OVERVIEW_FILE


def rank_of_pack(name: str) -> int:
    """Return the rank that wrote a pack, from its name, here or in another step."""
    match = _PACK.fullmatch(name)
    if match is not None:
        return int(match[1])
    match = _STEP_PACK.fullmatch(name)
    assert match is not None, name
    return int(match[2])


def require_step(step: object) -> None:
    """Refuse what is no step.

    Raises:
        InvalidError: It is not a whole number, or out of range.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_MAX:
        kind = type(step).__name__
        raise InvalidError(f"step={str(step)[:80]!r} ({kind}); expected a whole number from 0 to {STEP_MAX}")

"""Finds the tag folder of a DeepSpeed checkpoint, and the rank of each file in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.backends.foreign.messages import CONVERT
from holdfast.base.ports.readable import Readable
from holdfast.errors import CheckpointError, InvalidError, MissingError

LATEST = "latest"
_LATEST_UNIVERSAL = "latest_universal"
_TAG_BYTES_MAX = 4096
_NUMBER = "([0-9]{1,9})"
_MODEL = re.compile(rf"(?:zero_pp_rank_{_NUMBER}_)?mp_rank_{_NUMBER}_model_states\.pt")
_OPTIMIZER = re.compile(rf"(?:bf16_|fp16_)?zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}_optim_states\.pt")
_EXPERTS = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
FIRST_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_ATOMS = "zero/"
_HOLDFAST_RUN_FILE = "holdfast.json"
_HOLDFAST_STEP = re.compile(r"step-\d{12}", re.ASCII)
OPTIMIZER_OF_ATOMS = "zero/optimizer_state.pt"

Place = tuple[int, int]
"""Model-parallel rank and data-parallel rank."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of one tag."""

    prefix: str
    """Prefix of its keys: empty, or the tag and a slash."""

    models: Mapping[Place, str]
    """Files of model states by rank. ZeRO-1 and 2 write them on data-parallel rank 0 only."""

    optimizers: Mapping[Place, str]
    """Files of ZeRO's optimizer states by rank."""

    atoms: Mapping[str, tuple[str, ...]]
    """Names of the states that a universal folder stores as files, by parameter; empty for other folders."""

    sizes: Mapping[str, int]
    """Bytes by key."""

    @property
    def is_universal(self) -> bool:
        """Whether DeepSpeed's ds_to_universal wrote it."""
        return self.prefix + OPTIMIZER_OF_ATOMS in self.sizes or bool(self.atoms and not self.optimizers)

    @property
    def is_cut(self) -> bool:
        """Whether the model states are those of ZeRO-3, which stores parameters in optimizer states only."""
        return self.models[0, 0].startswith(f"{self.prefix}zero_pp_rank_")

    @property
    def mp_degree(self) -> int:
        """Number of model-parallel ranks, from the names of files."""
        return 1 + max(mp for mp, _ in self.models)


def find_prefix(files: Readable) -> str | None:
    """Return the prefix of the tag folder; None if this is not a DeepSpeed checkpoint.

    It is the named folder if that holds files of a tag, else the tag that `latest` or `latest_universal` names. Only
    a few names are looked up, so a large folder costs nothing.
    """
    if _holds_tag(files, ""):
        return ""
    for pointer in (LATEST, _LATEST_UNIVERSAL):
        tag = tag_in(files, pointer)
        if tag and _holds_tag(files, f"{tag}/"):
            return f"{tag}/"
    return None


def read_folder(files: Readable, prefix: str) -> Folder:
    """Return the files of a tag folder.

    Raises:
        InvalidError: Files belong to a pipeline or to experts, or two files belong to one rank.
        MissingError: There is no file of model states of rank 0.
    """
    sizes: dict[str, int] = {}
    models: dict[Place, str] = {}
    optimizers: dict[Place, str] = {}
    atoms: dict[str, list[str]] = {}
    where = f"{files.url}/{prefix}"
    for entry in files.list(prefix):
        sizes[entry.key] = entry.bytes
        name = entry.key.removeprefix(prefix)
        if name.startswith(_ATOMS) and name.endswith(".pt") and name.count("/") > 1:
            parameter, _, state = name.removeprefix(_ATOMS).removesuffix(".pt").rpartition("/")
            atoms.setdefault(parameter, []).append(state)
        elif _EXPERTS.fullmatch(name):
            raise _refused(where, name, "experts of DeepSpeed's own MoE layers")
        elif _PIPELINE.fullmatch(name):
            raise _refused(where, name, "a layer of a PipelineModule")
        elif match := _MODEL.fullmatch(name):
            _claim(models, (int(match[2]), int(match[1] or 0)), entry.key, where)
        elif match := _OPTIMIZER.fullmatch(name):
            _claim(optimizers, (int(match[2]), int(match[1])), entry.key, where)
    if (0, 0) not in models:
        raise MissingError(
            f"{where}: no {FIRST_FILES[0]} and no {FIRST_FILES[1]}; expected one. Copy the missing files"
        )
    return Folder(prefix, models, optimizers, {name: tuple(sorted(states)) for name, states in atoms.items()}, sizes)


def _claim(files: dict[Place, str], place: Place, key: str, where: str) -> None:
    """Record the file of a rank.

    Raises:
        InvalidError: The rank has a file already.
    """
    if place in files:
        raise InvalidError(
            f"{where}: {files[place]} and {key} are both of model-parallel rank {place[0]}, data-parallel rank "
            f"{place[1]}; expected one. The folder seems to hold two checkpoints: separate their files"
        )
    files[place] = key


def _refused(where: str, name: str, what: str) -> InvalidError:
    return InvalidError(f"{where}: {name} holds {what}; expected ZeRO states of data and tensor parallelism. {CONVERT}")


def _holds_tag(files: Readable, prefix: str) -> bool:
    return any(_holds(files, prefix + name) for name in (*FIRST_FILES, OPTIMIZER_OF_ATOMS))


def _holds(files: Readable, key: str) -> bool:
    with suppress(CheckpointError):  # The file does not exist, or cannot be opened.
        files.size(key)
        return True
    return False


def holds_states(name: str) -> bool:
    """Return whether a name is one of a file of model states or optimizer states."""
    return any(pattern.fullmatch(name) for pattern in (_MODEL, _OPTIMIZER))


def tag_in(files: Readable, pointer: str) -> str | None:
    """Return the tag that a pointer file names; None if there is no such file, and empty if no tag is in it.

    The file `latest` in the root of a Holdfast run names a step, which is no tag.
    """
    try:
        tag = files.get(pointer, _TAG_BYTES_MAX).decode().strip().strip("/")
    except (UnicodeDecodeError, CheckpointError):
        return None
    if _HOLDFAST_STEP.fullmatch(tag) and (_holds(files, _HOLDFAST_RUN_FILE) or not _holds_tag(files, f"{tag}/")):
        return None
    return tag

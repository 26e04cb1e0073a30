"""The files of a DeepSpeed checkpoint: which folder is meant, and whose state each file holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import CheckpointError, InvalidError, MissingError
from holdfast.foreign.wording import CONVERT
from holdfast.ports.store import Readable

LATEST = "latest"
_LATEST_UNIVERSAL = "latest_universal"
_TAG_BYTES_MAX = 4096
_NUMBER = "([0-9]{1,9})"
_MODEL = re.compile(rf"mp_rank_{_NUMBER}_model_states\.pt")
_MODEL_OF_THREE = re.compile(rf"zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt")
_OPTIMIZER = re.compile(rf"(?:bf16_|fp16_)?zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}_optim_states\.pt")
_EXPERTS = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
FIRST_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_ATOMS = "zero/"
OPTIMIZER_OF_ATOMS = "zero/optimizer_state.pt"

Place = tuple[int, int]
"""Model-parallel rank and data-parallel rank."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What lies in the folder of one tag."""

    prefix: str
    """What leads its keys: empty, or the tag and a slash."""

    models: Mapping[Place, str]
    """Files of model states; of ZeRO-1 and 2 all of data-parallel rank 0."""

    optimizers: Mapping[Place, str]
    """Files of ZeRO's optimizer states."""

    atoms: Mapping[str, tuple[str, ...]]
    """Of a universal folder, by parameter the names of the states that lie there as files; else empty."""

    sizes: Mapping[str, int]
    """Bytes by key."""

    @property
    def is_universal(self) -> bool:
        """Whether DeepSpeed's ds_to_universal wrote it."""
        return self.prefix + OPTIMIZER_OF_ATOMS in self.sizes or bool(self.atoms and not self.optimizers)

    @property
    def is_cut(self) -> bool:
        """Whether model states are those of ZeRO-3, which holds parameters in optimizer states alone."""
        return _MODEL_OF_THREE.fullmatch(self.models[0, 0].removeprefix(self.prefix)) is not None

    @property
    def mp_degree(self) -> int:
        """Model-parallel ranks that files speak of."""
        return 1 + max(mp for mp, _ in self.models)


def find_prefix(files: Readable) -> str | None:
    """Return what leads the keys of the tag folder that is meant, None where this is no DeepSpeed checkpoint.

    A folder that holds files of a tag is meant itself; else the tag that `latest` or `latest_universal` names. Looks at
    a few names, whatever else lies there.
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
        InvalidError: Some are of a kind that is not read: pipelines, experts, two files of one rank.
        MissingError: There is no file of model states.
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
            _claim(models, (int(match[1]), 0), entry.key, where)
        elif match := _MODEL_OF_THREE.fullmatch(name):
            _claim(models, (int(match[2]), int(match[1])), entry.key, where)
        elif match := _OPTIMIZER.fullmatch(name):
            _claim(optimizers, (int(match[2]), int(match[1])), entry.key, where)
    if (0, 0) not in models:
        raise MissingError(f"{where}: no {FIRST_FILES[0]} and no {FIRST_FILES[1]}; expected one. Was all of it copied?")
    return Folder(prefix, models, optimizers, {name: tuple(sorted(each)) for name, each in atoms.items()}, sizes)


def _claim(found: dict[Place, str], place: Place, key: str, where: str) -> None:
    if place in found:
        raise InvalidError(
            f"{where}: {found[place]} and {key} are both of model-parallel rank {place[0]}, data-parallel rank "
            f"{place[1]}; expected one. Two checkpoints seem to lie in one folder: take those files apart"
        )
    found[place] = key


def _refused(where: str, name: str, what: str) -> InvalidError:
    return InvalidError(
        f"{where}: {name} holds {what}, which is not read; expected ZeRO states of data and tensor parallelism. "
        f"{CONVERT}"
    )


def _holds_tag(files: Readable, prefix: str) -> bool:
    return any(_size(files, prefix + name) is not None for name in (*FIRST_FILES, OPTIMIZER_OF_ATOMS))


def holds_states(name: str) -> bool:
    """Return whether a file is called like one of model states or optimizer states."""
    return any(each.fullmatch(name) for each in (_MODEL, _MODEL_OF_THREE, _OPTIMIZER))


def tag_in(files: Readable, pointer: str) -> str | None:
    """Return the tag that a file names, None where it is not there or names none."""
    size = _size(files, pointer)
    if size is None or not 0 < size <= _TAG_BYTES_MAX:
        return None
    try:
        return files.get(pointer, _TAG_BYTES_MAX).decode().strip().strip("/")
    except (UnicodeDecodeError, CheckpointError):
        return None


def _size(files: Readable, key: str) -> int | None:
    """Return the bytes of a file, None where it is not there or not to be had."""
    try:
        return files.size(key)
    except CheckpointError:
        return None

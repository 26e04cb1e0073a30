"""Reads the whole state of a checkpoint without a template, as `torch.load` returns it for an exported one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from holdfast._face import wiring
from holdfast._face.arguments import Globs, selection_of
from holdfast.backends.foreign.file_layout import SmallTensor, TensorLeaf
from holdfast.backends.foreign.nested_state import State, nested_state
from holdfast.backends.foreign.values import below
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.layouts.layout import Layouts
from holdfast.base.name_patterns import with_names_above
from holdfast.base.types.export import ExportOptions
from holdfast.base.types.values import FrameworkValue
from holdfast.errors import ConflictError, CorruptError, InvalidError, first_three
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint, require_framework
from holdfast.stored.checkpoint.mapped_tensors import MappedTensors

_ABSENT = object()
_OVERWRITES_MAX = 10
"""How often a read starts again because the checkpoint was overwritten."""


def read(
    path: wiring.Path,
    *,
    step: int | str | None = None,
    only: Globs = None,
    framework: str = "torch",
    mmap: bool = False,
    layout: Layouts = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> Mapping[str, object]:
    """Read the state of a checkpoint into new memory, without a state to fill. This process alone reads.

    The result equals that of `torch.load` for the same state: a module or an optimizer is its `state_dict()`, with
    parameters of an optimizer by name, and all other values keep their nesting. Values of one rank (`PerRank`,
    `RngState`) are left out, with a warning: see `open_checkpoint(path).per_rank(rank)`.

    Example:
        saved = holdfast.read("run-7", step="latest", only="model.*")
        model.load_state_dict(saved["model"])
    Args:
        path: The checkpoint, of any format that Holdfast reads; with `step` the root of a run.
        step: A step of the run: its number, a tag, `"300@1f2e"`, or `"latest"`, the newest valid one.
        only: Read only names that match one of these patterns, and all names below, as in `only="model.*"`.
        framework: `torch` for tensors on the CPU, or `numpy`, which needs no torch. With `numpy`, bfloat16 and float8
            become unsigned integers of the same width; dtypes and devices of torch become names.
        mmap: Whether tensors are mapped from the files, and read and checked on first access. The result, and each dict
            in the result that holds tensors, is then a read-only mapping; `copy()` of the mapping returns dicts. The
            first access to a list or tuple reads all its tensors. A tensor that several ranks saved in parts, or whose
            chunks are coded, is read into memory.
            Writing to a tensor never changes a file. Files may be deleted or replaced meanwhile, but not cut short or
            overwritten in place.
        layout: Rules that make the tensors from those that are stored, as for `load`; without `mmap`.
        settings: How to read.
    Returns:
        The state as nested dicts; with `mmap` as nested mappings, which raise `CorruptError` on first access to a
        damaged tensor.
    Raises:
        MissingError: There is no checkpoint, step or tag.
        InvalidError: The path is the root of a run without a step, the format is newer, or a pattern matches no name.
        CorruptError: The checkpoint is damaged.
        UnavailableError: Storage failed, or the tensors do not fit into memory.
    """
    require_framework(framework)
    patterns = selection_of(only, None, False).only
    if mmap and layout is not None:
        raise InvalidError("mmap=True with a layout; expected one of them: what a layout makes is in no file")
    for _ in range(_OVERWRITES_MAX):
        checkpoint = wiring.checkpoint_at(path, settings, step, layout)
        try:
            return _read(checkpoint, patterns, framework, mmap=mmap)
        except (ConflictError, CorruptError):
            if not checkpoint.is_overwritten:
                raise
            # The whole state is read again, so that no two checkpoints are mixed.
    return _read(wiring.checkpoint_at(path, settings, step, layout), patterns, framework, mmap=mmap)


def _read(
    checkpoint: Checkpoint, patterns: Sequence[str] | None, framework: str, *, mmap: bool
) -> Mapping[str, object]:
    state = nested_state(checkpoint.content, ExportOptions(), flat_optimizers=False)
    if patterns is not None:
        state = _Selected(patterns).of(state, checkpoint.url)
    names = [leaf.fqn for leaf in _leaves(state) if isinstance(leaf, TensorLeaf)]
    tensors = MappedTensors(checkpoint, names, framework) if mmap else checkpoint.read_all(names, framework)
    if isinstance(tensors, MappedTensors) and tensors.lacks_files and checkpoint.is_overwritten:
        raise ConflictError(f"{checkpoint.url}: was overwritten before its files were mapped. Read it again")

    def fill(leaf: object) -> object:
        if isinstance(leaf, TensorLeaf):
            return tensors[leaf.fqn]
        if isinstance(leaf, SmallTensor):
            array = np.frombuffer(bytearray(leaf.data), DTYPES[leaf.dtype].numpy).reshape(leaf.shape)
            return checkpoint.as_framework(array, leaf.dtype, framework)
        if isinstance(leaf, FrameworkValue):
            return wiring.built_by_torch(leaf) if framework == "torch" else leaf.value
        return leaf

    if mmap:
        return MappedState(state, fill)
    _fill(state, fill)
    return state


class MappedState(Mapping[str, object]):
    """A state, or a dict of a state, whose tensors are checked on first access. Read-only."""

    def __init__(self, state: Mapping[str, object], fill: Callable[[object], object]) -> None:
        """Read no tensor yet.

        Args:
            state: The values, with leaves in place of tensors.
            fill: Returns the value of a leaf.
        """
        self._state, self._fill = state, fill
        self._made: dict[str, object] = {}

    def __getitem__(self, key: str) -> object:
        """Return a value; the same object each time.

        Raises:
            CorruptError: A tensor in the value is damaged.
        """
        if key not in self._made:
            value = self._state[key]
            if isinstance(value, dict) and any(isinstance(leaf, TensorLeaf) for leaf in _leaves(value)):
                made: object = MappedState(value, self._fill)
            else:
                made = _fill(value, self._fill)
            # If two threads make the value at once, both return the same object.
            self._made.setdefault(key, made)
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        """Return the keys; reads no value."""
        return iter(self._state)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._state)

    def __contains__(self, key: object) -> bool:
        """Return whether the state has a key; reads no value."""
        return key in self._state

    def copy(self) -> dict[str, object]:
        """Return plain dicts on every level, with the same tensors; reads all tensors.

        For code that takes only dicts. `load_state_dict` of an optimizer begins with this call.

        Raises:
            CorruptError: A tensor is damaged.
        """
        return {key: value.copy() if isinstance(value, MappedState) else value for key, value in self.items()}

    def __reduce__(self) -> tuple[type, tuple[dict[str, object]]]:
        """Pickle, and copy with `copy`, as plain dicts: a deep copy must share no memory with this state."""
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        """Return the keys only: showing the values would read every tensor."""
        return f"MappedState({list(self._state)})"


class _Selected:
    """The part of a state that patterns select."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._unmatched = dict.fromkeys(patterns)
        self._patterns = patterns

    def of(self, state: State, url: str) -> State:
        """Return the part of a state.

        Raises:
            InvalidError: A pattern matches nothing.
        """
        kept = {key: part for key, value in state.items() if (part := self._part(value, below("", key))) is not _ABSENT}
        if self._unmatched:
            raise InvalidError(
                f"{url}: only={first_three(map(repr, self._unmatched))}: matches no name. At the top it has "
                f"{first_three(sorted(map(str, state)))}; `holdfast inspect` lists all names"
            )
        return kept

    def _part(self, value: object, path: str) -> object:
        """Return the selected part of a value; `_ABSENT` for no part. A list counts as one value."""
        names = (*with_names_above(path), *(with_names_above(value.fqn) if isinstance(value, TensorLeaf) else ()))
        hits = [pattern for pattern in self._patterns if any(fnmatchcase(name, pattern) for name in names)]
        for pattern in hits:
            self._unmatched.pop(pattern, None)
        if hits:
            return value
        if isinstance(value, dict) and not isinstance(value, Counter):
            parts = {key: self._part(item, below(path, key)) for key, item in value.items()}
            for key in [key for key, part in parts.items() if part is _ABSENT]:
                del value[key]
            value.update({key: part for key, part in parts.items() if part is not _ABSENT})
            return value or _ABSENT
        if isinstance(value, list | tuple):
            parts_of_list = [self._part(item, f"{path}.{number}") for number, item in enumerate(value)]
            return _ABSENT if all(part is _ABSENT for part in parts_of_list) else value
        return _ABSENT


def _leaves(value: object) -> Iterator[object]:
    """Yield the leaves: values that are not containers."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    if items is None:
        yield value
    else:
        for item in items:
            yield from _leaves(item)


def _fill(value: object, fill: Callable[[object], object]) -> object:
    """Return a value with its leaves replaced. Dicts and lists change in place, to keep type and attributes."""
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _fill(item, fill)
        return value
    if isinstance(value, list):
        value[:] = [_fill(item, fill) for item in value]
        return value
    if isinstance(value, tuple):
        return tuple(_fill(item, fill) for item in value)
    return fill(value)

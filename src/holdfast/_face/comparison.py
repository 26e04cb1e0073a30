"""Compares two checkpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase

from holdfast._face import wiring
from holdfast._face.arguments import Globs, patterns_of
from holdfast.base.layouts.layout import Layouts
from holdfast.base.ports.observer import Observer
from holdfast.base.types.diff import Diff
from holdfast.errors import InvalidError
from holdfast.offline.diff.compare import differences
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint


def diff(
    a: wiring.Path | Checkpoint,
    b: wiring.Path | Checkpoint,
    *,
    tensors: Globs = None,
    cast: bool = False,
    full: bool = False,
    layout: Layouts = None,
    observer: Observer | None = None,
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> Diff:
    """Return all differences between two checkpoints of any formats. Never communicates, needs no torch.

    Of two checkpoints of Holdfast, bytes with equal digests are not read.

    Example:
        before, after = (holdfast.open_checkpoint("run-7", step=step) for step in (100, 300))
        for tensor in holdfast.diff(before, after, tensors="model.*").tensors:
            print(tensor.fqn, tensor.verdict)
    Args:
        a, b: Paths, or opened checkpoints.
        tensors: Compare only tensors with a name that matches one of these patterns, and no values.
        cast: Compare tensors of different dtypes by value, each widened exactly; otherwise only report the dtypes.
        full: Also read bytes with equal digests, so that norms cover whole tensors.
        layout: Rules that make the tensors of `a`, as for `load`; of `b`: open that with a layout of its own.
        observer: Receives progress.
        settings: How to read.
    Raises:
        MissingError: A path holds no checkpoint.
        InvalidError: A path is the root of a run.
        CorruptError: A checkpoint is damaged.
        ConflictError: A checkpoint was overwritten meanwhile.
    """
    if layout is not None and isinstance(a, Checkpoint):
        raise InvalidError("diff: layout= with an opened checkpoint; expected open_checkpoint(path, layout=…)")
    a = a if isinstance(a, Checkpoint) else wiring.checkpoint_at(a, settings, layout=layout)
    opened = [a, b if isinstance(b, Checkpoint) else wiring.checkpoint_at(b, settings)]
    patterns = None if tensors is None else patterns_of("tensors", tensors)

    def chosen(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns or ())

    names = None if patterns is None else chosen
    with opened[0].blaming_overwrite(), opened[1].blaming_overwrite():
        return differences(*opened, chosen=names, cast=cast, full=full, observer=observer)

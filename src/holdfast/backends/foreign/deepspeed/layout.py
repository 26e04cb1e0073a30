"""Derives the tensor-parallel layout of each parameter from `universal_checkpoint_info`, by name.

A layout that the checkpoint does not state is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.backends.foreign.messages import CONVERT, shown
from holdfast.backends.foreign.pickles.objects import OpaqueObject
from holdfast.backends.foreign.slices import affine
from holdfast.backends.foreign.slices.patterns import Patterns, exact_name
from holdfast.backends.foreign.slices.pieces import Slice
from holdfast.backends.foreign.typed_values import COUNT_MAX
from holdfast.base.geometry.box import Box
from holdfast.errors import InvalidError, first_three

_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
_TWO = "parameter_with_2_sub_params_cat_dim_0"
_SEVERAL = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_TP_KEYS = (_REPLICATED, _AVERAGED, _ROWS, _TWO, _SEVERAL)
"""Keys of an info that describe tensor parallelism."""

_VERSION_OF_WIDTHS = 0.4
_PATTERNS_MAX = 1 << 20
_PARTS_MAX = 1 << 12
"""Largest stated number of sub-parameters. An empty parameter is divisible by any number, and `_in_several` makes a
list of that many lengths."""


@dataclass(frozen=True, slots=True)
class TensorParallelLayout:
    """The layout of one parameter over the ranks of a tensor-parallel group."""

    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""

    slices: Sequence[Sequence[Slice]]
    """Slices by rank. Padding of a vocabulary is in none of them."""

    unlisted: bool = False
    """Whether no pattern names the parameter, so that DeepSpeed's default applies: cut along dimension 0."""


class InexactError(Exception):
    """No rank stores the parameter exactly: its value would have to be computed from what the ranks store."""


@dataclass(slots=True)
class Layouts:
    """The layouts of all parameters of a checkpoint."""

    info: Mapping[str, object]
    """`universal_checkpoint_info`."""

    where: str
    """The file that holds the info."""

    tp_degree: int
    """Ranks of a tensor-parallel group."""

    _patterns: Patterns = field(init=False)
    _by_name: dict[str, dict[str | None, list[tuple[str, object]]]] = field(default_factory=dict)
    """Patterns and their values, by key of the info and by the only name that a pattern matches; None for other
    patterns."""

    def __post_init__(self) -> None:
        self._patterns = Patterns(self.where)

    def of(self, name: str, local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
        """Return the layout of a parameter.

        Args:
            name: The parameter.
            local_shapes: Shape of the tensor on each rank.
        Raises:
            InvalidError: No layout is stated, or it contradicts the shapes.
            InexactError: The ranks hold values that are to be averaged or scaled.
        """
        layout = self._cut(name, local_shapes)
        if self._matching(_VOCABULARY, name) is None:
            return layout
        rows = self.info.get("original_vocab_size")
        if type(rows) is not int or not layout.global_shape or not 0 < rows <= layout.global_shape[0]:
            raise self._unfit(name, f"original_vocab_size {shown(rows)} of {list(layout.global_shape)}")
        slices = [[kept for cut in cuts if (kept := _up_to_row(cut, rows))] for cuts in layout.slices]
        return TensorParallelLayout((rows, *layout.global_shape[1:]), slices)

    def _cut(self, name: str, local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
        if self.tp_degree == 1:
            return replicated_layout(local_shapes)
        if not any(key in self.info for key in (*_TP_KEYS, "affine_map")):
            raise InvalidError(
                f"{self.where}: {self.tp_degree} tensor-parallel ranks hold {name}, and no universal_checkpoint_info "
                "states how it is cut; expected its patterns or an affine_map. Save again with "
                "universal_checkpoint_info in client_state, or pass the missing state to ds_to_universal"
            )
        reason = self._value(_UNSUPPORTED, name)
        if reason is not None:
            raise self._unfit(name, f"that it cannot be merged: {shown(reason)}")
        mapped = self._value("affine_map", name)
        if mapped is not None:
            try:
                return TensorParallelLayout(*affine.slices_of_map(mapped, local_shapes, f"{self.where}: {name}"))
            except affine.ScaledError as error:
                raise InexactError(str(error)) from error
        if self._matching(_REPLICATED, name) is not None:
            if len(set(local_shapes)) != 1:
                raise self._unfit(name, f"that it is replicated, and ranks hold {_shown(local_shapes)}")
            return replicated_layout(local_shapes)
        if self._matching(_AVERAGED, name) is not None:
            raise InexactError(
                f"{_AVERAGED} names it, so the {self.tp_degree} ranks hold values that are to be averaged"
            )
        if self._matching(_TWO, name) is not None:
            lengths = self._lengths(name, local_shapes, 0)
            # DeepSpeed halves with torch.chunk, which gives the odd row to the first half.
            halves = [[-(-length // 2) for length in lengths], [length // 2 for length in lengths]]
            return self._by_widths(name, local_shapes, 0, halves)
        several = self._matching(_SEVERAL, name)
        if several is not None:
            return self._in_several(name, local_shapes, *several)
        dim = int(self._matching(_ROWS, name) is not None)
        layout = self._by_widths(name, local_shapes, dim, [self._lengths(name, local_shapes, dim)])
        return replace(layout, unlisted=not dim)

    def _in_several(
        self, name: str, local_shapes: Sequence[tuple[int, ...]], pattern: str, stated: object
    ) -> TensorParallelLayout:
        """Return the layout of a parameter that concatenates several along a dimension, each cut alone."""
        dim, shape = _entry(stated, "partition_dim"), _entry(stated, "shape")
        if type(dim) is not int or dim < 0 or not isinstance(shape, list | tuple) or dim >= len(shape):
            raise self._unfit(name, f"sub-parameters {shown(stated)} without shape and partition_dim")
        lengths = self._lengths(name, local_shapes, dim)
        if not all(_views(shape, dim, local_shape) for local_shape in local_shapes):
            raise self._unfit(name, f"a view {shown(shape)}, and ranks hold {_shown(local_shapes)}")
        spec = shape[dim]
        sizes = list(spec) if isinstance(spec, list | tuple) else None
        version = self.info.get("universal_checkpoint_version", 0.0)
        if isinstance(version, float | int) and version >= _VERSION_OF_WIDTHS:
            known = self.info.get(_WIDTHS)
            widths = known.get(pattern) if isinstance(known, Mapping) else None
        else:
            # Before version 0.4 the info states the number or the lengths of the sub-parameters, each cut evenly.
            if type(spec) is int and spec > _PARTS_MAX:
                raise self._unfit(name, f"{spec} sub-parameters; at most {_PARTS_MAX} are read")
            if sizes is None and type(spec) is int and spec > 0 and not sum(lengths) % spec:
                sizes = [sum(lengths) // spec] * spec
            even = sizes is not None and all(type(size) is int and not size % self.tp_degree for size in sizes)
            widths = [[size // self.tp_degree] * self.tp_degree for size in sizes or ()] if even else None
        if not isinstance(widths, list | tuple) or not all(_are_lengths(part, self.tp_degree) for part in widths):
            raise self._unfit(name, f"sub-parameters {shown(stated)} and no {_WIDTHS} that fit them")
        if sizes is not None and sizes != [sum(part) for part in widths]:
            raise self._unfit(name, f"{_WIDTHS} {shown(widths)} for sub-parameters of {shown(sizes)}")
        return self._by_widths(name, local_shapes, dim, widths)

    def _by_widths(
        self, name: str, local_shapes: Sequence[tuple[int, ...]], dim: int, widths: Sequence[Sequence[int]]
    ) -> TensorParallelLayout:
        """Return the layout of parts that are concatenated along `dim`, each cut over the ranks.

        Args:
            name: The parameter.
            local_shapes: Shape of the tensor on each rank.
            dim: The dimension.
            widths: Length of each part on each rank, by part and rank.
        """
        rest = {_with_length(shape, dim, 0) for shape in local_shapes}
        held = [sum(part[rank] for part in widths) for rank in range(self.tp_degree)]
        if len(rest) != 1 or held != [shape[dim] for shape in local_shapes]:
            raise self._unfit(name, f"a cut along dimension {dim} into {held}, and ranks hold {_shown(local_shapes)}")
        slices: list[list[Slice]] = [[] for _ in local_shapes]
        origin = (0,) * len(local_shapes[0])
        at = 0
        taken = [0] * self.tp_degree
        for part in widths:
            for rank, length in enumerate(part):
                low = _with_length(origin, dim, taken[rank])
                taken[rank] += length
                high = _with_length(local_shapes[rank], dim, taken[rank])
                slices[rank].append(Slice(Box(low, high), _with_length(origin, dim, at)))
                at += length
        return TensorParallelLayout(_with_length(local_shapes[0], dim, at), slices)

    def _lengths(self, name: str, local_shapes: Sequence[tuple[int, ...]], dim: int) -> list[int]:
        if any(dim >= len(shape) for shape in local_shapes):
            raise self._unfit(name, f"a cut along dimension {dim}, and ranks hold {_shown(local_shapes)}")
        return [shape[dim] for shape in local_shapes]

    def _value(self, key: str, name: str) -> object:
        match = self._matching(key, name)
        return None if match is None else match[1]

    def _matching(self, key: str, name: str) -> tuple[str, object] | None:
        """Return the only pattern under `key` that matches a name, and its value.

        Raises:
            InvalidError: Several patterns match, or a pattern is malformed.
        """
        if key not in self._by_name:
            by_name: dict[str | None, list[tuple[str, object]]] = {}
            for pattern, value in self._stated(key):
                by_name.setdefault(exact_name(pattern), []).append((pattern, value))
            self._by_name[key] = by_name
        by_name = self._by_name[key]
        others = [pair for pair in by_name.get(None, ()) if self._patterns.matches(pair[0], name)]
        matches = dict([*by_name.get(name, ()), *others])
        if len(matches) > 1:
            raise self._unfit(name, f"several patterns that match it under {key}: {first_three(matches)}")
        return next(iter(matches.items()), None)

    def _stated(self, key: str) -> Iterator[tuple[str, object]]:
        stated = self.info.get(key)
        if key == "affine_map" and stated is not None:
            fields = stated if isinstance(stated, Mapping) else {"version": None}
            version = fields.get("version", 1)
            if type(version) is not int or not 1 <= version <= affine.VERSION_MAX:
                raise InvalidError(
                    f"{self.where}: affine_map of version {shown(version)}; expected up to {affine.VERSION_MAX}. "
                    f"{CONVERT}"
                )
            stated = fields.get("params")
        pairs: Sequence[tuple[object, object]] = []
        if isinstance(stated, Mapping):
            pairs = list(stated.items())
        elif isinstance(stated, list | tuple) and key == _SEVERAL:
            pairs = [(pattern, entry) for entry in stated for pattern in _patterns_of(entry)]
        elif isinstance(stated, list | tuple):
            pairs = [(pattern, None) for pattern in stated]
        elif stated is not None:
            raise InvalidError(f"{self.where}: {key} is {type(stated).__name__}; expected a list or dict of patterns")
        if len(pairs) > _PATTERNS_MAX:
            raise InvalidError(f"{self.where}: {key} holds {len(pairs)} patterns; expected at most {_PATTERNS_MAX}")
        for pattern, value in pairs:
            if not isinstance(pattern, str):
                raise InvalidError(f"{self.where}: {key} holds {type(pattern).__name__}; expected patterns as text")
            yield pattern, value

    def _unfit(self, name: str, what: str) -> InvalidError:
        return InvalidError(f"{self.where}: universal_checkpoint_info states for {name} {what}. {CONVERT}")


def replicated_layout(local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
    """Return the layout of a tensor that every rank holds whole.

    Reads use the first rank. Other ranks with the same shape hold copies; ranks with another shape get no slice.
    """
    shape = local_shapes[0]
    whole = Slice(Box.whole(shape), (0,) * len(shape))
    copy = replace(whole, copy=True)
    slices = [[copy if rank else whole] if held == shape else [] for rank, held in enumerate(local_shapes)]
    return TensorParallelLayout(shape, slices)


def _with_length(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    """Return a shape, or coordinates, with another number along one dimension."""
    return (*shape[:dim], length, *shape[dim + 1 :])


def _up_to_row(cut: Slice, rows: int) -> Slice | None:
    """Return the part of a slice in the first rows of the whole tensor; None if it has none."""
    length = min(rows - cut.start[0], cut.local.shape[0])
    if length <= 0:
        return None
    stop = (cut.local.start[0] + length, *cut.local.stop[1:])
    return Slice(Box(cut.local.start, stop), cut.start, cut.copy)


def _entry(stated: object, name: str) -> object:
    """Return a field of a SubparamShape, which is a dict or an object of a DeepSpeed class."""
    if isinstance(stated, OpaqueObject):
        return stated.attribute(name)
    return stated.get(name) if isinstance(stated, Mapping) else None


def _patterns_of(stated: object) -> Sequence[object]:
    patterns = _entry(stated, "patterns")
    return patterns if isinstance(patterns, list | tuple) else [None]


def _views(stated: Sequence[object], dim: int, shape: tuple[int, ...]) -> bool:
    """Return whether a stated shape equals the shape of a parameter, apart from the dimension that is cut."""
    if len(shape) == 1 and not dim:
        return all(length in (1, -1) for length in stated[1:])
    return len(stated) == len(shape) and all(
        at == dim or view in (length, -1) for at, (view, length) in enumerate(zip(stated, shape, strict=True))
    )


def _are_lengths(stated: object, count: int) -> bool:
    if not isinstance(stated, list | tuple) or len(stated) != count:
        return False
    return all(type(length) is int and 0 <= length < COUNT_MAX for length in stated)


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    return first_three(list(shape) for shape in shapes)

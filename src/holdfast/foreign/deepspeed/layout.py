"""How tensor parallelism cuts each parameter, as far as a checkpoint tells: `universal_checkpoint_info`, by name.

What it does not tell is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import InvalidError
from holdfast.foreign.layouts import affine
from holdfast.foreign.layouts.patterns import Patterns, exact_name
from holdfast.foreign.layouts.pieces import Slice
from holdfast.foreign.pickles.objects import OpaqueObject
from holdfast.foreign.wording import CONVERT, shown
from holdfast.geometry.box import Box

_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
_TWO = "parameter_with_2_sub_params_cat_dim_0"
_SEVERAL = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_SPEAKS = (_REPLICATED, _AVERAGED, _ROWS, _TWO, _SEVERAL)
"""What an info has that speaks of tensor parallelism at all."""

_VERSION_OF_WIDTHS = 0.4
_PATTERNS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorParallelLayout:
    """How the ranks of a tensor-parallel group hold one parameter."""

    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""

    slices: Sequence[Sequence[Slice]]
    """By rank, what it holds; padding of a vocabulary is in none of them."""

    unlisted: bool = False
    """Whether nothing names the parameter, so that DeepSpeed's rule for the rest holds: cut along dimension 0."""


class InexactError(Exception):
    """The parameter is on no rank as it is: what each rank holds would have to be reckoned with."""


@dataclass(slots=True)
class Layouts:
    """What a checkpoint says of the layout of its parameters."""

    info: Mapping[str, object]
    """`universal_checkpoint_info`."""

    where: str
    """The file that holds it."""

    tp_degree: int
    """Ranks of a tensor-parallel group."""

    _patterns: Patterns = field(init=False)
    _listed: dict[str, _Listed] = field(init=False)

    def __post_init__(self) -> None:
        self._patterns = Patterns(self.where)
        self._listed = {}

    def of(self, name: str, local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
        """Return how a parameter lies.

        Args:
            name: Its name.
            local_shapes: By rank, the shape of what it holds.
        Raises:
            InvalidError: Nothing tells, or what tells does not fit the shapes.
            InexactError: The ranks hold what is to be averaged, or scaled.
        """
        layout = self._cut(name, local_shapes)
        if self._matching(_VOCABULARY, name) is None:
            return layout
        rows = self.info.get("original_vocab_size")
        if type(rows) is not int or not layout.global_shape or not 0 < rows <= layout.global_shape[0]:
            raise self._unfit(name, f"original_vocab_size {shown(rows)} of {list(layout.global_shape)}")
        slices = [[each for cut in cuts if (each := _up_to_row(cut, rows))] for cuts in layout.slices]
        return TensorParallelLayout((rows, *layout.global_shape[1:]), slices)

    def _cut(self, name: str, local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
        if self.tp_degree == 1:
            return whole_layout(local_shapes)
        if not any(key in self.info for key in (*_SPEAKS, "affine_map")):
            raise InvalidError(
                f"{self.where}: {self.tp_degree} tensor-parallel ranks hold {name}, and no universal_checkpoint_info "
                "says how it is cut; expected its patterns or an affine_map. Save again with universal_checkpoint_info "
                "in client_state, or give ds_to_universal the missing state and read what that writes"
            )
        reason = self._unsupported(name)
        if reason is not None:
            raise self._unfit(name, f"that it cannot be put together: {shown(reason)}")
        mapped = self._mapped(name)
        if mapped is not None:
            try:
                return TensorParallelLayout(*affine.slices_of_map(mapped, local_shapes, f"{self.where}: {name}"))
            except affine.ScaledError as error:
                raise InexactError(str(error)) from error
        if self._matching(_REPLICATED, name) is not None:
            return self._replicated(name, local_shapes)
        if self._matching(_AVERAGED, name) is not None:
            raise InexactError(f"{_AVERAGED} names it, so each of {self.tp_degree} ranks holds another, to be averaged")
        if self._matching(_TWO, name) is not None:
            return self._in_two(name, local_shapes)
        several = self._matching(_SEVERAL, name)
        if several is not None:
            return self._in_several(name, local_shapes, several)
        rows = self._matching(_ROWS, name) is not None
        widths = [self._length(name, shape, int(rows)) for shape in local_shapes]
        return self._by_widths(name, local_shapes, int(rows), [widths], unlisted=not rows)

    def _replicated(self, name: str, local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
        if len(set(local_shapes)) != 1:
            raise self._unfit(name, f"that it is replicated, and ranks hold {_shown(local_shapes)}")
        shape = local_shapes[0]
        return TensorParallelLayout(
            shape, [[Slice(Box.whole(shape), (0,) * len(shape), rank > 0)] for rank in range(self.tp_degree)]
        )

    def _in_two(self, name: str, local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
        lengths = [self._length(name, shape, 0) for shape in local_shapes]
        # torch.chunk gives the first half the odd row.
        halves = [[-(-length // 2) for length in lengths], [length // 2 for length in lengths]]
        return self._by_widths(name, local_shapes, 0, halves)

    def _in_several(
        self, name: str, local_shapes: Sequence[tuple[int, ...]], found: tuple[str, object]
    ) -> TensorParallelLayout:
        """Return the layout of a parameter that is several, one after the other along a dimension, each cut alone."""
        pattern, stated = found
        dim = _entry(stated, "partition_dim")
        shape = _entry(stated, "shape")
        if type(dim) is not int or dim < 0 or not isinstance(shape, list | tuple) or dim >= len(shape):
            raise self._unfit(name, f"sub-parameters {shown(stated)} without shape and partition_dim")
        lengths = [self._length(name, each, dim) for each in local_shapes]
        if not all(_views(shape, dim, each) for each in local_shapes):
            raise self._unfit(name, f"a view {shown(shape)}, and ranks hold {_shown(local_shapes)}")
        spec = shape[dim]
        sizes = list(spec) if isinstance(spec, list | tuple) else None
        version = self.info.get("universal_checkpoint_version", 0.0)
        if isinstance(version, float | int) and version >= _VERSION_OF_WIDTHS:
            known = self.info.get(_WIDTHS)
            widths = known.get(pattern) if isinstance(known, Mapping) else None
        else:
            # Older ones state how many there are, or how long each is, and cut each evenly.
            if sizes is None and type(spec) is int and spec > 0 and not sum(lengths) % spec:
                sizes = [sum(lengths) // spec] * spec
            even = sizes is not None and all(type(size) is int and not size % self.tp_degree for size in sizes)
            widths = [[size // self.tp_degree] * self.tp_degree for size in sizes or ()] if even else None
        if not isinstance(widths, list | tuple) or not all(_are_lengths(each, self.tp_degree) for each in widths):
            raise self._unfit(name, f"sub-parameters {shown(stated)} and no {_WIDTHS} that fit them")
        if sizes is not None and sizes != [sum(each) for each in widths]:
            raise self._unfit(name, f"{_WIDTHS} {shown(widths)} for sub-parameters of {shown(sizes)}")
        return self._by_widths(name, local_shapes, dim, widths)

    def _by_widths(
        self,
        name: str,
        local_shapes: Sequence[tuple[int, ...]],
        dim: int,
        widths: Sequence[Sequence[int]],
        *,
        unlisted: bool = False,
    ) -> TensorParallelLayout:
        """Return the layout in which each of several parts, one after the other along `dim`, is cut over the ranks.

        Args:
            name: The parameter.
            local_shapes: By rank, what it holds.
            dim: The dimension.
            widths: By part and rank, the rank's length of the part.
            unlisted: As in `TensorParallelLayout`.
        """
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in local_shapes}
        held = [sum(part[rank] for part in widths) for rank in range(self.tp_degree)]
        if len(rest) != 1 or held != [shape[dim] for shape in local_shapes]:
            raise self._unfit(name, f"a cut along dimension {dim} into {held}, and ranks hold {_shown(local_shapes)}")
        slices: list[list[Slice]] = [[] for _ in local_shapes]
        at = 0
        taken = [0] * self.tp_degree
        for part in widths:
            for rank, length in enumerate(part):
                shape = local_shapes[rank]
                low = tuple(taken[rank] if each == dim else 0 for each in range(len(shape)))
                high = tuple(taken[rank] + length if each == dim else n for each, n in enumerate(shape))
                slices[rank].append(
                    Slice(Box(low, high), tuple(at if each == dim else 0 for each in range(len(shape))))
                )
                at += length
                taken[rank] += length
        first = local_shapes[0]
        return TensorParallelLayout((*first[:dim], at, *first[dim + 1 :]), slices, unlisted)

    def _length(self, name: str, shape: tuple[int, ...], dim: int) -> int:
        if dim >= len(shape):
            raise self._unfit(name, f"a cut along dimension {dim}, and a rank holds {list(shape)}")
        return shape[dim]

    def _mapped(self, name: str) -> object:
        stated = self.info.get("affine_map")
        if stated is None:
            return None
        version = stated.get("version", 1) if isinstance(stated, Mapping) else None
        if type(version) is not int or not 1 <= version <= affine.VERSION_MAX:
            raise InvalidError(
                f"{self.where}: affine_map of version {shown(version)}; expected up to {affine.VERSION_MAX}. {CONVERT}"
            )
        found = self._matching("affine_map", name)
        return None if found is None else found[1]

    def _unsupported(self, name: str) -> object:
        found = self._matching(_UNSUPPORTED, name)
        return None if found is None else found[1]

    def _matching(self, key: str, name: str) -> tuple[str, object] | None:
        """Return the one pattern under `key` that matches a name, and what it stands for."""
        if key not in self._listed:
            self._listed[key] = _Listed(list(self._stated(key)))
        found = self._listed[key].matching(name, self._patterns)
        if len(found) > 1:
            raise self._unfit(name, f"several patterns that match it under {key}: {shown([each for each, _ in found])}")
        return found[0] if found else None

    def _stated(self, key: str) -> Iterator[tuple[str, object]]:
        stated = self.info.get(key)
        if key == "affine_map":
            stated = stated.get("params") if isinstance(stated, Mapping) else None
        pairs: Sequence[tuple[object, object]]
        if isinstance(stated, Mapping):
            pairs = list(stated.items())
        elif isinstance(stated, list | tuple) and key == _SEVERAL:
            pairs = [(each, entry) for entry in stated for each in _patterns_of(entry)]
        elif isinstance(stated, list | tuple):
            pairs = [(each, None) for each in stated]
        elif stated is None:
            pairs = []
        else:
            raise InvalidError(f"{self.where}: {key} is {type(stated).__name__}; expected a list or dict of patterns")
        if len(pairs) > _PATTERNS_MAX:
            raise InvalidError(f"{self.where}: {key} holds {len(pairs)} patterns; expected at most {_PATTERNS_MAX}")
        for pattern, value in pairs:
            if not isinstance(pattern, str):
                raise InvalidError(f"{self.where}: {key} holds {type(pattern).__name__}; expected patterns as text")
            yield pattern, value

    def _unfit(self, name: str, what: str) -> InvalidError:
        return InvalidError(f"{self.where}: universal_checkpoint_info states for {name} {what}. {CONVERT}")


class _Listed:
    """The patterns of one list; those that stand for one name are looked up."""

    def __init__(self, stated: Sequence[tuple[str, object]]) -> None:
        self._exact: dict[str, list[tuple[str, object]]] = {}
        self._rest: list[tuple[str, object]] = []
        for pattern, value in stated:
            name = exact_name(pattern)
            if name is None:
                self._rest.append((pattern, value))
            else:
                self._exact.setdefault(name, []).append((pattern, value))

    def matching(self, name: str, patterns: Patterns) -> list[tuple[str, object]]:
        """Return the patterns that match a name, each once."""
        found = [each for each in self._rest if patterns.matches(each[0], name)]
        return list(dict((*self._exact.get(name, ()), *found)).items())


def whole_layout(local_shapes: Sequence[tuple[int, ...]]) -> TensorParallelLayout:
    """Return the layout of a parameter of which one rank holds all."""
    (shape,) = local_shapes
    return TensorParallelLayout(shape, [[Slice(Box.whole(shape), (0,) * len(shape))]])


def _up_to_row(cut: Slice, rows: int) -> Slice | None:
    """Return what a slice holds of the first rows of the whole, None where that is nothing."""
    length = min(rows - cut.start[0], cut.local.shape[0])
    if length <= 0:
        return None
    stop = (cut.local.start[0] + length, *cut.local.stop[1:])
    return Slice(Box(cut.local.start, stop), cut.start, cut.copy)


def _entry(stated: object, name: str) -> object:
    """Return a field of a SubparamShape, which is a dict or an object of DeepSpeed's."""
    if isinstance(stated, OpaqueObject):
        return stated.attribute(name)
    return stated.get(name) if isinstance(stated, Mapping) else None


def _patterns_of(stated: object) -> Sequence[object]:
    found = _entry(stated, "patterns")
    return found if isinstance(found, list | tuple) else [None]


def _views(stated: Sequence[object], dim: int, shape: tuple[int, ...]) -> bool:
    """Return whether a stated view of a parameter is its own shape, but for the dimension that is cut."""
    if len(shape) == 1 and not dim:
        return all(each in (1, -1) for each in stated[1:])
    if len(stated) != len(shape):
        return False
    return all(at == dim or each in (length, -1) for at, (each, length) in enumerate(zip(stated, shape, strict=True)))


def _are_lengths(stated: object, count: int) -> bool:
    if not isinstance(stated, list | tuple) or len(stated) != count:
        return False
    return all(type(each) is int and 0 <= each < 1 << 62 for each in stated)


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes[:8]) + ("…" if len(shapes) > 8 else "")

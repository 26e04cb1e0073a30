"""Random chains of steps over random pieces, chunks and codecs equal numpy, in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import holdfast
from tests.property.states import examples

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A rule, tensors that it takes, and the tensors that numpy makes of them."""

    rules: str
    sources: dict[str, Array]
    targets: dict[str, Array]
    leads_back: bool = True
    """Whether the rule can be turned around: not if padding is inside of blocks."""


def interleaved(array: Array, dim: int, block: int, by: int) -> Array:
    moved = np.moveaxis(array, dim, 0)
    cut = moved.reshape(len(moved) // block, block // by, by, *moved.shape[1:]).swapaxes(1, 2)
    return np.moveaxis(cut.reshape(moved.shape), 0, dim)


def joined(arrays: list[Array], dim: int) -> Array:
    return np.concatenate(arrays, axis=dim)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw the targets' shapes first, so that every step fits; the steps follow in the order of the language."""
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) * draw(st.sampled_from([1, 2, 2, 3])) for _ in range(dims)]
    steps, name, to = [], "t", "t"
    count = 1
    puts = draw(st.sampled_from(["", "join", "stack"]))
    if puts:
        count = draw(st.integers(1, 3))
        name += ".{n:int}"
    takes = draw(st.sampled_from(["", "unstack", "blocks"]))
    if takes:
        across = draw(st.integers(0, dims - 1))
        to += ".{i:int}"
        if takes == "blocks":
            block = draw(st.sampled_from([n for n in range(1, shape[across] + 1) if shape[across] % n == 0]))
            steps.append(f'unstack = {{ dim = {across}, as = "i", block = {block} }}')
        elif dims == 1:
            takes, to = "", "t"
        else:
            block = 0
            steps.append(f'unstack = {{ dim = {across}, as = "i" }}')
    number = st.integers(0, 250)
    sources = {}
    for n in range(count):
        values = np.array(draw(st.lists(number, min_size=math.prod(shape), max_size=math.prod(shape))), np.int32)
        sources[name.replace("{n:int}", str(n))] = values.reshape(shape)
    parts: list[tuple[str, list[Array]]] = []
    pieces = [*sources.values()]
    if not takes:
        parts = [("", pieces)]
    elif block:
        runs = [range(i, i + block) for i in range(0, shape[across], block)]
        parts = [(f".{i}", [each.take(run, across) for each in pieces]) for i, run in enumerate(runs)]
    else:
        parts = [(f".{i}", [each.take(i, across) for each in pieces]) for i in range(shape[across])]
    left = parts[0][1][0].shape
    if puts == "join" and not left:
        puts = "stack"
    if puts:
        at = draw(st.integers(0, len(left) - (puts == "join")))
        of = f", count = {count}" if puts == "join" else ""
        steps.append(f'{puts} = {{ dim = {at}, by = "n"{of} }}')
    content = None
    if left and draw(st.booleans()):
        dim = draw(st.integers(0, len(left) - 1))
        content = draw(st.integers(1, left[dim]))
        steps.append(f"pad = {{ dim = {dim}, content = {content} }}")
        parts = [(key, [each.take(range(content), dim) for each in arrays]) for key, arrays in parts]
        left = parts[0][1][0].shape
    leads_back = content is None or takes != "blocks" or dim != across
    made: dict[str, list[Array]] = {}
    cut = draw(st.integers(0, len(left) - 1)) if left and draw(st.booleans()) else None
    if cut is not None:
        repeat = draw(st.sampled_from([n for n in range(1, left[cut] + 1) if left[cut] % n == 0]))
        row = left[cut] // repeat
        first = draw(st.integers(0, row))
        lengths = [first, row - first]
        texts = []
        for part, length in enumerate(lengths):
            options, then = _inner(draw, (*left[:cut], repeat * length, *left[cut + 1 :]))
            texts.append(f'{{ length = {length}, to = "{to}.p{part}"{options} }}')
            for key, arrays in parts:
                taken = [_section(each, cut, repeat, sum(lengths[:part]), length) for each in arrays]
                made[f"t{key}.p{part}"] = [_then(each, then) for each in taken]
        steps.append(f"sections = {{ dim = {cut}, repeat = {repeat}, parts = [{', '.join(texts)}] }}")
    else:
        options, then = _inner(draw, left)
        steps += options.split(", !")[1:]
        steps.append(f'to = "{to}"')
        made = {f"t{key}": [_then(each, then) for each in arrays] for key, arrays in parts}
    if puts == "stack":
        targets = {key: np.stack(arrays, at) for key, arrays in made.items()}
    else:
        targets = {key: joined(arrays, at) if puts else arrays[0] for key, arrays in made.items()}
    text = f'layout = 1\n[[rule]]\nfrom = "{name}"\n' + "\n".join(steps).replace(", !", ", ") + "\n"
    return Case(text, sources, targets, leads_back)


def _section(array: Array, dim: int, repeat: int, start: int, length: int) -> Array:
    row = array.shape[dim] // repeat
    rows = [r * row + start + k for r in range(repeat) for k in range(length)]
    return array.take(rows, dim)


def _inner(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, tuple[Any, ...]]:
    """Draw an interleave and a permutation; return the keys, and the numbers for numpy."""
    options, mixed, order = "", None, None
    if shape and min(shape) and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        block = draw(st.sampled_from([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]))
        by = draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0]))
        mixed = dim, block, by
        options += f", !interleave = {{ dim = {dim}, block = {block}, by = {by} }}"
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
        options += f", !permute = {[*order]}"
    return options, (mixed, order)


def _then(array: Array, then: tuple[Any, ...]) -> Array:
    mixed, order = then
    array = interleaved(array, *mixed) if mixed else array
    return array.transpose(order) if order is not None else array


def saved(path: Path, arrays: dict[str, Array], chunk: int, codec: str) -> None:
    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    holdfast.save(path, state, settings=holdfast.Settings(chunk_bytes=chunk, compression=codec))  # type: ignore[arg-type]


@settings(max_examples=examples(100), deadline=None)
@given(cases(), st.sampled_from([4096, 1 << 20]), st.sampled_from(["off", "on"]), st.data())
def test_every_chain_of_steps_is_what_numpy_makes(case: Case, chunk: int, codec: str, data: st.DataObject) -> None:
    layout = holdfast.Layout(case.rules)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ck"
        saved(path, case.sources, chunk, codec)
        viewed = holdfast.open_checkpoint(path, layout=layout)
        assert {name: info.shape for name, info in viewed.tensors.items()} == {
            name: array.shape for name, array in case.targets.items()
        }
        for name, array in case.targets.items():
            assert np.array_equal(np.asarray(viewed.read(name)), array), (case.rules, name)
            at = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in array.shape)
            assert np.array_equal(np.asarray(viewed.read(name, at)), array[at])
        state = {name: torch.zeros(array.shape, dtype=torch.int32) for name, array in case.targets.items()}
        holdfast.load(path, state, layout=layout)
        assert all(np.array_equal(state[name].numpy(), array) for name, array in case.targets.items())


@settings(max_examples=examples(100), deadline=None)
@given(cases())
def test_the_way_back_gives_the_sources(case: Case) -> None:
    assume(case.leads_back)
    layout = holdfast.Layout(case.rules)
    with TemporaryDirectory() as folder:
        saved(Path(folder) / "ck", case.targets, 4096, "off")
        back = holdfast.open_checkpoint(Path(folder) / "ck", layout=layout.reversed())
        assert back.tensors.keys() == case.sources.keys()
        for name, array in case.sources.items():
            found = np.asarray(back.read(name))
            kept = array[tuple(slice(n) for n in found.shape)]
            assert np.array_equal(found, kept), (case.rules, name)
        saved(Path(folder) / "source", case.sources, 4096, "off")
        # A layout and the layout that leads back, one on the other, change nothing but padding.
        both = holdfast.open_checkpoint(Path(folder) / "source", layout=[layout, layout.reversed()])
        for name in case.sources:
            assert np.array_equal(np.asarray(both.read(name)), np.asarray(back.read(name)))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 9), min_size=1, max_size=5),
    st.text("xyz", min_size=1),
)
@example({"a": 1}, "x")
def test_a_layout_of_names_alone_is_a_rename(values: dict[str, int], prefix: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ck"
        holdfast.save(path, {"m": {name: torch.tensor([number]) for name, number in values.items()}})
        states = [{"m": {f"{prefix}.{name}": torch.zeros(1, dtype=torch.int64) for name in values}} for _ in range(2)]
        holdfast.load(path, states[0], rename={"": prefix})
        rules = f'layout = 1\nfollow = [["m.{{}}", "m.{{}}"]]\n[[rule]]\nfrom = "{{x:*}}"\nto = "{prefix}.{{x}}"\n'
        holdfast.load(path, states[1], layout=rules)
        assert states[0] == states[1]

"""Fuzz targets of the layout language: rule files over a few tensors, templates, expressions."""

from __future__ import annotations

from itertools import product

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.layouts.expression import NUMBER_MAX, expression_of
from holdfast.base.layouts.layout import Layout, shipped, views_of
from holdfast.base.layouts.template import template_of
from holdfast.errors import CheckpointError

_SHAPES = {"a": (6, 4), "b": (6, 4), "m.0.w": (2, 8, 4), "m.1.w": (2, 8, 4), "c": ()}
_SPECS = {name: TensorSpec(name, "float32", shape) for name, shape in _SHAPES.items()}
_ELEMENTS_MAX = 10_000
_SEEDS = (
    'layout = 1\n[[rule]]\nfrom = "{x:*}"\nto = "{x}"\n',
    'layout = 1\n[[rule]]\nfrom = "{n:a|b}"\nto = "x"\njoin = { dim = 0, by = "n" }\n'
    '[[rule]]\nfrom = "{x:*}"\nto = "{x}"\n',
    'layout = 1\n[sizes]\nh = [{ shape = "a", dim = 0 }, "2 * 3"]\n[[rule]]\nfrom = "m.{i:int}.w"\n'
    'unstack = { dim = 0, as = "j" }\nsections = { dim = 0, repeat = 2, parts = ['
    '{ length = "h // 2", to = "q.{i}.{j:int}", transpose = true }, { length = 1, to = "k.{i}.{j:int}" }] }\n'
    '[[rule]]\nfrom = "{x:*}"\nto = "{x}"\n',
    'layout = 1\n[[rule]]\nfrom = "a"\nto = "a"\ninterleave = { dim = 0, block = 6, by = 2 }\n'
    'pad = { dim = 1, content = 3 }\n[[rule]]\nfrom = "m.{i:int}.w"\nstack = { dim = 1, by = "i" }\nto = "m"\n'
    '[[rule]]\nfrom = "{x:b|c}"\nskip = "old"\n',
)  # fmt: skip


def file(data: bytes) -> None:
    """A rule file: each target of the view is covered exactly once, and no source beyond its shape."""
    try:
        layout = Layout(data.decode("utf-8", "replace") + "\n")
        (view,) = views_of([layout], _SPECS, {}, {"n": 6, "args": {"heads": 4}}, lambda _: None)
    except CheckpointError:
        return
    for tensor in view.tensors.values():
        shape, seen = tensor.spec.global_shape, set()
        terms = tensor.listed_terms()
        for number, alongs in terms:
            source = _SHAPES[tensor.sources[number]]
            for numbers in product(*(range(along.count) for along in alongs)):
                at = {a.target_dim: a.target_start + k * a.target_step for a, k in zip(alongs, numbers, strict=True)}
                of = {a.source_dim: a.source_start + k * a.source_step for a, k in zip(alongs, numbers, strict=True)}
                assert all(0 <= of[dim] < length for dim, length in enumerate(source))
                place = tuple(at[dim] for dim in range(len(shape)))
                assert all(0 <= one < length for one, length in zip(place, shape, strict=True)) and place not in seen
                seen.add(place)
        count = 1
        for length in shape:
            count *= length
        assert not terms or len(seen) == count <= _ELEMENTS_MAX


def template(data: bytes) -> None:
    """A template and a name, apart by a zero byte: a name that is read is written again."""
    text, _, name = data.decode("utf-8", "replace").partition("\0")
    try:
        made = template_of(text, "here")
    except CheckpointError:
        return
    fields = made.read(name)
    assert fields is None or made.write(fields) == name


def expression(data: bytes) -> None:
    """An expression of two sizes."""
    try:
        value = expression_of(data.decode("utf-8", "replace"), "here").value({"a": 7, "b": 3}.__getitem__, "here")
    except (CheckpointError, KeyError):
        return
    assert abs(value) <= NUMBER_MAX


def seeds(target: str) -> list[bytes]:
    """Return the seeds of a target."""
    if target == "layout":
        return [text.encode() for text in (*_SEEDS, *shipped().values())]
    if target == "layout-template":
        return [b"m.{i:int}.{w:a|b}.{x:*}\0m.3.a.q.r", b"{i:03}_{x}\x00007_x", b"{a}.{b}\0x.y"]
    return [b"a // b * (a - b) % 5", b"a <= b < 7", b"((1))"]

"""Explains views in words and as JSON: the elements of each target, and of the source that gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.layouts.layout import Layout
from holdfast.base.types.view import Along, View, ViewedTensor
from holdfast.errors import first_three


@dataclass(frozen=True, slots=True)
class Explanation:
    """The way in which one layout makes tensors."""

    lines: Sequence[str]
    """A line for the layout, and for each tensor a line and one more for each term."""

    summary: str
    """Skipped sources, padding and sizes, in a line."""

    document: Mapping[str, object]
    """The same as JSON."""


def explain(
    layouts: Sequence[Layout], views: Sequence[View], stored: Mapping[str, TensorSpec], names: Iterable[str]
) -> Iterator[Explanation]:
    r"""Yield how each layout makes tensors. The last layout comes first; its sources are the targets of the next.

    Example:
        rules = 'layout = 1\n[[rule]]\nfrom = "{name:*}"\nto = "net.{name}"'
        opened = holdfast.open_checkpoint("checkpoint", layout=rules)
        views, stored = opened.viewed.views, opened.index.tensors
        for layout in holdfast.api.explain(opened.layouts, views, stored, opened.tensors):
            print(*layout.lines, layout.summary, sep="\n")
    Args:
        layouts: The layouts, in the order in which they are applied.
        views: Their views.
        stored: The tensors below the first layout.
        names: Targets of the last layout.
    """
    for at, (layout, view) in reversed([*enumerate(zip(layouts, views, strict=True))]):
        below = {name: each.spec for name, each in views[at - 1].tensors.items()} if at else stored
        made = {name: view.tensors[name] for name in names}
        names = dict.fromkeys(source for each in made.values() for source in each.sources)
        unread = {name: count for name in names if (count := _unread(view, below[name])) > 0}
        skipped = first_three(f"{name} ({why})" for name, why in view.skipped.items())
        padding = (
            f"{len(unread)} tensor{'s' * (len(unread) > 1)}, {sum(unread.values()):,} elements" if unread else "none"
        )
        sizes = ", ".join(f"{name} {number} ({place})" for name, (number, place) in view.sizes.items())
        yield Explanation(
            [f"layout {layout}", *(line for each in made.values() for line in _lines(each, below))],
            f"skipped: {skipped or 'none'} · padding not read: {padding} · sizes: {sizes or 'none'}",
            {
                "layout": layout.name,
                "reversed": layout.turned,
                "tensors": {name: _document(each) for name, each in made.items()},
                "skipped": dict(view.skipped),
                "unread": unread,
                "sizes": {name: {"number": number, "from": place} for name, (number, place) in view.sizes.items()},
            },
        )


def _unread(view: View, source: TensorSpec) -> int:
    """Return how many elements of a source no target has: padding, and skipped parts."""
    made = [view.tensors[name] for name in view.made_of(source.fqn)]
    if any(each.terms is None for each in made):
        return 0
    terms = ((each.sources[number], alongs) for each in made for number, alongs in each.listed_terms())
    read = sum(prod(along.count for along in alongs) for name, alongs in terms if name == source.fqn)
    return prod(source.global_shape) - read


def _lines(tensor: ViewedTensor, below: Mapping[str, TensorSpec]) -> Iterator[str]:
    shape, before = tensor.spec.global_shape, ""
    yield f"{tensor.spec.fqn}   {tensor.spec.dtype} {list(shape)}   rule {tensor.rule}"
    rows = [("all", f"{tensor.sources[0]} {list(shape)}", "all")] if tensor.terms is None else []
    for number, alongs in tensor.listed_terms():
        source = below[tensor.sources[number]]
        shown = "…" if source.fqn == before else f"{source.fqn} {list(source.global_shape)}"
        target = _elements([along.reversed() for along in alongs], shape)
        rows.append((target, shown, _elements(alongs, source.global_shape) + _order(alongs)))
        before = source.fqn
    first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    yield from (f"  {target:{first}}   {shown:{second}}  {elements}" for target, shown, elements in rows)


def _elements(alongs: Sequence[Along], shape: Sequence[int]) -> str:
    """Return elements of the source in words: `all`, `rows 8-12`, or each dimension, as `[1, 8-12, :]`."""
    by_dim, parts = {along.source_dim: along for along in alongs}, []
    for dim, length in enumerate(shape):
        start, step, count = by_dim[dim].source_start, by_dim[dim].source_step, by_dim[dim].count
        run = f"{start}-{start + (count - 1) * step + 1}{f' by {step}' if step > 1 else ''}"
        parts.append(":" if count == length else str(start) if count == 1 else run)
    if {*parts[1:]} - {":"}:
        return f"[{', '.join(parts)}]"
    return "all" if {*parts} <= {":"} else f"row{'s' * ('-' in parts[0])} {parts[0]}"


def _order(alongs: Sequence[Along]) -> str:
    """Return in words the dimensions of the source in the order of the target, if that is another order."""
    dims = [(a.target_dim, a.source_dim) for a in alongs if a.target_dim is not None and a.source_dim is not None]
    order = [source for _, source in sorted(dims)]
    return f", dimensions {order}" if order != sorted(order) else ""


def _document(tensor: ViewedTensor) -> dict[str, object]:
    terms = tensor.listed_terms()
    return {
        "dtype": tensor.spec.dtype,
        "shape": tensor.spec.global_shape,
        "rule": tensor.rule,
        "open_dim": tensor.open_dim,
        "sources": tensor.sources,
        "terms": [{"source": tensor.sources[at], "along": [asdict(each) for each in alongs]} for at, alongs in terms],
    }

"""A checkpoint under layouts, as a restoration sees it, and the way back to stored tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from holdfast.base.layouts.layout import Layout, views_of
from holdfast.base.ports.framework import Catalog, Wanted
from holdfast.base.types.reports import PartlyFilled
from holdfast.base.types.view import View
from holdfast.errors import InvalidError
from holdfast.stored.checkpoint.plain_values import to_plain
from holdfast.stored.checkpoint.viewed import Viewed
from holdfast.stored.checkpoint.viewed_values import viewed_values


@dataclass(frozen=True, slots=True)
class ViewedCatalog:
    """A catalog under layouts."""

    catalog: Catalog
    """The content of the checkpoint, as the layouts make it."""

    viewed: Viewed
    """Leads back to the stored tensors."""

    padded: Mapping[str, int]
    """Tensors that a state may have longer, each with the dimension: the rest is padding."""

    def named_padded(self, stored: Mapping[str, str]) -> dict[str, int]:
        """Return `padded` under other names, given as a map from these to those of the catalog; empty for the same."""
        return (
            {name: self.padded[old] for name, old in stored.items() if old in self.padded}
            if stored
            else {**self.padded}
        )

    def as_stored(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Return wanted tensors as boxes of those that the checkpoint stores."""
        return _as_stored(self.viewed, wanted)


def _as_stored(viewed: Viewed, wanted: Iterable[Wanted]) -> list[Wanted]:
    found: list[Wanted] = []
    for each in wanted:
        source = viewed.renamed(each.stored_fqn)
        if source is not None:  # Not `replace`, which takes four times as long: there may be 100,000.
            found.append(Wanted(source, each.boxes, each.dtype, each.global_shape, each.target, each.fqn))
            continue
        for box in each.boxes:
            parts = viewed.stored(each.stored_fqn, box, each.target)
            found += [replace(each, stored_fqn=fqn, boxes=(part,), target=target) for fqn, part, target in parts]
    return found


def viewed_catalog(
    catalog: Catalog, layouts: Sequence[Layout], documents: Mapping[str, bytes], where: str
) -> ViewedCatalog:
    """Return a catalog as layouts make it.

    Args:
        catalog: The checkpoint.
        layouts: In the order in which they are applied.
        documents: Files that lie with the checkpoint, by name.
        where: The checkpoint, for messages.
    Raises:
        InvalidError: A layout does not fit, or tensors that it joins have unlike counts of steps.
    """
    values = {key: to_plain(value, key) for key, value in catalog.tree.items.items()}
    views = views_of(layouts, catalog.tensors, catalog.aliases, values, documents.get)
    viewed = Viewed.of(views, catalog.tensors, catalog.aliases).with_equal_counts(catalog.same_content, where)

    def require_stored(fqn: str) -> None:
        source = viewed.renamed(fqn)
        for each in (source,) if source is not None else viewed.sources(fqn):
            catalog.require_stored(each)

    changed = replace(
        catalog,
        tensors=viewed.tensors,
        aliases=viewed.aliases,
        tree=viewed_values(catalog.tree, views),
        masters=_masters(catalog.masters, views),
        same_content=lambda first, second: viewed.is_same(first, second, catalog.same_content),
        fill=lambda wanted: catalog.fill(_as_stored(viewed, wanted)),
        require_stored=require_stored,
    )
    is_open = any(layout.turned and rule.pad is not None for layout in layouts for rule in layout.file.rules)
    padded = {name: dim for name in viewed.tensors if is_open and (dim := viewed.open_dim(name)) is not None}
    return ViewedCatalog(changed, viewed, padded)


def require_padding(partly: Sequence[PartlyFilled], padded: Mapping[str, int], partial: Sequence[str]) -> None:
    """Refuse tensors of other shapes than padding explains.

    Args:
        partly: Tensors of another shape than saved.
        padded: Tensors that may be longer, each with the dimension.
        partial: Patterns of the caller, who takes any shape.
    Raises:
        InvalidError: Names the tensor and both shapes.
    """
    for tensor in partly:
        dim = padded.get(tensor.fqn)
        if dim is None or any(fnmatchcase(tensor.fqn, pattern) for pattern in partial):
            continue
        lengths = [*zip(tensor.shape, tensor.stored_shape, strict=True)]
        if any(n < m if at == dim else n != m for at, (n, m) in enumerate(lengths)):
            raise InvalidError(
                f"{tensor.fqn}: {tensor.shape} here and {tensor.stored_shape} by the layout; expected the same, or "
                f"longer along dimension {dim} alone, by padding. Nothing was changed. Are the sizes right?"
            )


def _masters(masters: Mapping[str, str], views: Sequence[View]) -> dict[str, str]:
    """Return the masters of what views make: parts of a tensor have the same parts of its master."""
    pairs = [*masters.items()]
    for view in views:
        pairs = [pair for fqn, master in pairs for pair in zip(view.made_of(fqn), view.made_of(master), strict=False)]
    return dict(pairs)

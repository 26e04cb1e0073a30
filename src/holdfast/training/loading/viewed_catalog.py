"""A checkpoint under layouts, as a restoration sees it, and the way back to stored tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.base.layouts.layout import Layout, views_of
from holdfast.base.ports.framework import Catalog, Wanted
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

    padded: tuple[str, ...]
    """Tensors that a state may have longer: the rest is padding."""

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
    viewed = Viewed.of(views, catalog.tensors, catalog.aliases)
    _require_equal_counts(catalog, views, where)

    def same_content(first: str, second: str) -> bool:
        pairs = [*zip(viewed.sources(first), viewed.sources(second), strict=False)]
        alike = len(viewed.sources(first)) == len(viewed.sources(second))
        return alike and all(catalog.same_content(one, other) for one, other in pairs)

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
        same_content=same_content,
        fill=lambda wanted: catalog.fill(_as_stored(viewed, wanted)),
        require_stored=require_stored,
    )
    is_open = any(layout.turned and rule.pad is not None for layout in layouts for rule in layout.file.rules)
    padded = tuple(name for name in viewed.tensors if is_open and viewed.is_padded(name))
    return ViewedCatalog(changed, viewed, padded)


def _require_equal_counts(catalog: Catalog, views: Sequence[View], where: str) -> None:
    below: list[View] = []
    for view in views:
        lower = Viewed.of(below, catalog.tensors, catalog.aliases)
        for first, second in view.equal:
            (one, *_), (other, *_) = lower.sources(first), lower.sources(second)
            if not catalog.same_content(one, other):
                raise InvalidError(
                    f"{where}: {one} and {other} differ; expected equal counts of steps, since the layout joins their "
                    "parameters. Load the model alone, or write a layout that keeps them apart"
                )
        below.append(view)


def _masters(masters: Mapping[str, str], views: Sequence[View]) -> dict[str, str]:
    """Return the masters of what views make: parts of a tensor have the same parts of its master."""
    pairs = [*masters.items()]
    for view in views:
        pairs = [pair for fqn, master in pairs for pair in zip(view.made_of(fqn), view.made_of(master), strict=False)]
    return dict(pairs)

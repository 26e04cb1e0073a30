"""Layouts as callers give them: a shipped name, a path or a text, with sizes, read from either side."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.layouts.rule_file import BYTES_MAX, RuleFile, rule_file_of
from holdfast.base.layouts.rule_text import SizePlace
from holdfast.base.layouts.sizes import Facts, LayoutSizes
from holdfast.base.layouts.viewing import Viewing
from holdfast.base.types.view import View
from holdfast.errors import InvalidError, MissingError

_ENDING = ".toml"


class Layout:
    """A file of rules that say how the tensors of a checkpoint make the tensors that are asked for.

    Example:
        layout = holdfast.Layout("megatron-hf-llama", sizes={"vocab": 32000})
        holdfast.load("megatron/iter_0000100", {"model": model}, layout=["megatron-dist", layout])
    """

    def __init__(self, rules: str | os.PathLike[str], *, sizes: Mapping[str, int] | None = None) -> None:
        """Read a layout.

        Args:
            rules: The name of a shipped layout, the path of a file, or a text of several lines.
            sizes: Numbers by name of the size; each must agree with the number in the checkpoint.
        Raises:
            InvalidError: The file is no layout, or a size is no integer.
            MissingError: There is no such name or file.
        """
        self.file: RuleFile = _read(rules)
        """The rules."""
        if sizes is not None and not isinstance(sizes, Mapping):
            raise InvalidError(f"sizes={sizes!r:.60}; expected a dict such as {{'heads': 32}}")
        self.sizes: Mapping[str, int] = dict(sizes or {})
        """Given sizes."""
        self.turned = False
        """Whether the rules are read from right to left."""
        for name, number in self.sizes.items():
            if type(number) is not int:
                raise InvalidError(f"layout {self.file.name}: size {name} = {number!r:.60}; expected an integer")

    @property
    def name(self) -> str:
        """The name."""
        return self.file.name

    @property
    def documents(self) -> tuple[str, ...]:
        """Files that lie with a checkpoint and have sizes of the layout."""
        places = (place for listed in self.file.sizes.values() for place in listed if isinstance(place, SizePlace))
        return tuple(dict.fromkeys(place.json for place in places if place.json))

    def reversed(self) -> Layout:
        """Return the layout that leads back.

        Example:
            back = holdfast.Layout("nanogpt").reversed()
        """
        other = object.__new__(Layout)
        other.file, other.sizes, other.turned = self.file, self.sizes, not self.turned
        return other

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that the rules make, by name; nothing is read.

        Example:
            shapes = holdfast.Layout("hf-mixtral").shapes({"model.lm_head.weight": (32000, 4096)})
        Args:
            stored: Shapes of stored tensors by name.
        Raises:
            InvalidError: A rule does not fit, or needs a size that is not given.
        """
        specs = {name: TensorSpec(name, "float32", tuple(shape)) for name, shape in stored.items()}
        (view,) = views_of((self,), specs, {}, {}, lambda name: None)
        return {name: each.spec.global_shape for name, each in view.tensors.items()}

    def __str__(self) -> str:
        sizes = "".join(f", {name}={number}" for name, number in sorted(self.sizes.items()))
        text = hashlib.sha256(self.file.text.encode()).hexdigest()[:8]
        return f"{self.name} {text}{' reversed' if self.turned else ''}{sizes}"


OneLayout = str | os.PathLike[str] | Layout
Layouts = OneLayout | Sequence[OneLayout] | None
"""A layout as an argument: a shipped name, a path, a text or a `Layout`; or a list, the first to be applied first."""


def layouts_of(given: object) -> tuple[Layout, ...]:
    """Return the layouts of an argument, the first to be applied first.

    Raises:
        InvalidError: The argument is no layout.
        MissingError: There is no such name or file.
    """
    if given is None:
        return ()
    if isinstance(given, Layout):
        return (given,)
    if isinstance(given, str | os.PathLike):
        return (Layout(given),)
    if isinstance(given, Sequence):
        return tuple(layout for each in given for layout in layouts_of(each))
    raise InvalidError(f"layout={given!r:.80}; expected a name, a path, a holdfast.Layout, or a list of these")


def shipped() -> dict[str, str]:
    """Return the texts of the shipped layouts by name.

    Example:
        print(holdfast.api.shipped()["megatron-hf-llama"])
    """
    folder = resources.files("holdfast.base.layouts") / "shipped"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(_ENDING)), key=lambda file: file.name)
    return {file.name.removesuffix(_ENDING): file.read_text("utf-8") for file in files}


def views_of(
    layouts: Sequence[Layout],
    tensors: Mapping[str, TensorSpec],
    aliases: Mapping[str, str],
    values: Mapping[str, object],
    document: Callable[[str], bytes | None],
) -> tuple[View, ...]:
    """Return the views of layouts, each over the tensors that the one before makes.

    Args:
        layouts: The first to be applied first.
        tensors: The stored tensors.
        aliases: Tied names, to stored ones.
        values: Plain values of the checkpoint, nested.
        document: Returns a file that lies with the checkpoint; None if there is none.
    Raises:
        InvalidError: A layout does not fit the checkpoint.
    """
    views: list[View] = []

    def json_of(name: str) -> Mapping[str, object] | None:
        data = document(name)
        try:
            found = None if data is None else json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidError(f"{name}: no JSON: {error}. Correct it, or pass the sizes") from error
        return found if isinstance(found, dict) else None

    for layout in layouts:
        if views:
            tensors, aliases = {name: each.spec for name, each in views[-1].tensors.items()}, views[-1].aliases
        sizes = LayoutSizes(layout.file, layout.sizes, Facts(values, tensors, json_of))
        view = Viewing(layout.file, sizes, turned=layout.turned).view(tensors, aliases)
        for name in layout.sizes:
            sizes(name)  # One that no rule uses must agree with the checkpoint too.
        views.append(view)
    return tuple(views)


def _read(rules: str | os.PathLike[str]) -> RuleFile:
    if isinstance(rules, str) and "\n" in rules:
        return rule_file_of(rules, "given as text")
    known = shipped()
    if isinstance(rules, str) and rules in known:
        return rule_file_of(known[rules], rules)
    path = Path(rules)
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX + 1).decode()
    except (OSError, ValueError) as error:
        raise MissingError(
            f"layout {os.fspath(rules)!a}: no shipped layout and no readable file ({error}); expected one of "
            f"{', '.join(known)}, or the path of a rule file. `holdfast layouts` lists the shipped ones"
        ) from error
    return rule_file_of(text, path.name.removesuffix(_ENDING))

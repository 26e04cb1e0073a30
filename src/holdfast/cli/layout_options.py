"""The options `--layout`, `--size` and `--reversed`, which several commands share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Annotated

import typer

from holdfast import Layout
from holdfast.cli.exit_status import ended_well
from holdfast.errors import InvalidError

Layouts = list[Layout] | None
"""The layouts of a command, the first to be applied first; None without one."""

_Names = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="NAME|FILE",
        help="See the tensors through a layout: a shipped one (holdfast layouts) or a rule file. Repeatable: the first "
        "is applied first.",
    ),
]
_Sizes = Annotated[
    list[str] | None,
    typer.Option("--size", metavar="NAME=N", help="A size of these layouts, such as heads=32. Repeatable."),
]
_Reversed = Annotated[bool, typer.Option("--reversed", help="Go the way of these layouts back, from the last one on.")]


def with_layouts(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of layouts in place of its parameter `layouts`."""
    options = inspect.signature(_stack, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)

    @wraps(command)
    def run(**arguments: object) -> None:
        chosen = {name: arguments.pop(name) for name in options}
        with ended_well():
            layouts = _stack(**chosen)  # type: ignore[arg-type]  # typer has checked the options
        command(**arguments, layouts=layouts)

    own = signature.parameters.values()
    parameters = [each for one in own for each in (options.values() if one.name == "layouts" else (one,))]
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return run


def _stack(layout: _Names = None, size: _Sizes = None, is_reversed: _Reversed = False) -> Layouts:
    """Return the layouts that the options name; a size goes to each layout that declares the size.

    Raises:
        InvalidError: A size is malformed, or no layout has the size; or there is no layout.
        MissingError: There is no such layout.
    """
    names, sizes = layout or (), size or ()
    if not names:
        if sizes or is_reversed:
            raise InvalidError(f"{'--size' if sizes else '--reversed'} without --layout; expected --layout NAME|FILE")
        return None
    given, plain = dict(map(_size, sizes)), [Layout(name) for name in names]
    declared = {size for each in plain for size in each.file.sizes}
    if unknown := sorted(given.keys() - declared):
        known = ", ".join(sorted(declared)) or "none"
        raise InvalidError(f"--size {unknown[0]}: no layout has such a size; expected one of {known}")
    stack = [
        Layout(name, sizes={size: number for size, number in given.items() if size in each.file.sizes})
        for name, each in zip(names, plain, strict=True)
    ]
    return [layout.reversed() for layout in reversed(stack)] if is_reversed else stack


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not re.fullmatch("[0-9]{1,18}", number):
        raise InvalidError(f"--size {text[:80]!r}; expected NAME=N, such as heads=32")
    return name, int(number)

"""`holdfast layouts`: the layouts that come with Holdfast."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import Layout, api
from holdfast.cli.arguments import AsJson
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import stdout
from holdfast.errors import MissingError


def layouts(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print the rules of this one.", show_default=False)
    ] = None,
    from_transformers: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_TYPE", help="Print rules that say the mapping of Transformers.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the layouts that come with Holdfast, or print the rules of one."""
    with ended_well():
        if from_transformers is not None:
            if name is not None:
                raise typer.BadParameter("expected NAME or --from-transformers, not both")
            from holdfast.integrations.transformers import layout_of

            text = layout_of(from_transformers)
            screen = stdout()
            screen.json({from_transformers: text}) if as_json else screen.line(text.removesuffix("\n"))
            return
        shipped = api.shipped()
        if name is not None and name not in shipped:
            raise MissingError(f"no shipped layout {name[:80]!r}; expected one of {', '.join(shipped)}")
        chosen = shipped if name is None else {name: shipped[name]}
        screen, about = stdout(), {each: Layout(each).file.about for each in chosen}
        if as_json:
            screen.json({each: {"about": about[each], "rules": text} for each, text in chosen.items()})
        elif name is None:
            screen.table(("LAYOUT", "ABOUT"), [*about.items()])
        else:
            screen.line(shipped[name].removesuffix("\n"))

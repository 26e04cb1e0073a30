"""`holdfast tag`: names steps of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.arguments import Root, SingleWriter, settings_with
from holdfast.cli.exit_status import ended_well
from holdfast.cli.screen import Screen, print_result
from holdfast.errors import InvalidError, printable

_COLUMNS = ("TAG", ">STEP", "GIVEN")


def tag(
    root: Root,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="STEP",
            help="The step to name: a number, 300@1f2e for a superseded one, another tag, or latest.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Its name.", show_default=False)] = None,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Remove this name; the step stays.")
    ] = None,
    move: Annotated[bool, typer.Option("--move", help="Move the name if another step has it.")] = False,
    single_writer: SingleWriter = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tags as JSON.")] = False,
) -> None:
    """Name a step of a run, remove a name, or list all names."""
    with ended_well():
        settings = settings_with(single_writer=single_writer)
        if remove is not None:
            if step is not None or move:
                raise InvalidError("--remove takes the name alone; expected: holdfast tag ROOT --remove NAME")
            api.untag(root, remove, settings=settings)
        elif step is not None:
            if name is None:
                raise InvalidError(f"step {step}: no name; expected: holdfast tag ROOT STEP NAME")
            api.tag(root, step, name, move=move, settings=settings)
        if as_json or (step is None and remove is None):
            print_result(api.list_steps(root), _show, _document, as_json=as_json)


def _show(screen: Screen, run: api.RunRecord) -> None:
    if run.tags:
        rows = [[tag.name, str(tag.step), api.shown_time(tag.created)] for tag in run.tags]
        screen.table(_COLUMNS, rows, ["" if _is_held(run, tag) else "yellow" for tag in run.tags])
    elif not run.tag_errors:
        screen.line("no tags yet")
    for tag in run.tags:
        if not _is_held(run, tag):
            screen.line(f"{tag.name}: step {tag.step} is gone, or was saved again since", style="yellow")
    for name, error in run.tag_errors.items():
        screen.line(f"{name}: {printable(str(error))}", style="red")


def _is_held(run: api.RunRecord, tag: api.Tag) -> bool:
    return any(tag.name in record.tags for record in run.steps)


def _document(run: api.RunRecord) -> dict[str, object]:
    return {
        "root": run.url,
        "tags": [
            {"tag": tag.name, "step": tag.step, "created": tag.created, "held": _is_held(run, tag)} for tag in run.tags
        ],
        "damaged": {name: str(error) for name, error in run.tag_errors.items()},
    }

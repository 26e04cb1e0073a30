"""Arguments that several commands share, and the checkpoint at a path given on the command line."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from holdfast import api
from holdfast.cli.layout_options import Layouts
from holdfast.cli.screen import stderr
from holdfast.errors import CheckpointError, InvalidError, printable
from holdfast.settings import ObjectSettings, Settings

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The folder of a run, which holds step-* folders.")]
Step = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="STEP",
        help="Of the root of a run: the step, as number, tag, 300@1f2e or latest. Default: the newest valid one.",
    ),
]
Near = Annotated[str, typer.Argument(metavar="NEAR", help="The folder of the near tier.")]
ToRoot = Annotated[
    str | None, typer.Option("--to", metavar="ROOT", help="The root. Default: the one that the near tier names.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")]
Grace = Annotated[
    float | None,
    typer.Option("--grace", metavar="SECONDS", help="Wait for readers between mark and removal.", min=0),
]
AllowRoot = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-root",
        metavar="PATH",
        help="Folder of files that the checkpoint may reference (imported without --copy). Repeatable.",
    ),
]
SingleWriter = Annotated[
    bool,
    typer.Option(
        "--single-writer",
        help="Accept a store where two writers could create one object; nothing else may write there meanwhile.",
    ),
]


_NEWEST = "latest"
"""The name of the newest valid step."""


def say_grace(grace: float | None) -> None:
    """Say on stderr how long a command waits before it removes steps; None for the default of the settings."""
    seconds = Settings().collect_grace_seconds if grace is None else grace
    stderr().line(f"steps are marked, and removed after {seconds:g} s", style="dim")


def opened(
    path: str, allow_root: list[str] | None = None, step: str | None = None, layouts: Layouts = None
) -> api.Checkpoint:
    """Return the checkpoint at a path; of the root of a run the step, and say on stderr which one it is.

    Args:
        path: Path or URL.
        allow_root: Folders under which the checkpoint may reference files.
        step: The step of a root, as `--step` names it; None for the newest valid one.
        layouts: Layouts that make its tensors.
    Raises:
        CheckpointError: As `open_checkpoint`.
    """
    settings = settings_with(allow_root)
    step = step if step is not None or not api.is_run(path) else _NEWEST
    checkpoint = api.open_checkpoint(path, step=step, layout=layouts, settings=settings)
    _say(path, step, checkpoint.step)
    return checkpoint


def chosen_step(path: str, step: str | None, allow_root: list[str] | None = None) -> str | None:
    """Return a step of a root by number and digest, chosen as by `opened`; None if the path is one checkpoint.

    The digest keeps the step that was announced: the newest may be another one a moment later.
    """
    if step is None and not api.is_run(path):
        return None
    checkpoint = opened(path, allow_root, step)
    return f"{checkpoint.step}@{checkpoint.manifest.digest}"


def damaged_step(path: str, step: str | None) -> int | None:
    """Return the number of a step of a root that cannot be opened; None if the path is no root, or no step is named."""
    if step is None or not api.is_run(path):
        return None
    number = step.partition("@")[0]
    if number.isdecimal():
        return int(number)
    with suppress(CheckpointError):
        return next((tag.step for tag in api.list_steps(path).tags if tag.name == step), None)
    return None


def _say(path: str, named: str | None, step: int | None) -> None:
    """Say which step of a root is taken, unless its number was given."""
    if named is not None and str(step) != named:
        how = "the newest valid one; --step chooses another" if named == _NEWEST else f"named {named}"
        stderr().line(printable(f"{path}: step {step}, {how}"), style="dim")


def settings_with(
    allow_root: list[str] | None = None, *, single_writer: bool = False, compression: str | None = None
) -> Settings:
    """Return the settings of a command. How stores are reached is in the vendors' variables (docs/stores.md).

    Args:
        allow_root: Folders under which checkpoints may reference files.
        single_writer: Whether a store is accepted that lets two writers create one object.
        compression: Whether what is written is compressed, `on` or `off`; None: off.
    Raises:
        InvalidError: `compression` is neither.
    """
    if compression not in (None, "on", "off"):
        raise InvalidError(f"--compression {compression[:80]!r}; expected on or off")
    return Settings(
        allowed_roots=tuple(allow_root or ()),
        object_store=ObjectSettings(single_writer=single_writer),
        compression="on" if compression == "on" else "off",
    )

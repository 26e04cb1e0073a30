"""Arguments that several commands share, and the checkpoint at a path given on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.errors import CheckpointError, InvalidError
from holdfast.settings import Settings

STEPS_MAX = 10

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The folder of a run, which holds step-* folders.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; see docs/cli.md.")]
AllowRoot = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-root",
        metavar="PATH",
        help="Folder of files that the checkpoint may reference (imported without --copy). Repeatable.",
    ),
]


def opened(path: str, allow_root: list[str] | None = None) -> api.Checkpoint:
    """Return the checkpoint at a path.

    Args:
        path: Path or URL.
        allow_root: Folders under which the checkpoint may reference files.
    Raises:
        InvalidError: The path is the root of a run; the message lists its newest steps.
        CheckpointError: As `open_checkpoint`.
    """
    try:
        return api.open_checkpoint(path, settings=settings_with(allow_root))
    except InvalidError as error:
        try:
            steps = [record.step for record in api.list_steps(path).steps if record.committed]
        except CheckpointError:
            raise error from None
        newest = ", ".join(map(str, steps[-STEPS_MAX:])) or "none yet"
        older = "… " * (len(steps) > STEPS_MAX)
        example = f", e.g. {path.rstrip('/')}/step-{steps[-1]:012d}" if steps else ""
        raise InvalidError(
            f"{path}: is the root of a run, not one checkpoint. Its committed steps: {older}{newest}. "
            f"Give the folder of one{example}"
        ) from error


def settings_with(allow_root: list[str] | None) -> Settings:
    """Return settings that allow referenced files under some folders."""
    return Settings(allowed_roots=tuple(allow_root or ()))

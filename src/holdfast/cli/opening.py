"""One checkpoint from a path that somebody typed."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import api
from holdfast.errors import CheckpointError, InvalidError
from holdfast.settings import Settings

STEPS_MAX = 10

AllowRoot = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-root",
        metavar="PATH",
        help="Read files under this folder that the checkpoint references (imported without --copy). Repeatable.",
    ),
]


def opened(path: str, allow_root: list[str] | None = None) -> api.Checkpoint:
    """Return the checkpoint at a path.

    Args:
        path: Where.
        allow_root: Folders under which files that it references may be read.
    Raises:
        InvalidError: It is the root of a run; the message lists its newest steps.
        CheckpointError: As `open_checkpoint`.
    """
    try:
        return api.open_checkpoint(path, settings=Settings(allowed_roots=tuple(allow_root or ())))
    except InvalidError as error:
        try:
            steps = [record.step for record in api.list_steps(path).steps if record.committed]
        except CheckpointError:
            raise error from None
        listed = ", ".join(map(str, steps[-STEPS_MAX:])) or "none yet"
        before = "… " * (len(steps) > STEPS_MAX)
        example = f", e.g. {path.rstrip('/')}/step-{steps[-1]:012d}" if steps else ""
        raise InvalidError(
            f"{path}: is the root of a run, not one checkpoint. Its committed steps: {before}{listed}. "
            f"Give the folder of one{example}"
        ) from error

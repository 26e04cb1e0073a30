"""`holdfast relink`: names the command that took its place, for the README in the root of an older run."""

from __future__ import annotations

from holdfast.cli.arguments import Root
from holdfast.cli.exit_status import ended_well
from holdfast.errors import InvalidError, printable


def relink(root: Root) -> None:
    """Gone: `holdfast cp ROOT NEW` copies the run, and stores once what its steps share."""
    with ended_well():
        raise InvalidError(
            f"{printable(root)}: `holdfast relink` is gone. `holdfast cp {printable(root)} NEW` makes a copy in which "
            "steps share their packs again, proven by digests. Then remove the run without links"
        )

"""The command line: `holdfast ls`, `inspect`, `verify` and the others, for people and for scripts.

The script `holdfast` and `python -m holdfast.cli` call it. Read `app.py` first; `commands/` holds one file for each.
It reads checkpoints through `holdfast.api` and never imports a framework.
"""

from __future__ import annotations

import sys

_NEEDED = {"typer", "rich", "click"}


def main() -> None:
    """Run the command line, then exit: 0 as expected, 1 damaged or different, 2 not possible, 130 interrupted."""
    try:
        from holdfast.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        print(f"holdfast: the command line needs {error.name}; pip install 'holdfast[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()

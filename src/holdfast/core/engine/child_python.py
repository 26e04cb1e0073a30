"""Another Python that imports from where this one does."""

from __future__ import annotations

import json
import sys
from typing import cast

_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {0}; sys.exit({0}.{1}())"


def command_of(entry: str, *arguments: str) -> list[str]:
    """Return the command of a Python that calls a function and exits with its result.

    Args:
        entry: The function, as "package.module:function".
        arguments: What it finds in `sys.argv`, from the third place on.
    """
    # Python itself passes over what else a list of paths may hold, such as a `Path`.
    paths = [path for path in cast(list[object], sys.path) if isinstance(path, str)]
    return [sys.executable, "-c", _MAIN.format(*entry.split(":")), json.dumps(paths), *arguments]

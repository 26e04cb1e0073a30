"""Another Python that imports from where this one does, and the settings that it is given."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, cast

from holdfast.settings import ObjectSettings, Settings

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


def settings_in(fields: Mapping[str, Any]) -> Settings:
    """Return the settings that another process has passed on: `asdict` of them, through JSON."""
    # JSON has lists where settings have tuples.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Settings(**{**values, "object_store": ObjectSettings(**values["object_store"])})

"""Settings by name, for the Holdfast of any checkout: `bench.compare` runs the same code with two of them."""

from __future__ import annotations

import dataclasses

import holdfast

OLDER_NAMES = {"deduplicate": "reuse_unchanged", "share_reads": "exchange"}
"""Settings that were renamed: today's name, and the name before."""


def settings(**values: object) -> holdfast.Settings:
    """Return settings; a value has the older name if this Holdfast knows only that name."""
    known = {field.name for field in dataclasses.fields(holdfast.Settings)}
    named = {name if name in known else OLDER_NAMES.get(name, name): value for name, value in values.items()}
    return holdfast.Settings(**named)  # type: ignore[arg-type]

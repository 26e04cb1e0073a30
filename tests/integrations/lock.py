"""Prints every package of this environment with its version, as constraints for pip: the lock of one integration."""

from __future__ import annotations

import importlib.metadata
import re

_OURS = {"holdfast", "pip", "setuptools"}


def lines() -> list[str]:
    """Return one line a package; a local part such as `+cpu` depends on the machine, and is left out."""
    found = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        # The first one found is the one that is imported.
        found.setdefault(name, package.version.partition("+")[0])
    return sorted(f"{name}=={version}" for name, version in found.items() if name not in _OURS)


if __name__ == "__main__":
    print("\n".join(lines()))

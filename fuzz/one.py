"""Fuzz one target: `python -m fuzz.one TARGET [options of libFuzzer]`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["holdfast"]):
    from fuzz.targets import TARGETS


def main() -> None:
    """Start libFuzzer, which ends the process."""
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: target(bytes(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()

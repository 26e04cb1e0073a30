"""The file that a command writes its result to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.errors import InvalidError, UnavailableError


def write_output(output: str, text: str, option: str) -> None:
    """Replace a file atomically; `-` is stdout. Anything but a regular file, such as a pipe, is written directly.

    Args:
        output: The path, as the user gave it.
        text: The content.
        option: The option that names the file, for errors.
    Raises:
        InvalidError: The path is a folder.
        UnavailableError: The file cannot be written.
    """
    try:
        if output == "-":
            sys.stdout.write(text)
            return
        # Replace the file that a link points to, not the link.
        target, data = Path(output).resolve(), text.encode()
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
            return
        if not target.name or target.is_dir():
            raise InvalidError(f"{output!r}: is a folder; expected the name of a file. Pass {option}")
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError, UnicodeError) as error:
        raise UnavailableError(f"{output}: {error}; expected a file that can be written. Pass {option}") from error

"""Text of unknown content, as servers and client libraries say it, made fit to be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from holdfast.errors import printable

_SHOWN_CHARACTERS_MAX = 300
_QUERY = re.compile(r"\?[^\s)\"']*")
_USER = re.compile(r"://[^\s/@]*@")
_SECRET_NAMES = re.compile(r"(?i)(secret|token|key|passw|passphrase|pwd|credential|sas|auth|cookie)")
_SECRET_CHARACTERS_MIN = 8


def names_a_secret(name: str) -> bool:
    """Return whether a variable or an option of this name may hold a credential."""
    return _SECRET_NAMES.search(name) is not None


def without_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text of unknown content that may be shown: printable, cut, and without credentials.

    Args:
        text: The text.
        secrets: Credentials beside those in variables.
    """
    held = [value for name, value in os.environ.items() if names_a_secret(name)]
    for value in [*(each for each in held if len(each) >= _SECRET_CHARACTERS_MIN), *filter(None, secrets)]:
        text = text.replace(value, "…")
    text = _USER.sub("://…@", _QUERY.sub("?…", text))
    text = "".join(char if char.isprintable() else " " for char in text)
    return printable(text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "…")

"""How a caller names a step: by number, by number and digest, by a tag, or as the newest step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.format.names import STEP_MAX, is_superseded_name, require_step, step_and_digest
from holdfast.errors import InvalidError

NEWEST_NAME = "latest"
"""The name of the newest valid step. No tag has this name."""

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)
_NUMBER = re.compile(r"[0-9][0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class StepName:
    """A step as a caller names it. All fields empty: the newest valid step."""

    step: int | None = None
    """The number; None for a tag and for the newest step."""

    digest: str = ""
    """First digits of the manifest digest; empty for the step that a resume could take."""

    tag: str | None = None
    """The tag."""

    @property
    def is_newest(self) -> bool:
        """Whether the name means the newest valid step."""
        return self.step is None and self.tag is None


def step_name(step: object) -> StepName:
    """Return a parsed name: `300`, `"300"`, `"300@1f2e"`, a tag, or `"latest"`; None is short for `"latest"`.

    Raises:
        InvalidError: The name has another form.
    """
    if step is None or step == NEWEST_NAME:
        return StepName()
    if not isinstance(step, str):
        return StepName(require_step(step))
    if step.isascii() and step.isdecimal():
        # Python refuses to read very long numbers.
        return StepName(require_step(int(step.lstrip("0")[:20] or "0")))
    if is_superseded_name(step):
        return StepName(*step_and_digest(step))
    if not is_tag_name(step):
        raise InvalidError(
            f"step={step[:80]!r}; expected a whole number from 0 to {STEP_MAX}, a tag, {NEWEST_NAME!r}, or for a "
            "superseded step its number, '@' and at least 4 digits of its digest, as in `holdfast ls`: 300@1f2e"
        )
    return StepName(tag=step)


def is_tag_name(name: object) -> bool:
    """Return whether a tag of this name may be stored. Earlier versions of Holdfast let numbers be tags."""
    return isinstance(name, str) and _TAG.fullmatch(name) is not None


def require_tag_name(name: object) -> str:
    """Return a name that a step may get as a tag.

    Raises:
        InvalidError: The name is not text, is too long, has other characters, or is reserved.
    """
    if not is_tag_name(name):
        raise InvalidError(
            f"tag {str(name)[:80]!r}: expected 1 to 100 of letters, digits, '.', '_' and '-', beginning with a letter, "
            "a digit or '_'. Choose another name"
        )
    assert isinstance(name, str), "is_tag_name lets only text pass"
    if _NUMBER.fullmatch(name) or name.lower() == NEWEST_NAME:
        raise InvalidError(
            f"tag {name!r}: numbers and {NEWEST_NAME!r} are reserved; expected another tag, such as 'best'"
        )
    return name

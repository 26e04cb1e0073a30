"""What callers of the public verbs pass, judged and put into the words of the house."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike

from holdfast.errors import InvalidError
from holdfast.ports.framework import Selection

Globs = Sequence[str] | str | None
"""FQN patterns as in `fnmatch`, one or several."""


def require_state(state: object, call: str) -> None:
    """Refuse what is no state.

    Raises:
        InvalidError: It is no dict.
    """
    if not isinstance(state, Mapping):
        hint = "; the arguments are swapped" if isinstance(state, str | int | PathLike) else ""
        raise InvalidError(f"{call}: state is {type(state).__name__}; expected a dict of what to keep{hint}")


def selection_of(only: Globs, skip: Globs, grads: bool) -> Selection:
    """Return which names a call is about, and whether gradients belong to them.

    Raises:
        InvalidError: A pattern is none.
    """
    return Selection(
        only=None if only is None else patterns_of("only", only),
        skip=() if skip is None else patterns_of("skip", skip),
        grads=bool(grads),
    )


def patterns_of(name: str, globs: Sequence[str] | str) -> tuple[str, ...]:
    """Return the patterns of an argument, one or several.

    Raises:
        InvalidError: One is no text.
    """
    if not isinstance(globs, Iterable):
        raise InvalidError(f"{name}: {type(globs).__name__}; expected FQN patterns such as 'optimizer.*'")
    patterns = (globs,) if isinstance(globs, str) else tuple(globs)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidError(f"{name}: pattern {pattern!r}; expected FQN patterns such as 'optimizer.*'")
    return patterns

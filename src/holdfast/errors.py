"""Five errors, named by what the caller must do next, and the end of a process that was told to end."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(Exception):
    """Base of every error that Holdfast raises on purpose."""


class InvalidError(CheckpointError):
    """The call, the state or a setting is wrong: fix it, then call again."""


class UnavailableError(CheckpointError):
    """Storage or the job's key-value store did not do its part: retry, or look at the machine."""


class CorruptError(CheckpointError):
    """Stored bytes are not what was saved: read another copy or another step."""


class ConflictError(CheckpointError):
    """Another writer won: stop, or choose another place."""


class MissingError(CheckpointError):
    """What was asked for is not there: choose another step, path or name."""


BY_NAME: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (InvalidError, UnavailableError, CorruptError, ConflictError, MissingError)
}
"""The kinds by name, so that a rank can tell another rank which one it met."""


class Preempted(SystemExit):
    """The job was told to end, and every rank has left its loop at the same step.

    No error to catch: it ends the process. `code` is 85 where the step is committed, 86 where it is not.
    """

    def __init__(self, code: int, step: int, why: str) -> None:
        super().__init__(code)
        self.step = step
        """The step at which the ranks left."""
        self.why = why
        """What came of it, in words."""

    def __reduce__(self) -> tuple[type[Preempted], tuple[object, int, str]]:
        """Return what makes it again in another process."""
        return Preempted, (self.code, self.step, self.why)

    @property
    def is_saved(self) -> bool:
        """Whether the step is committed."""
        return self.code == PREEMPTED_SAVED


PREEMPTED_SAVED, PREEMPTED_ABANDONED = 85, 86
"""Exit codes of a process that was told to end: the step it left at is committed, or it is not."""


def printable(text: str) -> str:
    r"""Return a text with everything that could steer a terminal written as an escape, e.g. `\x1b`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


NAMES_SHOWN = 3
"""Names that one message lists, at most."""


def first_three(names: Iterable[object]) -> str:
    """Return a list for a message: the first three names, and how many more there are ("a, b, c and 12 more")."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[:NAMES_SHOWN])
    return shown if len(texts) <= NAMES_SHOWN else f"{shown} and {len(texts) - NAMES_SHOWN:,} more"

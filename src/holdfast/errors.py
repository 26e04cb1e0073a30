"""Five errors, named by what the caller must do next, and the exit of a preempted process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class CheckpointError(Exception):
    """Base of every error that Holdfast raises on purpose."""


class InvalidError(CheckpointError):
    """The call, the state or a setting is wrong: fix it, then call again."""


class UnavailableError(CheckpointError):
    """Storage or the job's key-value store failed: retry, or look at the machine."""


class CorruptError(CheckpointError):
    """Stored bytes are not what was saved: read another copy or another step."""


class ConflictError(CheckpointError):
    """Another writer won: stop, or choose another place."""


class MissingError(CheckpointError, FileNotFoundError):
    """A requested step, path or name does not exist: choose another.

    A `FileNotFoundError` too: scripts begin anew on it. So `except CheckpointError` goes before `except OSError`.
    """


BY_NAME: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (InvalidError, UnavailableError, CorruptError, ConflictError, MissingError)
}
"""The errors by name, so that a rank can send an error to another rank."""


_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Built-in errors of a program. They come back with a retry, unlike those of storage, memory, devices and networks."""


def translated(error: BaseException, prefix: str = "") -> CheckpointError:
    """Return an error as one of ours, with itself as the cause.

    Args:
        error: Any error; one of ours comes back as it is.
        prefix: Begins the message of another one.
    """
    if isinstance(error, CheckpointError):
        return error
    failure: CheckpointError
    what = f"{prefix}{type(error).__name__}: {text_of(error)}"
    if not isinstance(error, Exception):
        failure = UnavailableError(f"{prefix}interrupted by {type(error).__name__}. Call again if the training goes on")
    elif isinstance(error, _MISTAKES) and not isinstance(error, OSError):
        failure = InvalidError(
            f"{what}; an error of the call, of the state, of a store of your own or of Holdfast, not of storage. "
            "Another try fails too: the traceback of the cause shows the place"
        )
    else:
        failure = UnavailableError(what)
    failure.__cause__ = error
    return failure


def text_of(error: BaseException) -> str:
    """Return an error's message, also if the error cannot be printed."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error of a user's own class
        return "its message cannot be printed"


class Preempted(SystemExit):
    """A rank received a signal to end, and every rank has left its loop at the same step.

    Do not catch it: it ends the process. `code` is 85 if the step is committed or in the redo log, else 86.
    """

    def __init__(self, code: int, step: int, why: str) -> None:
        super().__init__(code)
        self.step = step
        """The step at which the ranks left."""
        self.why = why
        """The outcome, for people."""

    def __reduce__(self) -> tuple[type[Preempted], tuple[object, int, str]]:
        """Return how to unpickle it."""
        return Preempted, (self.code, self.step, self.why)

    @property
    def is_saved(self) -> bool:
        """Whether a restart would go on at the step."""
        return self.code == PREEMPTED_SAVED


PREEMPTED_SAVED, PREEMPTED_ABANDONED = 85, 86
"""Exit codes of a preempted process: a restart goes on at its last step, or before it."""


def printable(text: str) -> str:
    r"""Return a text with control characters as escapes, e.g. `\x1b`, so that a terminal does not obey them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def shown_bytes(count: int) -> str:
    """Return a size for people: `812 B`, `1.3 MiB`."""
    if count < 1024:
        return f"{count} B"
    scaled = float(count)
    for unit in _UNITS[:-1]:
        scaled /= 1024
        # 1023.95 would be rounded to 1024.0 of this unit.
        if scaled < 1023.95:
            return f"{scaled:.1f} {unit}"
    return f"{scaled / 1024:,.1f} {_UNITS[-1]}"


def counted(count: int, singular: str) -> str:
    """Return a count with its singular: `1 tensor`, `2,048 tensors`."""
    return f"{count:,} {singular}{'s' * (count != 1)}"


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks for people: `0-3, 7`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


NAMES_SHOWN = 3
"""Most names in one message."""


def first_three(names: Iterable[object]) -> str:
    """Return a list for a message: the first three names, and how many more there are ("a, b, c and 12 more")."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[:NAMES_SHOWN])
    return shown if len(texts) <= NAMES_SHOWN else f"{shown} and {len(texts) - NAMES_SHOWN:,} more"


def refusal(messages: Sequence[str]) -> InvalidError:
    """Return one error for all values of a state that cannot be saved: the first three, and the count.

    Args:
        messages: One for each value: its path, what it is, and what to do.
    """
    if len(messages) == 1:
        return InvalidError(messages[0])
    shown = "; ".join(f"({number}) {text}" for number, text in enumerate(messages[:NAMES_SHOWN], start=1))
    more = f"; and {len(messages) - NAMES_SHOWN:,} more" if len(messages) > NAMES_SHOWN else ""
    return InvalidError(f"{len(messages):,} values of the state cannot be saved: {shown}{more}")

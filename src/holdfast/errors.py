"""Five errors, named by what the caller must do next."""


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

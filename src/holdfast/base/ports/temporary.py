"""The error of a call that may succeed later, and the counts of retries."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import UnavailableError


class TemporaryError(UnavailableError):
    """A call failed, and the same call may succeed later.

    Only a store below `backends/stores/wrappers/` raises it, and makes one request a call: only the wrapper tries
    again. The wrapper turns the last failure into a plain `UnavailableError`. The client of an agent has no wrapper:
    another node answers sooner. A failure that lasts, such as a missing bucket or permission, is no `TemporaryError`
    and is never tried again. In short:

    | The server | Raise |
    |-|-|
    | 503, 429, a limit on requests | `TemporaryError(…, is_throttled=True)`, with `retry_after_seconds` if it says so |
    | no answer in time | `TemporaryError(…, is_throttled=True, may_take_effect=True)` |
    | connection cut, other 5xx | `TemporaryError(…, may_take_effect=True)` |
    | no connection, 409 without another object | `TemporaryError(…)` |
    | no bucket, no permission, wrong region, clock skew | another error of the five |
    """

    def __init__(
        self,
        message: str,
        *,
        is_throttled: bool = False,
        may_take_effect: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        """Describe a failure.

        Args:
            message: What failed, where, and what the server said.
            is_throttled: Whether fewer requests at a time would help.
            may_take_effect: Whether the request may have had an effect, or may still have one.
            retry_after_seconds: The wait that the server asked for; None if it named none.
        """
        super().__init__(message)
        self.is_throttled = is_throttled
        self.may_take_effect = may_take_effect
        self.retry_after_seconds = retry_after_seconds
        self.is_first_contact = False
        """Whether the server has never answered this process: it may be the wrong one, so the log says so at once."""


@dataclass(frozen=True, slots=True)
class RetryCounts:
    """What retries have cost in this process."""

    retries: int = 0
    """Tries after the first ones."""

    seconds: float = 0.0
    """Seconds in which at least one call was being tried again, from its first failure on."""

    throttled: int = 0
    """Tries that the store refused or left unanswered because it had too much to do."""

    def since(self, earlier: RetryCounts) -> RetryCounts:
        """Return what was added to earlier counts."""
        seconds = round(self.seconds - earlier.seconds, 6)
        return RetryCounts(self.retries - earlier.retries, seconds, self.throttled - earlier.throttled)

"""How long one request may take: a time for silence, and more for its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.settings import ObjectSettings


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits of one request. A store that ends its requests by itself uses them too."""

    silence_seconds: float
    """How long a server may be silent: a request without bytes takes no longer."""

    bytes_per_second_min: int
    """A connection that is slower than this counts as broken."""

    @classmethod
    def of(cls, settings: ObjectSettings) -> TimeLimits:
        """Return the limits that the settings choose."""
        return cls(settings.silence_timeout_seconds, settings.bytes_per_second_min)

    def request_seconds(self, moved_bytes: int) -> float:
        """Return the longest time of a request that moves so many bytes."""
        return self.silence_seconds + moved_bytes / self.bytes_per_second_min

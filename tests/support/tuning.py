"""Settings whose private constants (`holdfast.settings.Tuning`) a test chooses."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from holdfast.settings import Settings, Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSettings(Settings):
    """A field where `Settings` has a constant, so that `replace`, `==` and `hash` know it."""

    _tuning: Tuning = Settings._tuning


def tuned(settings: Settings, **constants: int) -> TunedSettings:
    """Return the same settings with other values for some of the constants."""
    chosen = {field.name: getattr(settings, field.name) for field in fields(Settings)}
    return TunedSettings(**chosen, _tuning=replace(settings._tuning, **constants))

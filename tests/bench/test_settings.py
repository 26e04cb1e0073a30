"""The bench chooses settings of today and of the checkout before a rename by the same words."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import holdfast
from bench.settings import OLDER_NAMES, settings


@dataclass(frozen=True)
class OlderSettings:
    """The settings under the names that they had before."""

    reuse_unchanged: bool = True
    exchange: str = "auto"
    arena_bytes_max: int | None = None


def test_a_setting_goes_under_the_name_that_the_package_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    today = settings(deduplicate=False, share_reads="always", arena_bytes_max=7)
    assert (today.deduplicate, today.share_reads, today.arena_bytes_max) == (False, "always", 7)
    monkeypatch.setattr(holdfast, "Settings", OlderSettings)
    assert settings(deduplicate=False, share_reads="always", arena_bytes_max=7) == OlderSettings(False, "always", 7)


def test_a_name_that_no_package_knows_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        settings(colour="blue")


def test_names_changed() -> None:
    assert all(today != before for today, before in OLDER_NAMES.items())

"""A place for roots that are made and broken by the hundred."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounted_file_systems import workplace


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory if there is one: what a sweep proves does not depend on a disk, its time does."""
    with workplace() as location:
        yield location

"""Sizes as people type them."""

from __future__ import annotations

import pytest

from holdfast.cli.commands.export import bytes_of
from holdfast.errors import InvalidError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5_000_000_000),
        ("5GiB", 5 << 30),
        ("512mib", 512 << 20),
        ("1.5 KB", 1500),
        ("3k", 3072),
        ("77", 77),
        ("12B", 12),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_is_what_its_unit_says(text: str, expected: int) -> None:
    assert bytes_of(text, "--memory") == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5XB", "1e9", "0", "5 G B", "9999999PB", "٣GB", "1" * 400 + "GB"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match=r"--memory .*expected a size such as 5GB or 512MiB"):
        bytes_of(text, "--memory")

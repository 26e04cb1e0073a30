"""Each value outside its range is refused by the class that has the field."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import InvalidError
from holdfast.settings import KIB, MIB, PAGE_BYTES, ObjectSettings, Settings, Tuning


@pytest.mark.parametrize(
    ("made", "field", "value", "expected"),
    [
        (Settings, "chunk_bytes", PAGE_BYTES // 2, "a multiple of 4096"),
        (Settings, "chunk_bytes", PAGE_BYTES + 1, "a multiple of 4096"),
        (Settings, "chunk_bytes", 8 * MIB, "a multiple of 4096"),
        (Tuning, "window_bytes", 0, "a multiple of 4096"),
        (Tuning, "read_window_bytes", 128 * MIB, "a multiple of 4096"),
        (Tuning, "read_window_bytes", 2 * PAGE_BYTES + 1, "a multiple of 4096"),
        (Tuning, "windows_in_flight", 0, "a whole number from 1 to 64"),
        (Tuning, "windows_in_flight", 65, "a whole number from 1 to 64"),
        (ObjectSettings, "bytes_in_flight_max", 512 * KIB, "a whole number from 1048576"),
        (ObjectSettings, "retry_seconds_per_call", -1, "0 or more"),
        (ObjectSettings, "retry_seconds_per_save", float("inf"), "0 or more"),
        (ObjectSettings, "silence_timeout_seconds", 0, "a positive number"),
        (ObjectSettings, "bytes_per_second_min", 0, "a whole number from 1"),
    ],
)
def test_a_value_outside_its_range_is_refused(made: Any, field: str, value: object, expected: str) -> None:
    kind = "object settings" if made is ObjectSettings else "settings"
    with pytest.raises(InvalidError, match=f"^{kind}: {field}={value}; expected .*{expected}"):
        made(**{field: value})

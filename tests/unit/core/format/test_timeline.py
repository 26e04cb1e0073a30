"""The timeline that a damaged manifest still states: found in its lines, in one walk through any text."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from holdfast.base.types.timeline import Fork, Timeline
from holdfast.core.format.manifest import encode_manifest
from holdfast.core.format.timeline import timeline_in_damaged
from tests.unit.core.format.documents import manifest

TIMELINE = Timeline(3, "1f" * 8, (Fork("2e" * 8, 400, "3d" * 16), Fork("", 200, "4c" * 16)))


def test_damage_elsewhere_leaves_the_timeline_readable() -> None:
    data = encode_manifest(replace(manifest(), timeline=TIMELINE))
    start = data.index(b'\n "timeline"')
    stop = data.index(b"\n },\n", start) + len(b"\n },\n")
    assert timeline_in_damaged(data) == TIMELINE
    assert timeline_in_damaged(data[start:stop]) == TIMELINE
    assert timeline_in_damaged(data[: stop - 1]) is None, "cut off within the field"
    assert timeline_in_damaged(data.replace(b"3d3d", b"3d\xff")) is None
    assert timeline_in_damaged(encode_manifest(manifest())) is None


@pytest.mark.parametrize(
    "field", [b'"x": ' + b"[" * 200_000, b'"number": ' + b"9" * 5000, b'"id": "\xff"', b'"ancestors": [[[]]]', b"{"]
)
def test_a_crafted_field_states_no_timeline(field: bytes) -> None:
    """Readers of every step of the run ask. An error here would make all steps unusable."""
    assert timeline_in_damaged(b'\n "timeline": {\n  ' + field + b"\n },\n") is None


def test_a_crafted_text_is_walked_once() -> None:
    """Each beginning of the field made the search read on to the end of the text: a megabyte took six minutes."""
    before = time.process_time()
    assert timeline_in_damaged(b'\n "timeline": {\n x' * 50_000) is None
    assert time.process_time() - before < 30

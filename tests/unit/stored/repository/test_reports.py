"""Reports beside a checkpoint: they read back as they were written, and damage never comes out as a report."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.types.coding import KindCoding
from holdfast.base.types.events import Operation, Phase, RankReport
from holdfast.core.format.sealed_json import sealed, unsealed
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from holdfast.stored.repository.reports import decode_reports, encode_reports, put_reports, reports_in

seconds = st.floats(0, 1e6).map(lambda value: round(value, 6))
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
phases = st.builds(Phase, words, seconds, seconds)
operations = st.builds(
    Operation,
    st.sampled_from(["save", "load"]),
    st.none() | st.integers(0, 10**12 - 1),
    st.just("memory://somewhere"),
    st.integers(0, 99_999),
    st.integers(1, 100_000),
)
rates = st.none() | st.floats(0, 1e12, exclude_max=True)
codings = st.builds(
    KindCoding,
    words,
    words,
    st.integers(0, 1 << 50),
    st.integers(0, 1 << 50),
    rates,
    rates,
    rates,
    rates,
    seconds,
    words,
)
reports = st.builds(
    RankReport,
    operations,
    st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    words,
    st.integers(0, 1 << 31),
    st.floats(0, 4e9),
    seconds,
    st.lists(phases, max_size=5).map(tuple),
    st.integers(0, 1 << 50),
    st.dictionaries(words, st.integers(-5, 5) | st.floats(0, 1) | words | st.booleans(), max_size=4),
    st.lists(codings, max_size=2).map(tuple),
)


@given(report=reports)
def test_it_reads_back_as_it_was_written(report: RankReport) -> None:
    assert decode_reports(encode_reports([report]), "there", "memory://somewhere") == (report,)


def test_the_bandwidth_counts_the_time_in_which_bytes_moved() -> None:
    told = (Phase("copy", 0.0, 9.0), Phase("write", 1.0, 2.0), Phase("wait", 3.0, 5.0))
    report = RankReport(Operation("save", 1, "x", 0, 1), "0" * 16, "h", 1, 0.0, 10.0, told, 6_000)
    assert report.bytes_per_second == 3_000
    document = json.loads(encode_reports([report]))
    assert document["bytes_per_second"] == 3_000
    assert document["began"] == "1970-01-01T00:00:00.000+00:00"


@given(report=reports, at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_is_taken_for_a_report(report: RankReport, at: float, bit: int) -> None:
    data = bytearray(encode_reports([report]))
    data[int(at * len(data))] ^= 1 << bit
    with pytest.raises(CheckpointError):
        decode_reports(bytes(data), "there", "x")


CODING = asdict(KindCoding("float32 exp_avg", "planes", 12, 10, 1.2, None, 1e9, 0.5, 0.6, "why"))
WRONG = {
    "verb": ["export", 3, None],
    "id": [3, None],
    "step": [-1, "1", 1.0, True],
    "rank": [-1, 100_000, "0", None],
    "world_size": [None, 100_001],
    "host": [None, 1],
    "pid": [-1, "1"],
    "began_unix_seconds": [-1, "0", None, True, 1e13],
    "seconds": [-0.5, None, [], True],
    "bytes": [-1, 1.5, None],
    "facts": [None, [], {"a": []}, {"a": None}],
    "codings": [None, {}, [[]], [{}], [{**CODING, "why": 3}], [{**CODING, "ratio": -1}], [CODING] * 1001],
    "phases": [None, {}, [[]], [["a", 1]], [["a", 1, -1]], [[1, 1, 1]], [["a", "1", 1]], [["a", 1, True]]],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_named(name: str) -> None:
    report = RankReport(Operation("save", 1, "x", 0, 1), "0" * 16, "h", 1, 0.0, 1.0, (), 0)
    document, _ = unsealed(encode_reports([report]), "there")
    for wrong in WRONG[name]:
        with pytest.raises(CorruptError, match=f"there: {name} is "):
            decode_reports(sealed({**document, name: wrong}), "there", "x")


def test_more_phases_than_any_operation_has_are_refused() -> None:
    told = tuple(Phase("a", 0.0, 0.0) for _ in range(10_001))
    report = RankReport(Operation("save", 1, "x", 0, 1), "0" * 16, "h", 1, 0.0, 1.0, told, 0)
    with pytest.raises(CorruptError, match=r"phases is .*length <= 10000"):
        decode_reports(encode_reports([report]), "there", "x")


def test_a_report_without_codings_is_written_as_before() -> None:
    report = RankReport(Operation("save", 1, "x", 0, 1), "0" * 16, "h", 1, 0.0, 1.0, (), 0)
    assert "codings" not in json.loads(encode_reports([report]))


def test_another_kind_and_a_newer_format_are_refused() -> None:
    for header in ({"format": [2, 0], "kind": "report"}, {"format": [1, 0], "kind": "run"}):
        with pytest.raises(InvalidError):
            decode_reports(sealed({"holdfast": header}), "there", "x")


def test_a_folder_yields_what_can_be_read_and_says_what_cannot() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    good = RankReport(Operation("save", 5, f"{store.url}/s", 3, 4), "ab" * 8, "h", 1, 0.0, 1.0, (), 0)
    put_reports(store, "s/", [good])
    key = f"s/reports/save-{'ab' * 8}-r00003.json"
    assert [entry.key for entry in store.list()] == [key]
    store.put(f"s/reports/load-{'cd' * 8}-r00001.json", store.get(key, 1 << 20))
    store.put(f"s/reports/load-{'ef' * 8}-r00001.json", b"")
    store.put("s/reports/notes.txt", b"of somebody else")
    found = dict(reports_in(store, "s/"))
    assert found.pop(key) == good
    renamed, empty = (found[f"s/reports/load-{each * 8}-r00001.json"] for each in ("cd", "ef"))
    assert "It was renamed" in str(renamed) and "truncated" in str(empty)
    assert len(found) == 2


def test_ranks_of_a_node_share_a_file() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    of_ranks = [
        RankReport(Operation("save", 5, f"{store.url}/s", rank, 4), "ab" * 8, "h", rank, 0.0, 1.0, (), rank)
        for rank in (1, 3)
    ]
    put_reports(store, "s/", of_ranks)
    key = f"s/reports/save-{'ab' * 8}-r00001.json"
    assert list(reports_in(store, "s/")) == [(key, each) for each in of_ranks]
    document, _ = unsealed(store.get(key, 1 << 20), "there")
    for wrong in (None, {}, [{}], [{**document, "rank": -1}]):
        with pytest.raises(CorruptError, match="others"):
            decode_reports(sealed({**document, "others": wrong}), "there", "x")

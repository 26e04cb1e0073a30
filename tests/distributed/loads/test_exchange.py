"""Each byte read once in the job and passed to whoever wants it: real gloo processes, bit for bit."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.loads.exchange_cases import STATE_BYTES
from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.distributed.loads.exchange_cases"
AMPLIFICATION_MAX = 1.05


def case(function: str, name: str = "", **arguments: object) -> Case:
    return Case(f"{CASES}:{function}", arguments, name)


@dataclass(frozen=True)
class Worlds:
    four: Results
    two: Results
    three: Results


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    root = tmp_path_factory.mktemp("exchange")

    def at(name: str) -> str:
        return str(root / name)

    four = run_world(
        4,
        [
            case("save", "save_4", path=at("rows-4"), layout="rows"),
            case("load", "copies_on_4", path=at("rows-4"), layout="copies", exchange="always"),
            case("load", "rows_to_columns_on_4", path=at("rows-4"), layout="columns", exchange="always"),
            case("comm_suite"),
        ],
        root / "world-4",
    )
    two = run_world(
        2,
        [
            case("save", "save_2", path=at("rows-2"), layout="rows"),
            case("load", "same_rows", path=at("rows-2"), layout="rows", exchange="always"),
            case("load", "rows_to_columns", path=at("rows-2"), layout="columns", exchange="always"),
            case("load", "never", path=at("rows-2"), layout="columns", exchange="never"),
            case("load", "auto", path=at("rows-2"), layout="columns", exchange="auto"),
            case("load", "4_to_2", path=at("rows-4"), layout="rows", exchange="always"),
            case("load", "copies", path=at("rows-2"), layout="copies", exchange="always"),
            case("save", "save_damaged", path=at("damaged"), layout="rows"),
            case("load_damaged", path=at("damaged"), layout="columns", exchange="always"),
            case("load", "after_damage", path=at("rows-2"), layout="columns", exchange="always"),
            case("load_views", path=at("views")),
            case("save_compressed", path=at("compressed")),
        ],
        root / "world-2",
    )
    three = run_world(
        3,
        [
            case("load", "2_to_3", path=at("rows-2"), layout="rows", exchange="always"),
            case("load_compressed", path=at("compressed")),
        ],
        root / "world-3",
    )
    return Worlds(four, two, three)


def counted(results: Results, name: str) -> list[tuple[int, int]]:
    """Bytes read and bytes given by others, by rank."""
    found = []
    for each in results.values(name):
        assert isinstance(each, list)
        found.append((each[0], each[1]))
    return found


def amplification(results: Results, name: str) -> float:
    return sum(read for read, _ in counted(results, name)) / STATE_BYTES


@pytest.mark.parametrize(
    ("world", "name"),
    [
        ("three", "2_to_3"),
        ("two", "4_to_2"),
        ("two", "rows_to_columns"),
        ("two", "copies"),
        ("two", "same_rows"),
        ("four", "rows_to_columns_on_4"),
        ("four", "copies_on_4"),
    ],
)
def test_each_byte_is_read_once_in_the_job(worlds: Worlds, world: str, name: str) -> None:
    assert 1.0 <= amplification(getattr(worlds, world), name) <= AMPLIFICATION_MAX


@pytest.mark.parametrize("name", ["rows_to_columns_on_4", "copies_on_4"])
def test_reading_is_shared_out_evenly(worlds: Worlds, name: str) -> None:
    read = [each for each, _ in counted(worlds.four, name)]
    assert max(read) <= 1.2 * STATE_BYTES / 4, read


def test_what_was_not_read_was_given(worlds: Worlds) -> None:
    assert all(read + given == STATE_BYTES for read, given in counted(worlds.two, "copies"))
    assert sum(given for _, given in counted(worlds.two, "same_rows")) == 8, "only the step lies on every rank"


def test_coded_bytes_are_read_once_and_passed_on_as_they_are(worlds: Worlds) -> None:
    found = worlds.three.values("load_compressed")
    assert all(isinstance(each, list) for each in found)
    read, given, stored = (sum(each[at] for each in found) for at in range(3))  # type: ignore[index]
    assert 1.0 <= read / (stored / 3) <= AMPLIFICATION_MAX
    assert given > 0


@pytest.mark.parametrize("name", ["never", "auto"])
def test_otherwise_everybody_reads_what_he_wants(worlds: Worlds, name: str) -> None:
    """By force of the setting, or because so few bytes are not worth a round."""
    assert all(given == 0 for _, given in counted(worlds.two, name))
    assert amplification(worlds.two, name) > 1.9


def test_a_tensor_that_is_a_part_of_another_is_not_damage(worlds: Worlds) -> None:
    """In the file of another system two tensors may share bytes. Each rank then reads its own."""
    whole_and_part = 4 * ((1 << 17) + 4000)
    assert worlds.two.values("load_views") == [[[whole_and_part, 0]] * 2] * 2


def test_a_flipped_bit_is_every_ranks_error_and_nobody_hangs(worlds: Worlds) -> None:
    outcomes = worlds.two.of("load_damaged")
    assert [each.error for each in outcomes] == ["CorruptError", "CorruptError"]
    assert all("hash to" in each.message for each in outcomes)
    assert sum(each.message.startswith("rank ") for each in outcomes) == 1, "one rank read it, the other heard of it"
    assert amplification(worlds.two, "after_damage") <= AMPLIFICATION_MAX


def test_the_suite_of_every_comm_passes_over_gloo(worlds: Worlds) -> None:
    assert all("test_an_exchange_in_which_a_rank_has_no_part" in names for names in worlds.four.values("comm_suite"))


def test_a_rank_that_dies_while_bytes_are_passed_on_leaves_nobody_waiting(tmp_path: Path) -> None:
    results = run_world(3, [case("die_while_passing_on", path=str(tmp_path / "saved"))], tmp_path / "world")
    assert results.exits == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        outcome = results.outcome("die_while_passing_on", rank)
        assert outcome is not None, results.logs()
        assert outcome.error is not None

"""The parts of `make campaign`: some or all are run, one that fails stops no other, and an unknown one is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.campaign.local_parts import PARTS, main
from tests.campaign.record import ROOT


class Recorded:
    """Runs nothing, and keeps the commands and environments."""

    def __init__(self, *, failing: str = "") -> None:
        self.commands: list[Sequence[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self._failing = failing

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        self.commands.append(command)
        self.environments.append(environment)
        return int(any(self._failing and self._failing in word for word in command))

    @property
    def files(self) -> list[str]:
        return [word for command in self.commands for word in command if word.startswith("tests/")]


def test_without_only_every_part_is_run() -> None:
    run = Recorded()
    assert main([], run) == 0
    assert run.files == [file for part in PARTS.values() for file in part.files]
    assert not [file for file in run.files if not (ROOT / file).is_file()]


def test_only_runs_some_parts_in_the_order_that_is_given() -> None:
    run = Recorded()
    assert main(["--only", "properties,races", "--rounds", "7", "--faults", "9"], run) == 0
    assert run.files == [*PARTS["properties"].files, *PARTS["races"].files]
    properties, races = run.environments
    assert properties["PROPERTY_TIMES"] == "120" and "PROPERTY_TIMES" not in races
    assert races["EPOCH_RACE_ROUNDS"] == races["PREEMPTION_ROUNDS"] == "7"
    assert races["LIFE_EXAMPLES"] == "35" and races["FAULTS"] == "9"


def test_a_part_that_fails_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded(failing="test_epoch_clock")
    assert main(["--only", "races,clocks,fencing"], run) == 1
    assert len(run.commands) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "campaign: FAILED: clocks"


def test_an_unknown_part_is_refused_with_the_list_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    run = Recorded()
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "races,clock"], run)
    assert f"no part clock; expected some of {', '.join(PARTS)}" in " ".join(capsys.readouterr().err.split())
    assert not run.commands

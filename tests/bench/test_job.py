"""Parts run in real processes of their own, and a rank that fails ends the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import job
from bench.parts import PARTS


@pytest.mark.long
def test_two_ranks_measure_and_rank_0_is_heard(tmp_path: Path) -> None:
    part, params = PARTS["tiny_dtensor"], {"tensors": 20, "rounds": 2}
    measured = job.run(part, params, tmp_path / "bench")
    assert len(measured.rounds) == 2
    assert all(seconds > 0 for each in measured.rounds for seconds in each.values())
    assert set(part.keys(measured.rounds, params)) == {"tiny_save_dtensor_vs_dcp", "tiny_load_dtensor_vs_dcp"}
    assert not (tmp_path / "bench").exists(), "what was saved is removed"


def test_a_rank_that_fails_ends_the_bench(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="a rank of tiny failed"):
        job.run(PARTS["tiny"], {"tensors": 20}, tmp_path / "bench")
    assert "KeyError: 'rounds'" in capfd.readouterr().err
    assert not (tmp_path / "bench").exists()

"""torchao's optimizers under FSDP2 resume on the same ranks, on others, and in one process. Needs `interop`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_worlds import Case, run_world

MODULE = "tests.interop.torchao_sharded"


@pytest.mark.timeout(600)
def test_quantised_moments_follow_the_split(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install holdfast[interop]")
    from tests.interop import torchao_sharded as sharded

    kinds = [*sharded.KINDS]

    def cases(function: str) -> list[Case]:
        return [
            Case(f"{MODULE}:{function}", {"path": str(tmp_path / kind), "kind": kind}, f"{function}_{kind}")
            for kind in kinds
        ]

    two = run_world(2, [*cases("save"), *cases("resume")], tmp_path / "two", deadline_seconds=400)
    four = run_world(4, cases("resume"), tmp_path / "four", deadline_seconds=400)
    for kind in kinds:
        saved = two.values(f"save_{kind}")
        assert two.values(f"resume_{kind}") == saved
        resumed = four.values(f"resume_{kind}")
        assert [each["moments"] for each in resumed] == [saved[0]["moments"]] * 4
        one = sharded.training(kind, sharded=False)
        sharded.holdfast.load(tmp_path / kind, one, process_group=False)
        assert sharded.moments(one) == saved[0]["moments"]
        assert sharded.train(one, 2) == pytest.approx(saved[0]["loss"])

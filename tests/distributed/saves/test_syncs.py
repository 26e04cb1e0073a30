"""Shared folders are made durable by the committing rank alone: 16,384 ranks would ask one metadata server for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.gloo_worlds import Case, run_world

RANKS = 3


def test_only_the_committer_makes_folders_durable(tmp_path: Path) -> None:
    case = Case("tests.distributed.saves.sync_cases:counted_save")
    ranks: list[Any] = run_world(RANKS, [case], tmp_path / "world").values("counted_save")
    (committer,) = [rank["folders"] for rank in ranks if rank["folders"]]
    attempt = next(path for path in committer if path.endswith("/parts")).removesuffix("/parts")
    step = os.path.dirname(attempt)
    assert {attempt + "/parts", attempt, step, "."} <= set(committer), "every folder of the step, up to the root"
    for rank in ranks:
        assert any(path.startswith(f"{attempt}/parts/") for path in rank["files"]), "each rank's part is durable"

"""A file of torch.save that one process wrote, loaded by two ranks under FSDP2."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.distributed.foreign.torchsave_cases import plain, step
from tests.support.gloo_worlds import Case, run_world


def test_a_whole_state_is_loaded_into_shards(tmp_path: Path) -> None:
    model, optimizer = plain(1)
    step(model, optimizer)
    path = tmp_path / "last.pt"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, path)  # noqa: TID251 - what is read here is what torch writes
    case = Case("tests.distributed.foreign.torchsave_cases:load_sharded", {"path": str(path)})
    expected = {"same": True, "compared": 16, "lr": 0.1, "epoch": 3, "missing": []}
    assert run_world(2, [case], tmp_path / "world").values(case.key()) == [expected, expected]

"""A state that the format cannot hold is refused before a byte is written: what is committed can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError

BEYOND = {
    "too many dimensions": Sharded(torch.ones(1), (1,) * 100, flat_start=0),
    "too many bytes": torch.empty((2**61, 0)),
    "too many bytes together": torch.empty((2**31, 2**31 - 1, 0)),
}


@pytest.mark.parametrize("kind", list(BEYOND))
def test_it_is_not_committed(tmp_path: Path, kind: str) -> None:
    with holdfast.CheckpointManager(tmp_path, process_group=False) as manager:
        manager.save(1, {"t": torch.ones(3)}).wait()
        with pytest.raises(InvalidError, match=r"t: .*(2\*\*62 bytes|at most 64)"):
            manager.save(2, {"t": BEYOND[kind]}).wait()
        assert manager.steps() == [1]
        assert manager.load({"t": torch.zeros(3)}) == 1

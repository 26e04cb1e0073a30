"""Loads of steps with a damaged pack on one of several nodes: its chunks come through parity."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.stored.peers.parity_files import parity_keys
from tests.unit.stored.peers.test_sources import loaded, nodes
from tests.unit.stored.peers.test_union import Nodes

__all__ = ["nodes"]


def flip(path: Path, place: float = 0.75) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("reader", [0, 1], ids=["own node", "another node"])
def test_a_damaged_pack_is_read_through_parity(
    nodes: Nodes,
    tmp_path: Path,
    damage: Callable[[Path], None],
    step: int,
    reader: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (pack,) = (tmp_path / "nodes" / "node-0" / f"step-{step:012d}").rglob("*.safetensors")
    damage(pack)
    with caplog.at_level(logging.WARNING):
        report = loaded(nodes.at(reader))
    assert report.sources["parity of node node-0"] > 0
    assert any("is read from parity of peers://run" in each.getMessage() for each in caplog.records)
    assert "is lost" not in caplog.text


def test_a_step_whose_pack_and_parity_are_damaged_is_skipped(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (pack,) = (tmp_path / "nodes" / "node-0" / "step-000000000002").rglob("*.safetensors")
    flip(pack)
    attempt = f"step-000000000002/{pack.parent.name}/"
    for name in nodes.names[1:]:
        flip(tmp_path / "nodes" / name / parity_keys(attempt)[1], 0.5)
    with pytest.raises(AssertionError, match="1 == 2"):
        loaded(nodes.at(1))
    assert "step 2 is damaged and skipped" in caplog.text

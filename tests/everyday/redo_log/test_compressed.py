"""A log with compressed gradients: smaller, the same bits after a restart, and checked to the last byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.api import list_steps, log_verification
from holdfast.errors import InvalidError

OPTIONS = holdfast.Differential(compression="on")


def train(root: Path, options: holdfast.Differential, steps: int) -> torch.Tensor:
    """Train to a step, from the last recorded one; return the weight."""
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with holdfast.CheckpointManager(root, every=1000, differential=options, process_group=False) as manager:
        for step in range((manager.load(state) or 0) + 1, steps + 1):
            model(torch.randn(8, 200, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.maybe_save(step, state)
    return model.weight.detach()


def log_bytes(root: Path) -> int:
    return sum(log.bytes for log in list_steps(str(root)).logs)


def test_compressed_gradients_are_smaller_and_give_the_same_bits(tmp_path: Path) -> None:
    train(tmp_path / "a", OPTIONS, 4)
    raw = train(tmp_path / "b", holdfast.Differential(), 4)

    assert log_bytes(tmp_path / "a") < 0.9 * log_bytes(tmp_path / "b")
    with holdfast.CheckpointManager(tmp_path / "a", process_group=False) as manager:
        model = torch.nn.Linear(200, 200)
        assert manager.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}) == 4
    assert torch.equal(model.weight, raw)


def test_damage_of_a_compressed_gradient_is_found(tmp_path: Path) -> None:
    train(tmp_path, OPTIONS, 4)
    logs = list_steps(str(tmp_path)).logs
    assert list(log_verification(logs).damages()) == []
    path = tmp_path / logs[0].segments[-1].key
    with path.open("r+b") as file:
        file.seek(-50, 2)
        file.write(bytes(8))

    (damage,) = log_verification(logs).damages()

    assert "record of step 4" in damage.message


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidError, match="'off' or 'on'"):
        holdfast.Differential(compression="auto")  # type: ignore[arg-type]

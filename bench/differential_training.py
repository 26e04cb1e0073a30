"""The trainings that the bench of the redo log logs: DDP and AdamW in fp32."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

WIDTH, LAYERS = 2048, 4
"""16 Mi parameters: a record has 32 MiB on each of two ranks."""

NEVER = 1_000_000_000
"""Steps between two bases of the policy, where the bench itself says when a base comes."""

_LOG_BYTES_MAX = 1 << 50
_SEAL_SECONDS_MAX = 120.0


class Training:
    """Linear layers that all ranks train together."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, rows: int = 32) -> None:
        torch.manual_seed(0)
        linear = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.model = nn.Sequential(*[part for each in linear for part in (each, nn.Tanh())])
        self.replica = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.batch = torch.rand(rows, width)
        self.at = 0
        """The last step."""
        self._rest_seconds = 0.0

    def step(self) -> None:
        """Train one step."""
        self.replica(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at += 1

    def step_of(self, seconds: float) -> None:
        """Train one step that accumulates gradients until it has taken about so long, however busy the machine is."""
        end = time.monotonic() + seconds - self._rest_seconds
        with self.replica.no_sync():
            while time.monotonic() < end:
                self.replica(self.batch).square().mean().backward()
        start = time.monotonic()
        self.step()
        self._rest_seconds = time.monotonic() - start


class Loop:
    """A training with a manager."""

    def __init__(self, root: Path, training: Training, *, is_logged: bool, is_coded: bool = False) -> None:
        options = holdfast.Differential(log_bytes_max=_LOG_BYTES_MAX, compression="on" if is_coded else "off")
        log = options if is_logged else False
        self.manager = holdfast.CheckpointManager(root, every=NEVER, differential=log)
        self.training = training
        self._is_logged = is_logged

    def step(self) -> None:
        """Train one step, with the call that ends the step."""
        self.training.step()
        self.manager.maybe_save(self.training.at, self.training.state)

    def base(self) -> None:
        """Save a base after a step, and wait until it is committed."""
        self.training.step()
        self.manager.save(self.training.at, self.training.state).wait()

    def await_seals(self) -> None:
        """Wait until every step is sealed.

        Raises:
            RuntimeError: The log was interrupted, or the storage is far too slow.
        """
        deadline = time.monotonic() + _SEAL_SECONDS_MAX
        while self._is_logged and self.manager.recoverable != self.training.at:
            if time.monotonic() > deadline:
                raise RuntimeError(f"recoverable: {self.manager.recoverable}; expected step {self.training.at}")
            time.sleep(0.002)


def total(value: float) -> float:
    """Return the sum over all ranks."""
    summed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)

"""What the rig asks of one rank of a training, and what the rank leaves when it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from tests.support.forked_processes import write_whole

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Run:
    """One training: where it saves, how far it goes, and whether it resumes."""

    folder: Path
    """Where checkpoints go: the same on every rank, and after a restart."""

    keeper: str
    """`holdfast`, or `own`: the framework's own checkpointing."""

    steps: int
    """The optimizer step at which it ends; maybe the one it resumes from."""

    every: int
    """Save every so many steps."""

    resume: bool
    """Resume from what the folder holds."""

    results: Path
    """Where the rank leaves what came of it."""

    def finish(self, *, resumed_from: int | None, tensors: Mapping[str, torch.Tensor], losses: Sequence[float]) -> None:
        """Leave what came of this rank.

        Args:
            resumed_from: The step it resumed from; None if it began anew.
            tensors: All tensors of model and optimizer by name, whole, on the CPU.
            losses: The losses of the steps that it trained.
        """
        digests = {name: _digest(tensor) for name, tensor in sorted(tensors.items())}
        result = {"resumed_from": resumed_from, "digests": digests, "losses": [float(loss).hex() for loss in losses]}
        write_whole(self.results / f"rank-{os.environ['RANK']}.json", json.dumps(result))


def _digest(tensor: torch.Tensor) -> str:
    import torch

    plain = tensor.detach().cpu().contiguous()
    data = plain.flatten().view(torch.uint8).numpy().tobytes()
    return f"{plain.dtype} {tuple(plain.shape)} {xxhash.xxh3_128_hexdigest(data)}"

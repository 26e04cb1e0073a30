"""Real text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

BYTES_MAX = 4 << 20


def corpus() -> Tensor:
    """Return the text as a 1-d uint8 tensor: the library's top-level modules in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= BYTES_MAX:
            break
    return torch.frombuffer(text[:BYTES_MAX], dtype=torch.uint8)


def batch(text: Tensor, *, step: int, samples: int, context: int) -> Tensor:
    """Return the samples of one step, shape (samples, context + 1), int64.

    They depend on the step alone, not on ranks or on what was drawn before: whoever resumes at a step sees what an
    uninterrupted run sees, however many ranks share the work.
    """
    chance = torch.Generator().manual_seed(20_000 + step)
    starts = torch.randint(len(text) - context - 1, (samples,), generator=chance)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()

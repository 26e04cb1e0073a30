"""The trained state of the compression bench: a small GPT on the bytes of Python's standard library.

What compression saves depends on the bits, so the bench trains what it saves: bf16 weights and gradients, fp32
masters, AdamW, cosine to a tenth of the peak. It keeps the state of three steps in a folder; a second run reads them.
The seed, the sizes and the version of torch are in the folder's name.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from bench.job import ROOT

State = dict[str, torch.Tensor]

VARIABLE = "HOLDFAST_BENCH_TRAINED"
"""Tells the ranks the folder of the snapshots."""

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 256, 4, 4
SEQUENCE, BATCH = 128, 8
PEAK, SEED = 6e-4, 19
WARM_UP = 0.05
"""Share of the steps in which the learning rate rises to its peak."""

KINDS = {"weight": "model.{}", "master": "master.{}"} | {
    key: f"optimizer.state.{{}}.{key}" for key in ("exp_avg", "exp_avg_sq")
}
"""What a state has of each parameter, and its name there: 2, 4, 4 and 4 bytes."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a training is, and after which steps its state is kept."""

    steps: int
    kept: tuple[int, ...]


FULL = Schedule(300, (100, 120, 300))
QUICK = Schedule(60, (20, 24, 60))


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.before_feed = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state after the block."""
        rows, length, _ = hidden.shape
        split = self.qkv(self.before_attention(hidden)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return hidden + self.down(functional.gelu(self.up(self.before_feed(hidden))))


class Gpt(nn.Module):
    """A GPT of 3.3 million parameters; a token is a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Layers that add to the residual stream begin smaller, as in GPT-2.
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if adds else 0.02)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of the bytes that follow."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


class Batches:
    """Rows of bytes from the standard library, drawn by seed."""

    def __init__(self, seed: int = SEED) -> None:
        library = Path(os.__file__).parent
        files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
        text = b"".join(path.read_bytes() for path in files if "test" not in path.parts)
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, rows: int = BATCH, length: int = SEQUENCE) -> torch.Tensor:
        """Return rows of one byte more than `length`."""
        starts = torch.randint(len(self._bytes) - length - 1, (rows,), generator=self._generator)
        return torch.stack([self._bytes[start : start + length + 1] for start in starts.tolist()]).long()


class MixedTraining:
    """A model with 16-bit weights and gradients, its fp32 masters, and AdamW over the masters.

    Products are computed in fp32 from 16-bit weights: few CPUs multiply bf16 fast. Weights and gradients that the
    state has, and what the optimizer sees, are of 16 bits.
    """

    def __init__(self, masters: State, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> None:
        """Take the masters; they are changed in place.

        Args:
            masters: Parameters by name, fp32.
            dtype: Of weights and gradients.
            scale: What the loss is multiplied by, so that gradients in fp16 do not vanish.
        """
        self.model = Gpt()
        self.masters = {name: nn.Parameter(tensor) for name, tensor in masters.items()}
        self.weights = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in masters.items()}
        self._scale = scale
        decayed = [each for each in self.masters.values() if each.dim() > 1]
        others = [each for each in self.masters.values() if each.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=True)

    def step(self, batch: torch.Tensor, rate: float) -> float:
        """Train one step; return the loss."""
        computed = {name: weight.float() for name, weight in self.weights.items()}
        loss = torch.func.functional_call(self.model, computed, (batch,))
        (loss * self._scale).backward()
        for name, master in self.masters.items():
            gradient = self.weights[name].grad
            assert gradient is not None and gradient.dtype == self.weights[name].dtype
            master.grad = gradient.float() / self._scale
            self.weights[name].grad = None
        nn.utils.clip_grad_norm_(list(self.masters.values()), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.weights[name].copy_(master)
        return float(loss.detach())

    def state(self) -> State:
        """Return the tensors of the state by name: 14 bytes a parameter."""
        found: State = {}
        for name, master in self.masters.items():
            moments = self.optimizer.state[master]
            tensors = {"weight": self.weights[name], "master": master, **moments}
            found |= {pattern.format(name): tensors[kind].detach() for kind, pattern in KINDS.items()}
        return found


def initial_masters() -> State:
    """Return the parameters before the first step."""
    torch.manual_seed(SEED)
    return {name: parameter.detach().clone() for name, parameter in Gpt().named_parameters()}


def rate_of(step: int, steps: int) -> float:
    """Return the learning rate of a step: a short rise, then a cosine to a tenth of the peak."""
    rise = max(int(steps * WARM_UP), 1)
    if step < rise:
        return PEAK * (step + 1) / rise
    done = (step - rise) / max(steps - rise, 1)
    return PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def train(
    schedule: Schedule, keep: Callable[[int, State], None], dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> None:
    """Train from the beginning; hand the state to `keep` after each step that the schedule keeps."""
    batches, start = Batches(), time.perf_counter()
    training = MixedTraining(initial_masters(), dtype, scale)
    for step in range(schedule.steps):
        loss = training.step(batches.next(), rate_of(step, schedule.steps))
        if step + 1 in schedule.kept:
            keep(step + 1, training.state())
        if (step + 1) % 20 == 0 or step == 0:
            print(f"    step {step + 1}: loss {loss:.2f}, {time.perf_counter() - start:.0f} s", flush=True)


def folder_of(cache: Path, schedule: Schedule, name: str = "bf16") -> Path:
    """Return the folder of one training."""
    return cache / f"{name}-{schedule.steps}-seed{SEED}-{BATCH}x{SEQUENCE}-torch{torch.__version__.partition('+')[0]}"


def path_of(folder: Path, step: int) -> Path:
    """Return the file of one snapshot."""
    return folder / f"step-{step}.safetensors"


def made(cache: Path, schedule: Schedule, name: str = "bf16") -> Path:
    """Return the folder with the snapshots of a training; train in a process of its own unless all are there."""
    folder = folder_of(cache, schedule, name)
    if not all(path_of(folder, step).exists() for step in schedule.kept):
        print(f"state: training a GPT in {name} for {schedule.steps} steps, once", flush=True)
        command = [sys.executable, "-m", "bench.compression_state", str(folder.resolve()), name]
        subprocess.run([*command, *map(str, (schedule.steps, *schedule.kept))], cwd=ROOT, check=True)
    return folder


def steps_in(folder: Path) -> list[int]:
    """Return the steps whose state a folder has, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.safetensors"))


def snapshots() -> list[State]:
    """Return the kept states, the last one last, from the folder that the variable names."""
    folder = Path(os.environ[VARIABLE])
    return [load_file(path_of(folder, step)) for step in steps_in(folder)]


def split(name: str) -> tuple[str, str]:
    """Return the kind of a tensor of the state, and the name of its parameter."""
    for kind, pattern in KINDS.items():
        before, _, after = pattern.partition("{}")
        if name.startswith(before) and name.endswith(after):
            return kind, name[len(before) : len(name) - len(after)]
    raise KeyError(name)


def repeated(state: State, total_bytes: int) -> State:
    """Return a state of about a given size: its tensors again and again, as those of further models."""
    times = max(round(total_bytes / bytes_of(state)), 1)
    names = {name: split(name) for name in state}
    return {
        KINDS[names[name][0]].format(f"copy{number}.{names[name][1]}"): tensor
        for number in range(times)
        for name, tensor in state.items()
    }


def of_kinds(state: State, *kinds: str) -> State:
    """Return the tensors of some kinds."""
    return {name: tensor for name, tensor in state.items() if split(name)[0] in kinds}


def bytes_of(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def main() -> None:
    """Train and write the snapshots; the last rename makes each whole."""
    parser = argparse.ArgumentParser(prog="python -m bench.compression_state", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=("bf16", "fp16"))
    parser.add_argument("steps", type=int)
    parser.add_argument("kept", type=int, nargs="+")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)

    def keep(step: int, state: State) -> None:
        partial = chosen.folder / "partial"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, partial)
        partial.replace(path_of(chosen.folder, step))

    dtype, scale = {"bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 1024.0)}[chosen.name]
    train(Schedule(chosen.steps, tuple(chosen.kept)), keep, dtype, scale)


if __name__ == "__main__":
    main()

"""A rank that trains the GPT of the examples under FSDP2, with a near tier in memory and an agent, until a kill.

Forked by `gloo_worlds`, or started by torchrun: `--module tests.distributed.tiers.memory_cases FOLDER NEAR LIFE LAST`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import ConflictError
from holdfast.settings import Settings
from holdfast.training.saving.handle import SaveHandle
from tests.support.forked_processes import write_whole
from tests.support.gloo_worlds import World

STEPS = 200
"""Most steps of a training."""

ORPHAN_SECONDS = 2.0
SETTINGS = Settings(collect_grace_seconds=0.0, lease_seconds=2.0)
_EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
_BLOCKS = 4
"""So that the pack of one of two ranks is large enough for its memory to be used again."""


class Training:
    """The training of `examples/train_fsdp2.py`, on this rank."""

    def __init__(self) -> None:
        if str(_EXAMPLES) not in sys.path:
            sys.path.insert(0, str(_EXAMPLES))
        import gpt

        gpt.BLOCKS = _BLOCKS
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = gpt.GPT()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        windows = gpt.Windows(gpt.text_of(gpt.__file__))
        self.loader = holdfast.data.Loader(windows, global_batch=4, micro_batch=2, seed=1)

    def state(self) -> dict[str, object]:
        """Return the state that is saved."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.loader,
            "rng": holdfast.RngState(),
        }

    def losses(self, last_step: int) -> Iterator[tuple[int, float]]:
        """Train to a step; yield each step with its loss, the mean of all ranks."""
        for step in self.loader.steps():
            if step.number > last_step:
                return
            mean = torch.zeros(())
            for (tokens, targets), weight in step:
                loss = self.model(tokens, targets) * weight
                loss.backward()
                mean += loss.detach()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            yield step.number, mean.item()


@contextmanager
def _journal(folder: Path, rank: int) -> Iterator[int]:
    """Open the file in which rank 0 notes, line by line, all that a later job must not contradict."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"pid.{rank}", str(os.getpid()))
    name = folder / "journal" if rank == 0 else Path(os.devnull)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        yield fd
    finally:
        os.close(fd)


def undisturbed(world: World, folder: str) -> None:
    """Train without any checkpoint."""
    with _journal(Path(folder), world.rank) as journal:
        for step, loss in Training().losses(STEPS):
            os.write(journal, f"loss {step} {loss.hex()}\n".encode())


def live(world: World, folder: str, near: str, life: str, last_step: int) -> None:
    """Resume, train and save, as a rank that was forked."""
    _live(world.rank, Path(folder), near, life, last_step)


def _live(rank: int, folder: Path, near: str, life: str, last_step: int) -> None:
    tier = holdfast.Tier(near, every=2, agent=True, orphan_seconds=ORPHAN_SECONDS, linger_seconds=60.0)
    training, waiting = Training(), list[tuple[int, SaveHandle]]()
    with (
        _journal(folder / life, rank) as journal,
        holdfast.CheckpointManager(folder / "root", every=5, keep_last=3, near=tier, settings=SETTINGS) as manager,
    ):
        state = training.state()
        os.write(journal, f"resumed {manager.load(state) or 0}\n".encode())
        for step, loss in training.losses(last_step):
            os.write(journal, f"loss {step} {loss.hex()}\n".encode())
            start = time.monotonic()
            handle = manager.maybe_save(step, state)
            os.write(journal, f"blocked {step} {time.monotonic() - start:.4f}\n".encode())
            waiting += [] if handle is None else [(step, handle)]
            if handle is not None and step % 20 == 0:
                handle.near.exception()  # Some losses come after the word that their step is near.
            for number, each in waiting:
                if each.near.done():
                    _note(journal, number, each.near.exception())
            waiting = [each for each in waiting if not each[1].near.done()]
        for number, each in waiting:
            _note(journal, number, each.near.exception())


def _note(journal: int, step: int, error: BaseException | None) -> None:
    if error is None:
        os.write(journal, f"near {step}\n".encode())
        return
    said = f"{type(error).__name__}: {error}".replace("\n", " ")
    os.write(journal, f"failed {step} {said}\n".encode())
    if isinstance(error, ConflictError):
        raise error


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _live(dist.get_rank(), Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)

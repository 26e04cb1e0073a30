"""One resume of one system on other ranks: `python -m bench.data.resume SYSTEM FOLDER FROM TO`.

FROM and TO are ranks and workers: `4x2`. The ranks of a job run one after another in this process, each in a process
group that says its rank and their number. After some steps, the states of all ranks are taken. A rank of the next job
resumes from the state of the same rank; a rank without a predecessor resumes from the state of rank 0. The result is
one line of JSON: how many samples were lost or seen twice in the epoch, with the fewest and most steps of a rank; or
the error. Without FROM and TO, the data set is written.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.data.systems import CONTENDERS, SAMPLES, Place, System

STEPS = 10
RESULT = "result: "
_STEPS_MAX = 4 * SAMPLES
"""A loader that yields more steps has no end."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a job, and workers of each."""

    ranks: int
    workers: int

    @classmethod
    def parsed(cls, text: str) -> Ranks:
        """Return ranks and workers of a text such as `4x2`."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.ranks}x{self.workers}"


@contextmanager
def _as_rank(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Trained:
    """What the ranks of a job did."""

    seen: Counter[int]
    """How often each sample was read."""

    states: list[Any]
    """The state of each rank after the first steps."""

    steps: list[int]
    """Steps of each rank."""


def trained(system: type[System], folder: Path, of: Ranks, states: list[Any] | None = None) -> Trained:
    """Return what the ranks of one job did.

    Args:
        system: The loader.
        folder: Where it may keep its data set.
        of: The ranks.
        states: Where to go on, to the end of the epoch; None for the first steps of the epoch.
    """
    done = Trained(Counter(), [], [])
    for rank in range(of.ranks):
        with _as_rank(rank, of.ranks):
            loader = system(Place(rank, of.ranks, of.workers, folder))
            if states is not None:
                loader.resume(states[rank] if rank < len(states) else states[0])
            steps = loader.steps()
            number = 0
            for number, samples in enumerate(steps, 1):
                done.seen.update(map(int, samples))
                if states is None and number == STEPS:
                    done.states.append(loader.state())
                    break
                if number > _STEPS_MAX:
                    raise RuntimeError(f"more than {_STEPS_MAX} steps: the epoch has no end")
            done.steps.append(number)
            # Frees the workers before the next rank starts its own.
            del steps, loader
    return done


def outcome(system: type[System], folder: Path, before: Ranks, after: Ranks) -> dict[str, object]:
    """Return the samples lost and seen twice, or the error of the resume."""
    first = trained(system, folder, before)
    try:
        rest = trained(system, folder, after, first.states)
    except Exception as error:  # noqa: BLE001 what a system refuses, and how, is the result
        return {"error": f"{type(error).__name__}: {str(error).strip() or 'no text'}".splitlines()[0]}
    seen = first.seen + rest.seen
    return {
        "lost": sum(sample not in seen for sample in range(SAMPLES)),
        "doubled": sum(count - 1 for count in seen.values()),
        "steps_min": min(rest.steps),
        "steps_max": max(rest.steps),
    }


def main() -> None:
    """Print the outcome."""
    name, folder, *ranks = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if not ranks:
        write = CONTENDERS[name].write
        assert write is not None, f"{name} writes no data set"
        write(Path(folder))
        return
    before, after = map(Ranks.parsed, ranks)
    found = outcome(CONTENDERS[name].system, Path(folder), before, after)
    print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

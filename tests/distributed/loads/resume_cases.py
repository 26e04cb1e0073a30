"""What ranks do in the tests of resuming: save three steps, have one damaged where one rank reads, resume together."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.api import list_steps
from holdfast.settings import Settings
from tests.distributed.loads.exchange_cases import laid_out
from tests.support.gloo_worlds import World
from tests.support.tuning import tuned

STEPS = (1, 2, 3)


def state_of(step: int, layout: str, rank: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    whole = {
        "embed": torch.randn((640, 64), generator=generator),
        "up": torch.randn((96, 512), generator=generator),
        "norm": torch.randn((515,), generator=generator),
    }
    return {"tensors": laid_out(whole, layout), "values": {"seen": step}, "own": holdfast.PerRank((step, rank))}


def same(loaded: dict[str, object], expected: dict[str, object]) -> bool:
    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    tensors, wanted = loaded["tensors"], expected["tensors"]
    assert isinstance(tensors, dict)
    assert isinstance(wanted, dict)
    return (
        all(torch.equal(local(tensors[name]), local(wanted[name])) for name in wanted)
        and loaded["values"] == expected["values"]
        and loaded["own"].value == expected["own"].value  # type: ignore[attr-defined]
    )


def damage(step_folder: Path, what: str) -> None:
    """Change a bit that only one rank's load reads."""
    (path,) = step_folder.glob(f"*/{what}")
    data = bytearray(path.read_bytes())
    data[len(data) - 40] ^= 1
    path.write_bytes(data)


def newest_damaged(world: World, root: str, layout: str, exchange: str, damages: dict[str, str]) -> dict[str, object]:
    settings = tuned(Settings(chunk_bytes=4096, share_reads=exchange), window_bytes=8192)  # type: ignore[arg-type]
    manager = holdfast.CheckpointManager(root, settings=settings)
    for step in STEPS:
        manager.save(step, state_of(step, layout, world.rank)).wait()
    if world.rank == 0:
        for step, what in damages.items():
            damage(Path(root) / f"step-{int(step):012d}", what)
    dist.barrier()
    outcomes = []
    for _ in range(2):
        state = state_of(99, layout, world.rank)
        taken = manager.load(state)
        report = manager.load_report
        assert report is not None
        assert taken is not None
        outcomes.append(
            {
                "step": taken,
                "exact": same(state, state_of(taken, layout, world.rank)),
                "passed_over": [[each.step, each.why] for each in report.passed_over],
            }
        )
    explicit = "nothing"
    try:
        manager.load(state_of(99, layout, world.rank), max(map(int, damages)))
    except holdfast.CorruptError as error:
        explicit = str(error)
    manager.save(7, state_of(7, layout, world.rank)).wait()
    state = state_of(99, layout, world.rank)
    after = manager.load(state)
    manager.close()
    exact = same(state, state_of(7, layout, world.rank))
    return {"outcomes": outcomes, "explicit": explicit, "after": after, "exact": exact}


def gone_back(world: World, root: str, layout: str) -> dict[str, object]:
    """Save three steps, go back to the first, and save others: a free number, a taken one, and one above all."""
    with holdfast.CheckpointManager(root, every=1, preemption=False) as manager:
        for step in STEPS:
            manager.save(step, state_of(step, layout, world.rank)).wait()
        manager.load(state_of(99, layout, world.rank), step=1)
        manager.save(2, state_of(7, layout, world.rank)).wait()
        handle = manager.maybe_save(5, state_of(8, layout, world.rank))
        assert handle is not None
        handle.wait()
    state = state_of(99, layout, world.rank)
    with holdfast.CheckpointManager(root) as manager:
        resumed = manager.load(state)
        exact = same(state, state_of(8, layout, world.rank))
        steps = manager.steps()
        names = [record.name for record in list_steps(root).steps if record.superseded]
        for name, step in zip(names, (2, 3), strict=True):
            assert manager.load(state, step=name) == step
            exact = exact and same(state, state_of(step, layout, world.rank))
    return {"exact": exact, "resumed": resumed, "steps": steps, "superseded": names}

"""Worlds of real trainings with other configs than the rig's: how one rank trains, and how a test starts the ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.run import Run
from tests.support.forked_processes import Work, start_ranks, write_whole


@dataclass(frozen=True, slots=True)
class Trained:
    """What rank 0 left."""

    digests: dict[str, str]
    losses: list[float]
    resumed_from: int | None
    staging: str
    """How the last save of Holdfast was staged."""


def trained(
    folder: Path, steps: int, manager: str, ranks: int = 2, *, is_gathered: bool = False, **config: object
) -> Trained:
    """Train until a step in new processes.

    Args:
        folder: The dump folder.
        steps: Train until this step.
        manager: `HoldfastManager`, or torchtitan's `CheckpointManager`.
        ranks: How many train.
        is_gathered: Whether the parameters are whole on every rank when a save is due, as after some schedules.
        config: Fields of the manager's config that differ from those of a training that can go on.
    """
    scratch = folder.with_name(f"{folder.name}-{time.monotonic_ns()}")
    scratch.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    config = {"last_save_model_only": False, "keep_latest_k": 0, **config}
    asked = json.dumps({"manager": manager, "config": config, "is_gathered": is_gathered})
    processes = start_ranks(
        [
            Work.of_rank(
                rank,
                scratch,
                f"{__name__}:train",
                *(folder, steps, asked, scratch),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            for rank in range(ranks)
        ]
    )
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.send_signal(9)
    assert codes == [0] * ranks, "\n".join((scratch / f"log.{rank}").read_text()[-3000:] for rank in range(ranks))
    result = json.loads((scratch / "rank-0.json").read_text())
    losses = [float.fromhex(loss) for loss in result["losses"]]
    staging = (scratch / "staging").read_text()
    return Trained(result["digests"], losses, result["resumed_from"], staging)


def train(folder: str, steps: str, asked: str, results: str) -> None:
    """Be one rank of a training."""
    from tests.integrations.torchtitan.on_cpu import config_of  # isort: split

    from torch import distributed
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpointer import CheckpointManager

    from holdfast.integrations.torchtitan import HoldfastManager
    from tests.integrations.torchtitan.training import losses_of, whole_tensors

    told = json.loads(asked)
    kinds = {kind.__name__: kind for kind in (CheckpointManager, HoldfastManager)}
    checkpoint = kinds[told["manager"]].Config(enable=True, **told["config"])
    trainer: Any = config_of(folder, int(steps), checkpoint).build()
    losses = losses_of(trainer)
    if told["is_gathered"]:
        save = trainer.checkpointer.save

        def gathered_save(*arguments: object, **options: object) -> bool:
            for module in trainer.model_parts[0].modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            return save(*arguments, **options)

        trainer.checkpointer.save = gathered_save
    trainer.train()
    trainer.close()
    handle = getattr(trainer.checkpointer, "_latest", None)
    if os.environ["RANK"] == "0":
        write_whole(Path(results, "staging"), "" if handle is None else handle.wait().staging)
    run = Run(Path(folder), told["manager"], int(steps), 1, True, Path(results))
    begun = trainer.step - len(losses)
    run.finish(resumed_from=begun or None, tensors=whole_tensors(trainer), losses=losses)
    distributed.destroy_process_group()

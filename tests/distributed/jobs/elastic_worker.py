"""A rank under torchrun: it dies in the middle of saving step 2; in its second life it resumes and saves it again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.backends.torch.key_value_store import TorchKeyValueStore
from tests.doubles.faults import FaultPoint
from tests.support.faulty_run import SETTINGS, Trigger, run_with, state_of
from tests.support.forked_processes import write_whole


def main(root: Path, scratch: Path) -> None:
    torch.set_num_threads(1)
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # The agent hosts this store, and it outlives the ranks. gloo would find the addresses of its first life there,
    # so it gets a corner of its own; our keys do without, as they would in a store that nobody cleans.
    agent_store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    corner = dist.PrefixStore(f"gloo-{life}", agent_store)
    dist.init_process_group("gloo", store=corner, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    ours = TorchKeyValueStore(agent_store)
    manifest = root / "step-000000000002" / "manifest.json"
    seen_before_vote: list[bool] = []

    def before_vote(operation: FaultPoint) -> None:
        """Rank 1 votes long after rank 0, and dies instead in its first life."""
        if rank == 0:
            return
        ours.wait([operation.subject.removesuffix("1") + "0"], 30.0)
        time.sleep(1.0)
        if life == 0:
            write_whole(scratch / "died-after-rank-0-voted", operation.subject)
            os.kill(os.getpid(), signal.SIGKILL)
        seen_before_vote.append(manifest.exists())

    trigger = Trigger(before_vote, ["set"], "/vote/")
    run = run_with(root, key_value_store=trigger, over=ours)
    state: dict[str, object] = {name: torch.zeros(30_000) for name in "abc"} | {"step": 0}
    resumed = run.load(state)
    if resumed is None:
        run.save(1, state_of(1)).wait()
    else:
        assert all(torch.equal(state[name], state_of(1)[name]) for name in "abc")  # type: ignore[arg-type]
    trigger.armed = True
    report = run.save(2, state_of(2)).wait(timeout=60)
    assert report is not None
    said = {"life": life, "resumed": resumed, "manifest_before_vote": seen_before_vote, "attempt": report.attempt}
    write_whole(scratch / f"life-{life}.{rank}.json", json.dumps(said))
    run.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert SETTINGS.commit_timeout_seconds > 3, "a life must not end by the timeout"
    main(Path(sys.argv[1]), Path(sys.argv[2]))

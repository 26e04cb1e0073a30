"""One rank of one run: `python -m demo.rank`, with torchrun's variables set where there are several ranks."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

import holdfast
from demo.journal import Journal
from demo.training import Training


def main() -> None:
    """Train as the arguments say: from nothing, from the newest checkpoint, from a step, or from a path."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--until", type=int, required=True, help="last step to train")
    parser.add_argument("--root", type=Path, help="checkpoints of the run")
    parser.add_argument("--save-every", type=int, default=0, help="steps between saves; 0: none")
    parser.add_argument("--load", default="none", help="none, newest, a step of the root, or path:CHECKPOINT")
    options = parser.parse_args()
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    try:
        run(options)
    finally:
        if distributed:
            dist.destroy_process_group()


def run(options: argparse.Namespace) -> None:
    """Load, train, save."""
    training = Training(seed=options.seed)
    journal = Journal(options.journal if training.rank == 0 else None)
    say = print if training.rank == 0 else (lambda *_, **__: None)
    state = training.state()
    manager = holdfast.CheckpointManager(str(options.root)) if options.root else None
    if options.load.startswith("path:"):
        holdfast.load(options.load.removeprefix("path:"), state)
    elif options.load != "none":
        assert manager is not None
        manager.load(state, step=None if options.load == "newest" else int(options.load))
    done = state["step"]
    assert isinstance(done, int)
    if done:
        say(f"    loaded step {done} on {training.ranks} rank(s)", flush=True)
        journal.tell("loaded", step=done, digests=training.digests(), values=training.values(state))
    for step in range(done + 1, options.until + 1):
        loss = training.advance(step)
        journal.tell("loss", step=step, loss=loss.hex())
        say(f"    step {step:3d}   loss {loss:.6f}", flush=True)
        state["step"] = step
        if manager is not None and options.save_every and step % options.save_every == 0:
            journal.tell("save", step=step, digests=training.digests(), values=training.values(state))
            began = time.monotonic()
            manager.save(step, state).wait()
            say(f"    saved step {step} in {time.monotonic() - began:.2f} s", flush=True)
    journal.tell("end", step=options.until, digests=training.digests(), values=training.values(state))
    if manager is not None:
        manager.close()


if __name__ == "__main__":
    main()
    # All is written and closed. Gloo's threads may still hold tensors, and one that lets go of them while the
    # interpreter is taken down aborts the process (pytorch/pytorch pull request 179291), seen here once in many runs.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

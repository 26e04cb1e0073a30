"""One job of the prepared run: the GPT of the examples on each rank of torchrun, with DDP and a near tier.

torchrun --nproc-per-node 2 -m tests.page.prepared_trainer FOLDER --until 20 --slow-from 8
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.backends.stores.local import LocalStore

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SLOW_SECONDS = 1.6
"""How long the store of a slow rank waits with each pack."""


def wait_with_packs(slow: int | None, fails: int | None, rank: int) -> None:
    """Let the disk of rank 1 wait from one step on, and refuse the packs of rank 0 from another step on."""
    plain = LocalStore.upload

    def upload(store: LocalStore, key: str, *args: object, **options: object) -> object:
        step = int(key.split("/")[0][5:]) if key.startswith("step-") else 0
        if slow is not None and rank == 1 and step >= slow:
            time.sleep(SLOW_SECONDS)
        if fails is not None and rank == 0 and step >= fails:
            raise holdfast.UnavailableError(f"{store.url}/{key}: no space left on device; free some space")
        return plain(store, key, *args, **options)  # type: ignore[arg-type]

    LocalStore.upload = upload  # type: ignore[assignment, method-assign]


def train(arguments: argparse.Namespace) -> None:
    """Train from the newest step, or from the one that is named, to the last."""
    from gpt import GPT, batch_of, text_of

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    folder: Path = arguments.folder
    wait_with_packs(arguments.slow_from, arguments.fails_from, rank)
    torch.manual_seed(rank)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    text = text_of(str(EXAMPLES / "gpt.py"))
    near = holdfast.Tier(folder / "near", every=2)
    events = holdfast.observers.jsonl(folder / f"events-{rank}.jsonl")
    with holdfast.CheckpointManager(
        folder / "root", every=4, near=near, observers=[events], settings=holdfast.Settings(collect_grace_seconds=0.0)
    ) as manager:
        state = {"model": model, "optimizer": optimizer, "rng": holdfast.RngState()}
        step = manager.load(state, step=arguments.back_to) if arguments.back_to else manager.load(state)
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate
        for number in range((step or 0) + 1, arguments.until + 1):
            loss = model(*batch_of(text, 4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tags = {"release"} if number == arguments.tagged else ()
            if rank == 0:
                print("step", number, flush=True)
            if tags:
                handle = manager.save(number, state, tags=tags, metrics={"loss": loss.item()})
            else:
                handle = manager.maybe_save(number, state, metrics={"loss": loss.item()})
            if handle is not None and number < (arguments.fails_from or sys.maxsize):
                handle.wait("near")


def main() -> None:
    """Run the job of the command line."""
    sys.path.insert(0, os.fspath(EXAMPLES))
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--slow-from", type=int)
    parser.add_argument("--fails-from", type=int)
    parser.add_argument("--back-to", type=int)
    parser.add_argument("--tagged", type=int)
    parser.add_argument("--rate", type=float, default=1e-3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

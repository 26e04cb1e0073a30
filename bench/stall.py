"""How long a background save with a copy blocks training, beside one plain copy and DCP's async save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench import conditions, device
from bench.conditions import timed
from bench.part import (
    Measured,
    Params,
    Part,
    Round,
    Spread,
    contenders,
    in_turn,
    share_of,
    times_as_fast,
    with_rivals,
)
from bench.rivals import DcpAsync
from bench.state import MIB, sharded_state
from holdfast.api import SaveReport

State = dict[str, torch.Tensor]
Begin = Callable[[int], Future[object] | None]
"""Blocks as long as the contender does; returns what is to be waited for afterwards."""


class Stall:
    """The contenders of one rank. Their memory is warm after the first save of each."""

    def __init__(self, root: Path, mib: int, *, rivals_too: bool = True) -> None:
        self.saved: State = sharded_state(device.mesh(), mib * dist.get_world_size() * MIB, fill=True)
        self.notes: list[str] = []
        self._root = root
        self._manager = holdfast.CheckpointManager(root / "ours")
        self.contenders: list[tuple[str, Begin]] = [("stall_copy", self._save)]
        self._dcp: list[DcpAsync] = []
        if rivals_too:
            self._add_rivals()

    def _add_rivals(self) -> None:
        # A copy off a GPU is as fast as it can be into pinned memory.
        pinned = device.kind() == "cuda"
        self._copies = {
            name: torch.zeros(conditions.local(tensor).shape, pin_memory=pinned) for name, tensor in self.saved.items()
        }
        self.contenders.insert(0, ("memcpy", self._copy))
        for name in DcpAsync.STAGERS:
            try:
                stager = DcpAsync(name)
            except (AssertionError, RuntimeError) as error:
                self.notes.append(f"DCP async, stager {name}: {error}")
                continue
            self._dcp.append(stager)
            self.contenders.append((f"dcp_async_{name}", partial(self._save_dcp, name, stager)))

    def _copy(self, number: int) -> None:
        for name, tensor in self.saved.items():
            self._copies[name].copy_(conditions.local(tensor), non_blocking=True)
        device.settle()

    def _save(self, number: int) -> Future[object]:
        return self._manager.save(number, self.saved).committed  # type: ignore[return-value]

    def _save_dcp(self, name: str, stager: DcpAsync, number: int) -> Future[object]:
        return stager.begin(self.saved, self._root / name / str(number))

    def round(self, number: int) -> Round:
        """Time each contender's call, then wait for its save, so that no save is in flight when the next begins."""
        found: Round = {}
        for name, begin in in_turn(self.contenders, number):
            begun: list[Future[object] | None] = []
            conditions.quiet_disk()
            found[name] = timed(lambda begin=begin, begun=begun: begun.append(begin(number)))
            if begun[0] is not None:
                done = begun[0].result()
                assert not isinstance(done, SaveReport) or done.staging == "copy", done
            conditions.barrier()
            conditions.removed(self._root / name)
            conditions.removed(self._root / "ours" / f"step-{number:012d}")
        return found

    def close(self) -> None:
        """Stop threads and processes."""
        self._manager.close()
        for stager in self._dcp:
            stager.close()


def measure(root: Path, params: Params) -> Measured:
    """Warm up every contender with one save, then measure."""
    stall = Stall(root, params["mib_per_rank"], rivals_too=with_rivals(params))
    stall.round(0)
    rounds = []
    for number in range(1, params["rounds"] + 1):
        each = stall.round(number)
        rounds.append(each)
        beside = ""
        if with_rivals(params):
            dcp = ", ".join(f"{name[10:]} {each[name]:.3f}" for name in each if name.startswith("dcp_async"))
            beside = f", one copy {each['memcpy']:.3f}; DCP {dcp}"
        conditions.say(f"round {number} of {params['rounds']}: blocked {each['stall_copy']:.3f} s{beside}")
    stall.close()
    return Measured(rounds, stall.notes)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results as ratios."""
    return {
        "stall_copy_vs_memcpy": share_of(rounds, "stall_copy", ["memcpy"]),
        "stall_copy_vs_dcp_async": times_as_fast(rounds, "stall_copy", contenders(rounds, "dcp_async")),
        "stall_copy_vs_dcp_async_default": times_as_fast(rounds, "stall_copy", ["dcp_async_thread"]),
    }


PART = Part(
    name="stall",
    question="How long does a save block training that has its state copied?",
    ranks=2,
    full={"mib_per_rank": 1024, "rounds": 5},
    quick={"mib_per_rank": 256, "rounds": 3},
    measure=measure,
    keys=keys,
    devices=device.KINDS,
)

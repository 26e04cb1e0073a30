"""The time to save and load 20,000 tensors of 16 bytes: plain ones by one process, DTensors by two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import holdfast
from bench import conditions, rivals
from bench.conditions import timed
from bench.part import (
    Measured,
    Params,
    Part,
    Round,
    Spread,
    contenders,
    in_turn,
    present,
    spread_of,
    times_as_fast,
    with_rivals,
)
from bench.rivals import TorchCheckpointing
from bench.state import tiny_state

State = dict[str, torch.Tensor]

MORE = 5
"""How many times as many tensors the growth is measured with."""


class Tiny:
    """The contenders of one rank."""

    def __init__(self, root: Path, count: int, *, rivals_too: bool = True) -> None:
        self.mesh: DeviceMesh | None = None
        if dist.is_initialized():
            self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._alone = self.mesh is None
        self._group = False if self._alone else None
        self.root, self.count = root, count
        self.saved, self.target = self._states(count)
        self.notes: list[str] = []
        self.saves: list[tuple[str, Callable[[Path], object]]] = [
            ("tiny_save", partial(holdfast.save, state=self.saved, process_group=self._group)),
        ]
        self.loads: list[tuple[str, str, Callable[[Path], object]]] = [
            ("tiny_load", "tiny_save", partial(holdfast.load, state=self.target, process_group=self._group)),
        ]
        if rivals_too:
            self._add_rivals()

    def _add_rivals(self) -> None:
        self.saves.append(("tiny_save_dcp", lambda folder: rivals.dcp_save(self.saved, folder, 1, self._alone)))
        self.loads.append(
            (
                "tiny_load_dcp",
                "tiny_save_dcp",
                lambda folder: rivals.dcp_load(self.target, folder, self._alone),
            )
        )
        if self._alone:
            # Its best with tiny tensors is one file.
            self._torch_checkpointing()

    def _states(self, count: int) -> tuple[State, State]:
        return tiny_state(count, fill=True, mesh=self.mesh), tiny_state(count, fill=False, mesh=self.mesh)

    def _torch_checkpointing(self) -> None:
        if rivals.torch_checkpointing_version() is None:
            self.notes.append("torch_checkpointing is not installed (extra: bench)")
            return
        saver = TorchCheckpointing(1)
        self.saves.append(("tiny_save_meta", lambda folder: saver.save(self.saved, folder)))

    def round(self, number: int) -> Round:
        """Save and load with each contender in turn."""
        found: Round = {}
        conditions.emptied(self.root)
        for name, save in in_turn(self.saves, number):
            conditions.quiet_disk()
            found[name] = timed(lambda save=save, name=name: save(self.root / name))
        for name, of, load in in_turn(self.loads, number):
            conditions.zeroed(self.target)
            found[name] = timed(lambda load=load, of=of: load(self.root / of))
            conditions.require_equal(self.saved, self.target)
        return found

    def growth(self) -> Round:
        """Measure five times as many tensors."""
        saved, target = self._states(MORE * self.count)
        folder = self.root / "more"
        group = self._group
        return {
            "tiny_save_more": timed(lambda: holdfast.save(folder, saved, process_group=group)),
            "tiny_load_more": timed(lambda: holdfast.load(folder, target, process_group=group)),
        }


def measure(root: Path, params: Params) -> Measured:
    """Measure every round."""
    tiny = Tiny(root, params["tensors"], rivals_too=with_rivals(params))
    rounds = []
    for number in range(params["rounds"]):
        each = tiny.round(number)
        if tiny.mesh is None:
            each |= tiny.growth()
        rounds.append(each)
        dcp = {name: f", DCP {seconds:.2f}" for name, seconds in each.items() if name.endswith("_dcp")}
        conditions.say(
            f"round {number + 1} of {params['rounds']}: saved in {each['tiny_save']:.2f} s"
            f"{dcp.get('tiny_save_dcp', '')}; loaded in {each['tiny_load']:.2f} s{dcp.get('tiny_load_dcp', '')}"
        )
    return Measured(rounds, tiny.notes)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results as ratios."""
    found = {
        "tiny_save_vs_dcp": times_as_fast(rounds, "tiny_save", ["tiny_save_dcp"]),
        "tiny_load_vs_dcp": times_as_fast(rounds, "tiny_load", ["tiny_load_dcp"]),
        "tiny_save_growth": _growth(rounds, "tiny_save"),
        "tiny_load_growth": _growth(rounds, "tiny_load"),
    }
    if present(rounds, "tiny_save_meta"):
        found["tiny_save_vs_torch_checkpointing"] = times_as_fast(
            rounds, "tiny_save", contenders(rounds, "tiny_save_meta")
        )
    return found


def keys_of_dtensors(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results as ratios."""
    return {
        "tiny_save_dtensor_vs_dcp": times_as_fast(rounds, "tiny_save", ["tiny_save_dcp"]),
        "tiny_load_dtensor_vs_dcp": times_as_fast(rounds, "tiny_load", ["tiny_load_dcp"]),
    }


def _growth(rounds: Sequence[Round], name: str) -> Spread:
    return spread_of([each[f"{name}_more"] / (MORE * each[name]) for each in rounds])


PLAIN = Part(
    name="tiny",
    question="How fast are 20,000 tensors of 16 bytes saved and loaded?",
    ranks=1,
    full={"tensors": 20_000, "rounds": 5},
    quick={"tensors": 20_000, "rounds": 1},
    measure=measure,
    keys=keys,
)

DTENSOR = Part(
    name="tiny_dtensor",
    question="How fast are the same as DTensors over two ranks?",
    ranks=2,
    full={"tensors": 20_000, "rounds": 3},
    quick={"tensors": 20_000, "rounds": 1},
    measure=measure,
    keys=keys_of_dtensors,
)

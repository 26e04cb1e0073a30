"""How long a durable save and a cold load take with compression, beside DCP with its ZStandard extension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from bench import compression_rivals as rivals
from bench import conditions, device
from bench.compression_ratios import zeros_like
from bench.compression_rivals import THREADS
from bench.compression_state import State, repeated, snapshots
from bench.conditions import timed
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spreads_of
from bench.settings import settings
from bench.state import MIB

Save = Callable[[Path], object]


def sharded(mesh: DeviceMesh, state: State) -> State:
    """Return a state as DTensors by rows over a mesh that divides them; every tensor has memory of its own."""
    number, size = mesh.get_local_rank(), mesh.size()
    return {
        name: DTensor.from_local(tensor.chunk(size)[number].clone(), mesh, [Shard(0)], run_check=False)
        for name, tensor in state.items()
    }


class Speed:
    """The contenders of one rank, and the states that they save and fill."""

    def __init__(self, root: Path, saved: State) -> None:
        self.root, self.saved, self.target = root, saved, zeros_like(saved)
        compressed = settings(compression="on")
        self.saves: list[tuple[str, Save]] = [
            ("save", lambda folder: holdfast.save(folder, self.saved, settings=compressed)),
            ("save_raw", lambda folder: holdfast.save(folder, self.saved)),
            *((f"save_dcp_{n}", partial(self._save_dcp, n)) for n in THREADS),
        ]
        self.loads: list[tuple[str, str, Save]] = [
            ("load", "save", lambda folder: holdfast.load(folder, self.target)),
            ("load_raw", "save_raw", lambda folder: holdfast.load(folder, self.target)),
            *((f"load_dcp_{n}", f"save_dcp_{n}", self._load_dcp) for n in THREADS),
        ]

    def _save_dcp(self, threads: int, folder: Path) -> None:
        rivals.dcp_zstd_save(self.saved, folder, threads)

    def _load_dcp(self, folder: Path) -> None:
        rivals.dcp_zstd_load(self.target, folder)

    def round(self, number: int) -> Round:
        """Save with each contender in turn, then load cold what each saved, and compare the values."""
        found: Round = {}
        for name, save in in_turn(self.saves, number):
            folder = conditions.emptied(self.root / name) / "own"
            conditions.quiet_disk()
            found[name] = timed(lambda save=save, folder=folder: save(folder))
        for name, saved_by, load in in_turn(self.loads, number):
            folder = self.root / saved_by / "own"
            conditions.zeroed(self.target)
            conditions.on_first_rank(lambda folder=folder: conditions.forget_pages(folder))
            found[name] = timed(lambda load=load, folder=folder: load(folder))
            conditions.require_equal(self.saved, self.target)
        conditions.removed(self.root)
        return found


def measure(root: Path, params: Params) -> Measured:
    """Let every contender warm up with a small state, then measure each round."""
    mesh = device.mesh()
    last = snapshots()[-1]
    Speed(root, sharded(mesh, last)).round(0)
    speed = Speed(root, sharded(mesh, repeated(last, params["mib"] * MIB)))
    rounds: list[Round] = []
    for number in range(params["rounds"]):
        rounds.append(speed.round(number))
        said = ", ".join(f"{name} {seconds:.2f}" for name, seconds in rounds[-1].items())
        conditions.say(f"round {number + 1} of {params['rounds']}, seconds: {said}")
    return Measured(rounds, [])


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return how many times as fast as the better of DCP's two thread counts ours is."""
    return {
        f"{verb}_on_vs_dcp_zstd": [min(each[f"{verb}_dcp_{n}"] for n in THREADS) / each[verb] for each in rounds]
        for verb in ("save", "load")
    }


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all rounds."""
    return spreads_of(values(rounds, params))


PART = Part(
    name="speed",
    question="How long do a durable save and a cold load with compression take, beside DCP with ZStandard?",
    ranks=2,
    full={"mib": 512, "rounds": 9},
    quick={"mib": 96, "rounds": 3},
    measure=measure,
    keys=keys,
    values=values,
)

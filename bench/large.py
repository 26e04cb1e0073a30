"""The time to save and load a large state, beside the rivals and the limit of the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench import conditions, device, rivals
from bench.conditions import timed
from bench.limits import NAMES, SHAPES, Limit
from bench.part import (
    Measured,
    Params,
    Part,
    Round,
    Spread,
    contenders,
    in_turn,
    present,
    slowest_tenths_ratio,
    times_as_fast,
    with_rivals,
)
from bench.rivals import TorchCheckpointing
from bench.state import MIB, sharded_state

State = dict[str, torch.Tensor]
Save = Callable[[Path], object]
Prepare = Callable[[Path], None]

DCP_THREADS = (1, 2)
KEPT_FOR_LOADS = ("save", "save_dcp_1", "save_dcp_2", f"limit_write_{NAMES[0]}")


class Large:
    """The contenders of one rank, and the states that they save and fill."""

    def __init__(self, root: Path, total_mib: int, *, rivals_too: bool = True) -> None:
        mesh = device.mesh()
        self.rivals_too = rivals_too
        self.saved = sharded_state(mesh, total_mib * MIB, fill=True)
        self.target = sharded_state(mesh, total_mib * MIB, fill=False)
        self.root = root
        self.limits = {"limit": Limit(), "huge": Limit(huge_pages=True)} if rivals_too else {}
        self.raw = f"raw{dist.get_rank()}"
        self.notes: list[str] = []
        self.every_round: list[tuple[str, Save]] = [("save", lambda folder: holdfast.save(folder, self.saved))]
        self.some_rounds: list[tuple[str, Save]] = []
        self._meta: list[TorchCheckpointing] = []
        if rivals_too:
            self._add_rivals()

    def _add_rivals(self) -> None:
        count = conditions.local_bytes(self.saved)
        for threads in DCP_THREADS:
            self.every_round.append((f"save_dcp_{threads}", partial(self._save_dcp, threads)))
        for kind, limit in self.limits.items():
            for name, (in_flight, mib) in zip(NAMES, SHAPES, strict=True):
                self.every_round.append(
                    (f"{kind}_write_{name}", partial(self._write_raw, limit, count, in_flight, mib))
                )
        self.some_rounds += [
            ("save_torch_save", lambda folder: rivals.torch_save(self.saved, folder)),
            ("save_safetensors", lambda folder: rivals.safetensors_save(self.saved, folder)),
        ]
        self._meta = self._torch_checkpointing()

    def _torch_checkpointing(self) -> list[TorchCheckpointing]:
        if rivals.torch_checkpointing_version() is None:
            self.notes.append("torch_checkpointing is not installed (extra: bench)")
            return []
        savers = [TorchCheckpointing(threads) for threads in DCP_THREADS]
        for threads, saver in zip(DCP_THREADS, savers, strict=True):
            # It renames a folder of its own into place, and refuses one that is there.
            self.some_rounds.append(
                (f"save_meta_{threads}", lambda folder, own=saver: own.save(self.saved, folder / "own"))
            )
        return savers

    def _save_dcp(self, threads: int, folder: Path) -> None:
        rivals.dcp_save(self.saved, folder, threads)

    def _write_raw(self, limit: Limit, count: int, in_flight: int, mib: int, folder: Path) -> None:
        limit.write(folder / self.raw, count, in_flight, mib)

    def warm_up(self) -> None:
        """Let every contender save and load a little, untimed, so that no measured call pays for first-time work."""
        whole = self.saved, self.target
        few = list(self.saved)[:4]
        self.saved, self.target = ({name: state[name] for name in few} for state in whole)
        self.saves(0, thorough=True)
        self.loads(0)
        self.saved, self.target = whole

    def saves(self, number: int, thorough: bool) -> Round:
        """Save with each contender in turn; in a thorough round, leave the checkpoints that the loads need."""
        found: Round = {}
        for name, save in in_turn(self.every_round + (self.some_rounds if thorough else []), number):
            folder = conditions.emptied(self.root / name)
            conditions.quiet_disk()
            # Nobody finds the folder there but those who put one file a rank into it.
            place = folder / "own" if name.startswith(("save_dcp", "save_meta")) or name == "save" else folder
            found[name] = timed(lambda save=save, place=place: save(place))
            if not (thorough and name in KEPT_FOR_LOADS):
                conditions.removed(folder)
        return found

    def loads(self, number: int) -> Round:
        """Load with each contender in turn, cold and warm, and check the values.

        Cold loads alternate with plain reads, because a shared disk can be half as fast for seconds.
        """
        found: Round = {}
        raw = self.root / KEPT_FOR_LOADS[-1]
        reads = [
            (f"{kind}_read_{name}", raw, partial(self._read_raw, limit, in_flight, mib))
            for kind, limit in self.limits.items()
            for name, (in_flight, mib) in zip(NAMES, SHAPES, strict=True)
        ]
        loads: list[tuple[str, Path, Save]] = [
            ("", self.root / "save" / "own", lambda folder: holdfast.load(folder, self.target)),
            *(
                (f"_dcp_{n}", self.root / f"save_dcp_{n}" / "own", lambda folder: rivals.dcp_load(self.target, folder))
                for n in (DCP_THREADS if self.rivals_too else ())
            ),
        ]
        cold = [(f"load_cold{name}", folder, load) for name, folder, load in loads]
        mixed = [entry for n, load in enumerate(cold) for entry in (*reads[n :: len(cold)], load)]
        for name, folder, load in in_turn(mixed, number):
            found[name] = self._load(conditions.forget_pages, folder, load, is_read=folder == raw)
        warm = [(f"load_warm{name}", folder, load) for name, folder, load in loads]
        for name, folder, load in in_turn(warm, number):
            found[name] = self._load(conditions.touch_pages, folder, load, is_read=False)
        return found

    def _load(self, prepare: Prepare, folder: Path, load: Save, *, is_read: bool) -> float:
        conditions.zeroed(self.target)
        conditions.on_first_rank(lambda: prepare(folder))
        seconds = timed(lambda: load(folder))
        if not is_read:
            conditions.require_equal(self.saved, self.target)
        return seconds

    def _read_raw(self, limit: Limit, in_flight: int, mib: int, folder: Path) -> None:
        limit.read(folder / self.raw, in_flight, mib)

    def close(self) -> None:
        """Stop the threads of the contenders."""
        for saver in self._meta:
            saver.close()
        for limit in self.limits.values():
            limit.close()


def measure(root: Path, params: Params) -> Measured:
    """Measure every round. With many rounds, loads and the slower rivals take part in some of them only."""
    large = Large(root, params["mib"], rivals_too=with_rivals(params))
    large.warm_up()
    rounds = []
    for number in range(params["rounds"]):
        thorough = number % params["thorough_every"] == 0
        each = large.saves(number, thorough)
        if thorough:
            each |= large.loads(number // params["thorough_every"])
        rounds.append(each)
        conditions.removed(root)
        beside = ""
        if large.rivals_too:
            beside = (
                f"; DCP {each['save_dcp_1']:.2f} and {each['save_dcp_2']:.2f}; "
                f"plain writes {best(each, 'limit_write'):.2f}"
            )
        conditions.say(f"round {number + 1} of {params['rounds']}: saved in {each['save']:.2f} s{beside}")
    large.close()
    return Measured(rounds, large.notes)


def best(each: Round, prefix: str) -> float:
    """Return the smallest value whose name begins with a prefix."""
    return min(seconds for name, seconds in each.items() if name.startswith(prefix))


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results as ratios."""
    names = partial(contenders, rounds)
    found = {
        "save_vs_limit": times_as_fast(rounds, "save", names("limit_write")),
        "save_vs_limit_huge_pages": times_as_fast(rounds, "save", names("huge_write")),
        "save_vs_dcp": times_as_fast(rounds, "save", names("save_dcp")),
        "save_p90_vs_dcp_p90": slowest_tenths_ratio(rounds, "save", names("save_dcp")),
        "save_vs_torch_save": times_as_fast(rounds, "save", ["save_torch_save"]),
        "save_vs_safetensors": times_as_fast(rounds, "save", ["save_safetensors"]),
        "load_cold_vs_limit": times_as_fast(rounds, "load_cold", names("limit_read")),
        "load_cold_vs_limit_huge_pages": times_as_fast(rounds, "load_cold", names("huge_read")),
        "load_cold_vs_dcp": times_as_fast(rounds, "load_cold", names("load_cold_dcp")),
        "load_warm_vs_dcp": times_as_fast(rounds, "load_warm", names("load_warm_dcp")),
    }
    if present(rounds, "save_meta_1"):
        found["save_vs_torch_checkpointing"] = times_as_fast(rounds, "save", names("save_meta"))
    return found


PART = Part(
    name="large",
    question="How fast is a large state saved and loaded?",
    ranks=2,
    full={"mib": 2048, "rounds": 20, "thorough_every": 2},
    quick={"mib": 512, "rounds": 3, "thorough_every": 2},
    measure=measure,
    keys=keys,
    devices=device.KINDS,
)

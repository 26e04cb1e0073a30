"""A save to and a load from an object store, beside the bare client and DCP's ways: wall time and processor time.

Limit: server and clients share the cores of one machine, so what the server needs is in every wall time. Processor
time is that of the processes of the ranks alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import holdfast
from bench import conditions, device
from bench.part import (
    Measured,
    Params,
    Part,
    Round,
    Spread,
    contenders,
    in_turn,
    present,
    share_of,
    spread_of,
    times_as_fast,
    with_rivals,
)
from bench.settings import settings
from bench.state import MIB, sharded_state
from bench.store_place import SHAPES, Limit, Place, wait_until_idle
from bench.store_proxy import proxy
from bench.store_rivals import PROXIED, RIVALS, THREADS, missing

WARM_MIB = 64
"""Size of the state with which every contender makes its connections and its threads."""


@dataclass(frozen=True)
class Contender:
    """One way to write to a folder and to read from it."""

    name: str
    write: Callable[[str], object]
    read: Callable[[str], object]
    loads: bool = True
    """Whether it fills the state that is compared."""


class Speed:
    """All contenders of one rank, with one state."""

    def __init__(self, place: Place, proxied: str, mib: int, *, rivals_too: bool) -> None:
        """Make the state.

        Args:
            place: Where to write.
            proxied: Endpoint of the proxy before the same server; empty without rivals.
            mib: Size of the state, over all ranks.
            rivals_too: Whether limits and rivals are measured.
        """
        self._place = place
        mesh = device.mesh()
        self._saved = sharded_state(mesh, mib * MIB, fill=True)
        self._loaded = sharded_state(mesh, mib * MIB, fill=False)
        self.notes: list[str] = []
        self._limit: Limit | None = None
        self.contenders = [self._ours("ours", place.endpoint)]
        if rivals_too:
            self._limit = Limit(place, conditions.local_bytes(self._saved))
            self.contenders += [self._bare(self._limit, count) for count in SHAPES]
            for name in RIVALS:
                self._add_rival(name, proxied if name == PROXIED else place.endpoint)
                if name == PROXIED:
                    self.contenders.append(self._ours("ours_proxied", proxied))

    def _ours(self, name: str, endpoint: str) -> Contender:
        chosen = settings(object_store=holdfast.ObjectSettings(endpoint=endpoint))
        return Contender(
            name,
            lambda folder: holdfast.save(self._place.folder(folder), self._saved, settings=chosen),
            lambda folder: holdfast.load(self._place.folder(folder), self._loaded, settings=chosen),
        )

    def _bare(self, limit: Limit, count: int) -> Contender:
        write, read = (partial(work, in_flight=count) for work in (limit.write, limit.read))
        return Contender(f"limit_{count}", write, read, loads=False)

    def _add_rival(self, name: str, endpoint: str) -> None:
        if lacking := missing(name):
            self.notes.append(f"{name} was not measured: {', '.join(lacking)} is not installed")
            return
        rival = RIVALS[name](endpoint)

        def contender(threads: int) -> Contender:
            return Contender(
                f"{name}_{threads}",
                lambda folder: rival.save(self._saved, self._place.folder(folder), threads),
                lambda folder: rival.load(self._loaded, self._place.folder(folder)),
            )

        self.contenders += [contender(threads) for threads in THREADS]

    def measure(self, contender: Contender, *, is_warm_up: bool = False) -> Round:
        """Write, read, check and remove; return wall and processor seconds."""
        folder = conditions.of_first_rank(f"speed-{contender.name}-{time.time_ns()}")
        found: Round = {}
        for verb, work in (("write", contender.write), ("read", contender.read)):
            if not is_warm_up:
                conditions.on_first_rank(wait_until_idle)
            found |= conditions.measured(f"{contender.name}_{verb}", partial(work, folder))
        if contender.loads:
            conditions.require_equal(self._saved, self._loaded)
            conditions.zeroed(self._loaded)
        conditions.on_first_rank(lambda: self._place.remove(folder))
        return found

    def close(self) -> None:
        """Stop the threads of the limit."""
        if self._limit is not None:
            self._limit.close()


def measure(root: Path, params: Params) -> Measured:
    """Let every contender warm up with a small state, then measure each once."""
    place, rivals_too = Place.here(), with_rivals(params)
    with ExitStack() as stack:
        proxied = ""
        if rivals_too and conditions.rank() == 0:
            proxied = stack.enter_context(proxy(place.endpoint, root / "proxy", adds_tags=True)).endpoint
        proxied = conditions.of_first_rank(proxied)
        warm = Speed(place, proxied, min(WARM_MIB, params["mib"]), rivals_too=rivals_too)
        for contender in warm.contenders:
            warm.measure(contender, is_warm_up=True)
        warm.close()
        speed = Speed(place, proxied, params["mib"], rivals_too=rivals_too)
        found: Round = {}
        for contender in in_turn(speed.contenders, params["number"]):
            found |= speed.measure(contender)
            _say(contender.name, found, params["mib"])
        speed.close()
        conditions.barrier()
    return Measured([found], speed.notes)


def _say(name: str, found: Round, mib: int) -> None:
    verbs = (
        f"{verb} {mib / found[f'{name}_{verb}']:4.0f} MiB/s, {found[f'{name}_{verb}_cpu'] * 1024 / mib:.2f} s/GiB"
        for verb in ("write", "read")
    )
    conditions.say(f"{name:20} {'; '.join(verbs)} of processor")


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the results as ratios."""
    found: dict[str, Spread] = {}
    if present(rounds, "limit_8_write"):
        writes, reads = ([f"limit_{count}_{verb}" for count in SHAPES] for verb in ("write", "read"))
        found["put_vs_limit"] = times_as_fast(rounds, "ours_write", writes)
        found["get_vs_limit"] = times_as_fast(rounds, "ours_read", reads)
        found["get_cpu_vs_limit"] = share_of(rounds, "ours_read_cpu", [f"{name}_cpu" for name in reads])
        found["object_cpu_seconds_per_gib"] = share_of(rounds, "ours_write_cpu", [f"{name}_cpu" for name in writes])
    for name in RIVALS:
        # The same proxy on both sides. Over plain HTTP this rival signs no content, and Holdfast does.
        ours, key = ("ours_proxied", f"vs_{name}_signed") if name == PROXIED else ("ours", f"vs_{name}")
        rivals = contenders(rounds, f"{name}_")
        writes, reads = ([each for each in rivals if each.endswith(f"_{verb}")] for verb in ("write", "read"))
        if writes:
            found[key] = _both_verbs(rounds, ours, rivals)
            found[f"{key}_save"] = times_as_fast(rounds, f"{ours}_write", writes)
            found[f"{key}_load"] = times_as_fast(rounds, f"{ours}_read", reads)
    return found


def _both_verbs(rounds: Sequence[Round], ours: str, rivals: Sequence[str]) -> Spread:
    """Return how many times faster a save and a load were together, beside the best rival of each round."""
    names = [each.removesuffix("_write") for each in rivals if each.endswith("_write")]

    def seconds(each: Round, name: str) -> float:
        return each[f"{name}_write"] + each[f"{name}_read"]

    return spread_of([min(seconds(each, name) for name in names) / seconds(each, ours) for each in rounds])


PART = Part(
    name="store_speed",
    question="How fast are saves to an object store and loads from it, and how much processor time do they take?",
    ranks=2,
    full={"mib": 1024, "number": 0},
    quick={"mib": 128, "number": 0},
    measure=measure,
    keys=keys,
)

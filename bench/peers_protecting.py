"""How fast steps are protected, beside plain sockets between the same number of processes and one XOR of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spread_of
from bench.peers_place import NODES, manager, near, share
from bench.peers_sockets import PlainPeers, Pull, kept
from bench.state import MIB

WARM_UP = 3
"""Saves until packs and parity take the memory of collected steps."""


def measure(root: Path, params: Params) -> Measured:
    """Measure the time from `near` to `replicated`, and the limit."""
    rank, segment_bytes = conditions.rank(), params["mib"] * MIB // (NODES - 1)
    saved, rounds = share(params["mib"]), list[Round]()
    with manager(root, collect_grace_seconds=0.0, deduplicate=False) as run:
        run.load({f"stage{rank}": saved})
        pull = Pull(
            PlainPeers(near().parent, params["mib"]), [each for each in range(NODES) if each != rank], 0, segment_bytes
        )
        parity = kept(near().parent / f"parity-{rank}", segment_bytes)
        for number in range(-WARM_UP, params["rounds"]):
            this: Round = {}
            for tensor in saved.values():
                tensor += 1.0

            def protect(step: int = number + WARM_UP + 1) -> Round:
                handle = run.save(step, {f"stage{rank}": saved}, near_only=True)
                handle.wait("near")
                return conditions.measured("protect", lambda: handle.wait("replicated"), together=False)

            def limit() -> Round:
                return conditions.measured(
                    "limit", lambda: pull.run(lambda at, end: parity[at:end], lambda at, window: None)
                )

            contenders: list[Callable[[], Round]] = [protect, limit]
            for act in in_turn(contenders, number):
                this |= act()
            if number >= 0:
                rounds.append(this)
                conditions.say(", ".join(f"{name} {value:.3f}" for name, value in this.items()))
        run.close(wait=False)
    return Measured(rounds, [])


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the speed over the limit."""
    return {"protect_vs_limit": spread_of([each["limit"] / each["protect"] for each in rounds])}


PART = Part(
    name="peers_protecting",
    question="How fast is a step protected beside plain sockets and XOR?",
    ranks=NODES,
    full={"mib": 256, "rounds": 9},
    quick={"mib": 64, "rounds": 3},
    measure=measure,
    keys=keys,
)

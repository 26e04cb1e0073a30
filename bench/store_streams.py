"""How many connections a save keeps busy, where one connection is slow: one rank beside one connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import holdfast
from bench import conditions
from bench.part import Measured, Params, Part, Round, Spread, in_turn, spread_of
from bench.settings import settings
from bench.state import MIB
from bench.store_place import OBJECT_BYTES, Place, wait_until_idle
from bench.store_proxy import Answered, proxy

MIB_PER_SECOND, DELAY_SECONDS = 16, 0.05
TENSOR_MIB = 32


def measure(root: Path, params: Params) -> Measured:
    """Send bytes by one connection, and a state by a save, through a proxy that makes each connection slow."""
    direct = Place.here()
    state = {
        f"layers.{number}.weight": torch.rand(TENSOR_MIB * MIB // 4) for number in range(params["mib"] // TENSOR_MIB)
    }
    with proxy(
        direct.endpoint, root / "proxy", delay_seconds=DELAY_SECONDS, bytes_per_second=MIB_PER_SECOND * MIB
    ) as slow:
        place = replace(direct, endpoint=slow.endpoint)
        chosen = settings(object_store=holdfast.ObjectSettings(endpoint=slow.endpoint))
        works: list[tuple[str, int, Callable[[str], None]]] = [
            ("ours", params["mib"], lambda name: _save(place.folder(name), state, chosen)),
            ("connection", params["mib_alone"], lambda name: _send(place, name, params["mib_alone"])),
        ]
        found: Round = {}
        for name, mib, work in in_turn(works, params["number"]):
            folder = f"streams-{name}-{time.time_ns()}"
            wait_until_idle()
            start = time.perf_counter()
            work(folder)
            found[f"{name}_mib_per_second"] = mib / (time.perf_counter() - start)
            found[f"{name}_together"] = float(_most_together(slow.take()))
            direct.remove(folder)
    conditions.say(", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    return Measured([found], [])


def _save(url: str, state: dict[str, torch.Tensor], chosen: holdfast.Settings) -> None:
    holdfast.save(url, state, process_group=False, settings=chosen)


def _send(place: Place, name: str, mib: int) -> None:
    """Store objects one after the other."""
    import obstore

    client, memory = place.client(), bytes(min(OBJECT_BYTES, mib * MIB))
    for number in range(mib * MIB // len(memory)):
        obstore.put(client, place.key(f"{name}/{number}"), memory, mode="create", use_multipart=False)


def _most_together(requests: Sequence[Answered]) -> int:
    """Return the greatest number of uploads that were under way at one time."""
    uploads = [each for each in requests if each.method == "PUT"]
    return max(sum(other.began <= each.began < other.replied for other in uploads) for each in uploads)


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the ratio of the speeds."""
    return {
        "stream_scaling": spread_of(
            [each["ours_mib_per_second"] / each["connection_mib_per_second"] for each in rounds]
        )
    }


PART = Part(
    name="store_streams",
    question="How many connections of 16 MiB/s and 50 ms does a save fill?",
    ranks=1,
    full={"mib": 2048, "mib_alone": 128, "number": 0},
    quick={"mib": 256, "mib_alone": 32, "number": 0},
    measure=measure,
    keys=keys,
)

"""Saves and loads through a proxy with drawn faults: what was acknowledged is there, and what is loaded was saved."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

import holdfast
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CorruptError, MissingError, UnavailableError
from holdfast.settings import KIB, Settings
from holdfast.training.saving.handle import SaveHandle
from tests.doubles.fault_proxy import FaultKind, FaultProxy, ProxiedRequest, ProxyFault
from tests.servers.server import S3Server
from tests.support.tuning import tuned

BUDGET_SECONDS = 30.0
"""How long a save may hold training, by the settings of every run here."""
_OVER_BUDGET_SECONDS = 10.0
"""What a call takes beside its waits on a machine that is busy."""
_RUN_ROUNDS = 12
"""Rounds of one run: each save looks at every step."""
_SILENCE_SECONDS = 1.5
_DOWN_SECONDS = 1.0

Drawn = Callable[[random.Random], ProxyFault]


def is_request(method: str, *parts: str) -> Callable[[ProxiedRequest], bool]:
    """Return what says whether a request has this method, and these texts in its target."""
    return lambda request: request.method == method and all(part in request.target for part in parts)


_IS_PACK_PUT, _IS_PACK_GET = is_request("PUT", ".safetensors"), is_request("GET", ".safetensors")
_IS_COMMIT = is_request("PUT", "/manifest.json")


def _anywhere(chance: random.Random) -> int:
    """Return a number of requests that pass first: a save and a load make some forty."""
    return chance.randrange(50)


def _flip(chance: random.Random, kind: FaultKind, fits: Callable[[ProxiedRequest], bool]) -> ProxyFault:
    return ProxyFault(kind, fits, skip=chance.randrange(4), offset=chance.randrange(1000, 60_000))


@dataclass(frozen=True)
class Trouble:
    """Faults of one sort that a run meets, and the settings that it has then."""

    kinds: Mapping[str, Drawn]
    """By name, what draws a fault."""

    settings: Mapping[str, float]
    """What differs from the settings of the other runs."""

    may_fail: bool = False
    """Whether a save may fail with `UnavailableError`."""


def hasty(delay_seconds: float) -> Trouble:
    """Return faults that a save survives, and that end at once or after a delay."""
    kinds: dict[str, Drawn] = {
        "cut before": lambda chance: ProxyFault(FaultKind.CUT_BEFORE, skip=_anywhere(chance)),
        "cut after": lambda chance: ProxyFault(FaultKind.CUT_AFTER, skip=_anywhere(chance)),
        "reply of the commit lost": lambda _: ProxyFault(FaultKind.CUT_AFTER, _IS_COMMIT),
        "storm of 503": lambda chance: ProxyFault(
            FaultKind.REFUSE, skip=_anywhere(chance), times=chance.randrange(2, 9), status=chance.choice((503, 429))
        ),
        "error 500": lambda chance: ProxyFault(
            FaultKind.REFUSE, skip=_anywhere(chance), times=chance.randrange(1, 4), status=500, code="InternalError"
        ),
        "delay": lambda chance: ProxyFault(FaultKind.DELAY, skip=_anywhere(chance), times=2, seconds=delay_seconds),
        "flip in an upload": lambda chance: _flip(chance, FaultKind.FLIP_REQUEST, _IS_PACK_PUT),
        "flip in a read": lambda chance: _flip(chance, FaultKind.FLIP_REPLY, _IS_PACK_GET),
    }
    return Trouble(kinds, {})


def silent() -> Trouble:
    """Return faults after which the server is silent for longer than a request may take."""
    kinds: dict[str, Drawn] = {
        "black hole": lambda chance: ProxyFault(FaultKind.SILENCE, skip=_anywhere(chance)),
        "black hole at a pack": lambda chance: ProxyFault(
            FaultKind.SILENCE, _IS_PACK_PUT, skip=chance.randrange(4), times=chance.randrange(1, 3)
        ),
        # The server gets them after the client has given them up, and perhaps made them again.
        "late": lambda chance: ProxyFault(FaultKind.DELAY, skip=_anywhere(chance), seconds=2 * _SILENCE_SECONDS),
        "late pack": lambda chance: ProxyFault(
            FaultKind.DELAY, _IS_PACK_PUT, skip=chance.randrange(4), seconds=2 * _SILENCE_SECONDS
        ),
        "late commit": lambda _: ProxyFault(FaultKind.DELAY, _IS_COMMIT, seconds=2 * _SILENCE_SECONDS),
    }
    return Trouble(kinds, {"silence_timeout_seconds": _SILENCE_SECONDS})


def down(retry_seconds: float = _DOWN_SECONDS) -> Trouble:
    """Return faults that last until the save or load has failed, and that come at once.

    Args:
        retry_seconds: How long a call is made again.
    """
    kinds: dict[str, Drawn] = {
        "down, refusing": lambda chance: ProxyFault(FaultKind.REFUSE, skip=_anywhere(chance), times=math.inf),
        "down, cutting": lambda chance: ProxyFault(FaultKind.CUT_BEFORE, skip=_anywhere(chance), times=math.inf),
    }
    return Trouble(kinds, {"retry_seconds_per_call": retry_seconds}, may_fail=True)


def down_in_silence() -> Trouble:
    """Return the fault of a server that answers nothing any more until the save or load has failed."""
    kinds: dict[str, Drawn] = {
        "down, silent": lambda chance: ProxyFault(FaultKind.SILENCE, skip=_anywhere(chance), times=math.inf)
    }
    settings = {"silence_timeout_seconds": _SILENCE_SECONDS, "retry_seconds_per_call": _DOWN_SECONDS}
    return Trouble(kinds, settings, may_fail=True)


ALL = (hasty(2.0), silent(), down(), hasty(2.0), silent(), down_in_silence())
"""What the runs of a campaign meet in turn."""


def state_of(step: int) -> dict[str, object]:
    """Return the state of a step: two tensors that change, and one that does not."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(50_000, generator=generator),
        "bias": torch.randn(20_000, generator=generator),
        "frozen": torch.arange(40_000.0),
        "step": step,
    }


def empty_state() -> dict[str, object]:
    """Return a state of the same tensors, to load into."""
    return {name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else 0 for name, each in state_of(0).items()}


def settings_through(proxy: FaultProxy, server: S3Server, **changes: float) -> Settings:
    """Return settings of a run through the proxy, with packs of 64 KiB."""
    chosen = server.settings(
        endpoint=proxy.url,
        collect_grace_seconds=0.0,
        agreement_timeout_seconds=BUDGET_SECONDS,
        stall_timeout_seconds=BUDGET_SECONDS,
        **changes,
    )
    return tuned(chosen, full_pack_bytes=64 * KIB, cell_elements=16 * KIB)


@dataclass
class FaultyRun:
    """One run, its manager, and what it may be held to."""

    server: S3Server
    proxy: FaultProxy
    trouble: Trouble
    url: str
    manager: holdfast.CheckpointManager
    counts: Counter[str]
    """What was found, by name; those that end in `_max` are largest values."""

    held_to_budget: bool

    def __post_init__(self) -> None:
        self.acknowledged: set[int] = set()
        """Steps whose save succeeded."""
        self.may_be_damaged: set[int] = set()
        """Steps of which a bit was flipped on its way to the server."""

    def save(self, step: int, fault: ProxyFault | None) -> None:
        """Save a step, rewrite its state as soon as that is allowed, and wait for the end."""
        seen = len(self.proxy.requests)
        state = state_of(step)
        began = time.monotonic()
        try:
            handle = self.manager.save(step, state)
            self._note_held(time.monotonic() - began)
            report = self._awaited(handle, state)
        except UnavailableError:
            # Without a fault everything works.
            if fault is None or not self.trouble.may_fail:
                raise
            self.counts["failed loudly"] += 1
            return
        self.acknowledged.add(step)
        if fault is not None and fault.kind is FaultKind.FLIP_REQUEST and fault.met:
            self.may_be_damaged.add(step)
        met = 0 if fault is None else fault.met
        self._require_little_sent_again(step, seen, max(met, report.throttled))

    def _awaited(self, handle: SaveHandle, state: Mapping[str, object]) -> SaveReport:
        handle.wait("staged", timeout=120)
        # Training goes on, and changes what was staged.
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(math.nan)
        report = handle.wait(timeout=300)
        assert report is not None
        return report

    def _note_held(self, seconds: float) -> None:
        milliseconds = math.ceil(1000 * seconds)
        self.counts["held_milliseconds_max"] = max(self.counts["held_milliseconds_max"], milliseconds)
        limit = BUDGET_SECONDS + _OVER_BUDGET_SECONDS
        assert not self.held_to_budget or seconds <= limit, f"a save held training for {seconds:.1f} s"

    def _require_little_sent_again(self, step: int, seen: int, faults: int) -> None:
        """Require that at most one object was sent again for each fault."""
        sent: Counter[str] = Counter()
        size: dict[str, int] = {}
        for request in self.proxy.requests[seen:]:
            if _IS_PACK_PUT(request) and f"/step-{step:012d}/" in request.target:
                sent[request.target] += request.body_bytes
                size[request.target] = max(size.get(request.target, 0), request.body_bytes)
        again = sum(sent.values()) - sum(size.values())
        self.counts["bytes sent"] += sum(sent.values())
        self.counts["bytes sent again"] += again
        largest = max(size.values(), default=0)
        assert again <= faults * largest, f"step {step}: {again} bytes sent again for {faults} faults of {largest}"

    def require_loaded(self, fault: ProxyFault | None) -> None:
        """Load the newest step, which is the last that was acknowledged, or one whose outcome is unknown."""
        state = empty_state()
        try:
            loaded = self.manager.load(state)
        except UnavailableError:
            if fault is None or not self.trouble.may_fail:
                raise
            self.counts["failed loudly"] += 1
            return
        assert loaded is not None
        newest = max(self.acknowledged - self.may_be_damaged)
        assert loaded >= newest, f"step {newest} was acknowledged, and {loaded} loaded: {fault}"
        require_equal(state, loaded)
        self.counts["loads"] += 1

    def require_all_there(self) -> None:
        """Require that each step that was acknowledged is there, as a process sees it that meets no fault."""
        settings = self.server.settings()
        for step in sorted(self.acknowledged):
            state = empty_state()
            try:
                holdfast.load(self.url, state, step=step, settings=settings, process_group=False)
            except (CorruptError, MissingError):
                # Missing if a later save took its number.
                assert step in self.may_be_damaged, f"step {step} is damaged"
                self.counts["damaged by a server that took a flipped upload, and found"] += 1
                continue
            require_equal(state, step)
            self.counts["acknowledged steps whole at the end"] += 1


def require_equal(state: Mapping[str, object], step: int) -> None:
    """Require that a state is that of a step, bit for bit."""
    assert state["step"] == step
    for name, expected in state_of(step).items():
        if isinstance(expected, torch.Tensor):
            assert torch.equal(state[name], expected), f"step {step}: {name} differs"  # type: ignore[arg-type]


def play(
    server: S3Server,
    proxy: FaultProxy,
    *,
    seed: int,
    rounds: int,
    troubles: Sequence[Trouble] = ALL,
    run_rounds: int = _RUN_ROUNDS,
    held_to_budget: bool = True,
) -> Counter[str]:
    """Save and load `rounds` times, each with one drawn fault; return what was counted.

    Args:
        server: Where to.
        proxy: Stands before it.
        seed: Draws the faults.
        rounds: How many saves and loads.
        troubles: What the runs meet in turn.
        run_rounds: Rounds of one run.
        held_to_budget: Whether a save that holds training for longer than its budget is an error.
    """
    chance, counts = random.Random(seed), Counter[str]()
    for trouble, first in zip(itertools.cycle(troubles), range(0, rounds, run_rounds), strict=False):
        _play_run(server, proxy, trouble, chance, min(run_rounds, rounds - first), counts, held_to_budget)
    return counts


def _play_run(
    server: S3Server,
    proxy: FaultProxy,
    trouble: Trouble,
    chance: random.Random,
    rounds: int,
    counts: Counter[str],
    held_to_budget: bool,
) -> None:
    url = server.new_url()
    names: list[str] = []
    settings = settings_through(proxy, server, **trouble.settings)
    with holdfast.CheckpointManager(url, settings=settings, process_group=False, preemption=False) as manager:
        run = FaultyRun(server, proxy, trouble, url, manager, counts, held_to_budget)
        run.save(0, None)
        for step in range(1, rounds + 1):
            names = names or chance.sample(sorted(trouble.kinds), len(trouble.kinds))
            name = names.pop()
            fault = proxy.inject(trouble.kinds[name](chance))
            try:
                run.save(step, fault)
                run.require_loaded(fault)
            except BaseException as error:
                error.add_note(f"step {step} of {url}, fault {name!r}: {fault}")
                raise
            finally:
                proxy.heal()
            counts["rounds"] += 1
            counts[f"met: {name}"] += bool(fault.met)
            counts["faults met"] += int(fault.met)
        run.save(rounds + 1, None)
        run.require_loaded(None)
    run.require_all_there()

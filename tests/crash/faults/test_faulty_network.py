"""Saves and loads over a network with a fault at each request: what is loaded is what was saved, or an error."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import CollectorRegistry

import holdfast
from holdfast.backends.stores.wrappers import retries
from holdfast.errors import UnavailableError
from holdfast.observers import prometheus
from holdfast.settings import ObjectSettings, Settings
from tests.campaign.network import down, hasty, is_request, play
from tests.doubles.fault_proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.object_server import ObjectServer

pytestmark = pytest.mark.long

ELEMENTS = 50_000


@pytest.fixture
def proxy(objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    # Waits are random up to this: a sweep over many faults need not wait for any.
    monkeypatch.setattr(retries, "FIRST_SECONDS", 0.001)
    with FaultProxy("127.0.0.1", int(objects.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def through(proxy: FaultProxy, **changes: object) -> Settings:
    object_store = ObjectSettings(endpoint=proxy.url, **changes)  # type: ignore[arg-type]
    return Settings(object_store=object_store, collect_grace_seconds=0.0)


def state_of(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(ELEMENTS, generator=generator), "step": step}


def require_loaded(manager: holdfast.CheckpointManager, step: int) -> None:
    state: dict[str, object] = {"weight": torch.zeros(ELEMENTS), "step": 0}
    assert manager.load(state) == step
    expected = state_of(step)
    assert state["step"] == step
    assert torch.equal(state["weight"], expected["weight"])  # type: ignore[arg-type]


def test_a_fault_at_any_request_costs_no_save_and_no_load(proxy: FaultProxy, objects: ObjectServer) -> None:
    kinds = itertools.cycle((FaultKind.CUT_BEFORE, FaultKind.CUT_AFTER, FaultKind.REFUSE))
    with holdfast.CheckpointManager(objects.new_url(), settings=through(proxy)) as manager:
        manager.save(0, state_of(0)).wait()
        for step, kind in zip(itertools.count(1), kinds, strict=False):
            fault = proxy.inject(ProxyFault(kind, skip=7 * (step - 1)))
            manager.save(step, state_of(step)).wait()
            require_loaded(manager, step)
            if not fault.met:
                break
            proxy.heal()
        assert step >= 5, "a save and a load make some thirty requests"


def test_with_the_store_down_a_save_fails_and_the_next_one_works(proxy: FaultProxy, objects: ObjectServer) -> None:
    settings = through(proxy, retry_seconds_per_call=0.01)
    with holdfast.CheckpointManager(objects.new_url(), settings=settings) as manager:
        manager.save(1, state_of(1)).wait()
        for step, kind in ((2, FaultKind.REFUSE), (3, FaultKind.CUT_BEFORE)):
            fault = proxy.inject(ProxyFault(kind, times=math.inf))
            with pytest.raises(UnavailableError, match=r"retry_seconds_per_call is 0\.01"):
                manager.save(step, state_of(step)).wait()
            assert fault.met
            proxy.heal()
            require_loaded(manager, 1)
        manager.save(4, state_of(4)).wait()
        require_loaded(manager, 4)


def test_the_reply_to_the_commit_is_lost(proxy: FaultProxy, objects: ObjectServer) -> None:
    registry = CollectorRegistry()
    observers = [prometheus(None, registry=registry)]
    with holdfast.CheckpointManager(objects.new_url(), settings=through(proxy), observers=observers) as manager:
        fault = proxy.inject(ProxyFault(FaultKind.CUT_AFTER, is_request("PUT", "/manifest.json")))
        report = manager.save(1, state_of(1)).wait()
        assert fault.met == 1
        assert report is not None and report.retries == 1 and report.retry_seconds > 0 and not report.throttled
        require_loaded(manager, 1)
    labels = {"verb": "save", "rank": "0"}
    assert registry.get_sample_value("holdfast_retries_total", labels) == 1
    assert registry.get_sample_value("holdfast_retry_seconds_total", labels) == pytest.approx(report.retry_seconds)
    assert registry.get_sample_value("holdfast_throttled_total", labels) == 0


def test_a_pack_that_hangs_does_not_hold_training(proxy: FaultProxy, objects: ObjectServer) -> None:
    with holdfast.CheckpointManager(objects.new_url(), settings=through(proxy)) as manager:
        fault = proxy.inject(ProxyFault(FaultKind.SILENCE, is_request("PUT", ".safetensors")))
        state = state_of(1)
        handle = manager.save(1, state)
        assert handle.wait("staged", timeout=60) is None
        assert fault.reached.wait(60) and not handle.committed.done()
        # Training changes the state while the first request hangs.
        state["weight"].zero_()  # type: ignore[attr-defined]
        fault.release()
        handle.wait()
        require_loaded(manager, 1)


@pytest.mark.parametrize(("name", "offset"), ((".safetensors", 100_000), ("/index-", 100), ("/manifest.json", 100)))
def test_a_bit_that_is_flipped_in_a_read_costs_no_step(
    proxy: FaultProxy, objects: ObjectServer, name: str, offset: int
) -> None:
    with holdfast.CheckpointManager(objects.new_url(), settings=through(proxy)) as manager:
        manager.save(1, state_of(1)).wait()
        fault = proxy.inject(ProxyFault(FaultKind.FLIP_REPLY, is_request("GET", name), offset=offset))
        require_loaded(manager, 1)
        assert fault.met == 1
        assert manager.load_report.passed_over == ()  # type: ignore[union-attr]


def test_a_bit_that_is_flipped_in_a_part_costs_no_save(proxy: FaultProxy, objects: ObjectServer) -> None:
    with holdfast.CheckpointManager(objects.new_url(), settings=through(proxy)) as manager:
        fault = proxy.inject(ProxyFault(FaultKind.FLIP_REPLY, is_request("GET", "/parts/"), offset=100))
        manager.save(1, state_of(1)).wait()
        assert fault.met == 1
        require_loaded(manager, 1)


def test_a_bit_that_was_flipped_in_an_upload_is_never_loaded(proxy: FaultProxy, objects: ObjectServer) -> None:
    """This server compares no checksum of what it gets."""
    with holdfast.CheckpointManager(objects.new_url(), settings=through(proxy)) as manager:
        for step in (1, 2):
            if step == 2:
                is_pack = is_request("PUT", ".safetensors")
                fault = proxy.inject(ProxyFault(FaultKind.FLIP_REQUEST, is_pack, offset=100_000))
            manager.save(step, state_of(step)).wait()
        state: dict[str, object] = {"weight": torch.zeros(ELEMENTS), "step": 0}
        loaded = manager.load(state)
        assert fault.met == 1 and loaded == 1
        assert torch.equal(state["weight"], state_of(1)["weight"])  # type: ignore[arg-type]
        assert [each.step for each in manager.load_report.passed_over] == [2]  # type: ignore[union-attr]


ROUNDS = int(os.environ.get("NETWORK_ROUNDS", "16"))


def test_drawn_faults_lose_nothing_acknowledged_and_load_nothing_wrong(
    proxy: FaultProxy, objects: ObjectServer
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    # What depends on seconds is met in the campaign: silence, and how long a save holds training.
    troubles = (hasty(0.05), down(0.01))
    counts = play(objects, proxy, seed=seed, rounds=ROUNDS, troubles=troubles, run_rounds=8, held_to_budget=False)
    print(dict(counts))
    assert counts["rounds"] == ROUNDS and counts["faults met"] > ROUNDS / 4

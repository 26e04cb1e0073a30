"""Metrics as Prometheus gets them: scraped over HTTP, and read with the parser of its own client."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

import holdfast
from holdfast.errors import InvalidError, MissingError, UnavailableError
from holdfast.observers import (
    Ended,
    KindCoding,
    LogInterrupted,
    LogRedone,
    LogSealed,
    Operation,
    RankReport,
    prometheus,
)

SOURCE = Path(__file__).resolve().parents[5] / "src"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """Return each sample by its name and the values of its labels, sorted by label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("holdfast_")
    }


def test_a_run_is_scraped(tmp_path: Path) -> None:
    port, registry = free_port(), CollectorRegistry()
    observer = prometheus(port, address="127.0.0.1", registry=registry)
    assert scraped(port) == {}
    state = {"w": torch.ones(5000)}
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, observers=[observer]) as manager:
        reports = [manager.save(step, state).wait() for step in (10, 20)]
        with pytest.raises(MissingError):
            manager.load(state, 11)
        manager.load(state, 10)
        loaded = manager.load_report
    found = scraped(port)
    assert found["holdfast_operations_total", "done", "0", "save"] == 2
    assert found["holdfast_operations_total", "done", "0", "load"] == 1
    assert found["holdfast_operations_total", "failed", "0", "load"] == 1
    assert (
        found["holdfast_operations_under_way", "0", "save"] == found["holdfast_operations_under_way", "0", "load"] == 0
    )
    assert found["holdfast_bytes_total", "0", "save"] == 40_000
    assert found["holdfast_bytes_total", "0", "load"] == loaded.bytes  # type: ignore[union-attr]
    assert found["holdfast_last_step", "0", "save"] == 20
    assert found["holdfast_last_step", "0", "load"] == 10
    assert found["holdfast_seconds_count", "0", "save"] == found["holdfast_held_seconds_count", "0"] == 2
    told = [each for each in reports if each is not None]
    held = sum(each.staged_seconds for each in told)
    assert found["holdfast_held_seconds_sum", "0"] == pytest.approx(held)
    for name in ("write", "agree", "publish"):
        seconds = sum(phase.seconds for each in told for phase in each.phases if phase.name == name)
        assert found["holdfast_phase_seconds_total", name, "0", "save"] == pytest.approx(seconds)


def test_managers_of_one_process_share_a_registry(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    for name in ("a", "b"):
        observers = [prometheus(registry=registry)]
        with holdfast.CheckpointManager(tmp_path / name, process_group=False, observers=observers) as manager:
            manager.save(1, {"w": torch.ones(3)}).wait()
    labels = {"verb": "save", "rank": "0", "outcome": "done"}
    assert registry.get_sample_value("holdfast_operations_total", labels) == 2


def test_what_cannot_be_served_says_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=rf"127\.0\.0\.1:{port}: .*expected a port that is free"):
            prometheus(port, address="127.0.0.1", registry=CollectorRegistry())
    for wrong in (0, 65536, "9464", True):
        with pytest.raises(InvalidError, match="expected a whole number from 1 to 65535"):
            prometheus(wrong, registry=CollectorRegistry())  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="registry is str"):
        prometheus(registry="mine")  # type: ignore[arg-type]
    taken_names = CollectorRegistry()
    Counter("holdfast_bytes", "Of somebody else.", registry=taken_names)
    with pytest.raises(InvalidError, match="expected a registry without metrics of these names"):
        prometheus(registry=taken_names)


@pytest.mark.parametrize(
    ("absent", "call", "extra"),
    [("prometheus_client", "prometheus()", "metrics"), ("rich", "progress()", "cli")],
)
def test_without_its_library_an_observer_says_how_to_get_it(absent: str, call: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{absent!r}] = None; sys.path.insert(0, {str(SOURCE)!r})\n"
        "import holdfast.observers\n"
        f"try: holdfast.observers.{call}\n"
        "except holdfast.InvalidError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"pip install 'holdfast[{extra}]'" in done.stdout, done.stderr


@pytest.mark.parametrize("address", [None, 5, "a" * 80 + ".b"])
def test_an_address_that_is_none_is_refused(address: object) -> None:
    with pytest.raises(InvalidError, match="address"):
        prometheus(9464, address=address)  # type: ignore[arg-type]


def test_decisions_on_codecs_are_counted_by_kind() -> None:
    registry = CollectorRegistry()
    observer = prometheus(registry=registry)
    codings = tuple(
        KindCoding(kind, codec, 120, stored_bytes, None, None, None, None, 0.5, "because")
        for kind, codec, stored_bytes in (("float32 exp_avg", "planes", 100), ("bfloat16 parameter", "", 120))
    )
    facts = {"staging": "none", "staged_seconds": 0.0, "fence_seconds": 0.0}
    for step in (1, 2):
        report = RankReport(Operation("save", step, "x", 3, 4), "0" * 16, "h", 1, 0.0, 1.0, (), 240, facts, codings)
        observer.on_event(Ended(report))

    def value(name: str, kind: str, codec: str) -> float | None:
        return registry.get_sample_value(name, {"rank": "3", "kind": kind, "codec": codec})

    assert value("holdfast_codings_total", "float32 exp_avg", "planes") == 2
    assert value("holdfast_codings_total", "bfloat16 parameter", "raw") == 2
    assert value("holdfast_coding_raw_bytes_total", "float32 exp_avg", "planes") == 240
    assert value("holdfast_coding_stored_bytes_total", "float32 exp_avg", "planes") == 200


def test_a_redo_log_is_measured_by_rank() -> None:
    registry = CollectorRegistry()
    observer = prometheus(registry=registry)

    def value(name: str) -> float | None:
        return registry.get_sample_value(name, {"rank": "3"})

    def committed(step: int) -> None:
        facts = {"staging": "none", "staged_seconds": 0.0, "fence_seconds": 0.0}
        observer.on_event(
            Ended(RankReport(Operation("save", step, "x", 3, 4), "0" * 16, "h", 1, 0.0, 1.0, (), 9, facts))
        )

    assert value("holdfast_recoverable_step") is None
    observer.on_event(LogSealed(12, "x", 3, 1, 100, 0.25, None))
    assert value("holdfast_recoverable_step") is None  # The base is not committed yet.
    observer.on_event(LogSealed(14, "x", 3, 2, 150, 0.5, 14))
    committed(13)
    assert value("holdfast_recoverable_step") == 14
    observer.on_event(LogInterrupted(15, "x", 3, "because", 0.0))
    committed(20)
    assert value("holdfast_recoverable_step") == 20
    observer.on_event(LogRedone(17, "x", 3, 10, 7, 0.4, 0.0))
    assert value("holdfast_recoverable_step") == 17
    assert value("holdfast_log_bytes_total") == 250
    assert value("holdfast_log_wait_seconds_total") == 0.75
    assert value("holdfast_log_interruptions_total") == 1

"""The bench of object stores: what it counts on the wire, what its rounds say, how it goes on after Ctrl-C."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import store_requests, store_speed, stores
from bench.part import Measured, Part, Round, Spread, spread_of
from bench.store_place import VARIABLE
from bench.store_proxy import proxy
from tests.support.object_server import ObjectServer

BODY = b"x" * 300_000


@contextmanager
def server() -> Iterator[str]:
    """Run a small server of one object for the length of a block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            thread.join()


def asked(url: str, data: bytes | None = None) -> tuple[bytes, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=60) as reply:
        return reply.read(), reply.headers


def test_a_proxy_is_late_and_slow_and_keeps_a_record(tmp_path: Path) -> None:
    with (
        server() as upstream,
        proxy(upstream, tmp_path / "record", delay_seconds=0.1, bytes_per_second=1_000_000, adds_tags=True) as line,
    ):
        start = time.monotonic()
        assert asked(f"{line.endpoint}/a/r00000.safetensors?x=1")[0] == BODY
        assert time.monotonic() - start >= 0.1 + 0.9 * len(BODY) / 1_000_000
        first, second = (asked(f"{line.endpoint}/b?uploads", b"1" * 1000) for _ in range(2))
        assert (first[0], second[0], first[1]["ETag"]) == (b"abcde", b"abcde", '"0"')
        get, *posts = line.take()
        assert (get.method, get.is_pack, get.target) == ("GET", True, "/a/r00000.safetensors?x=1")
        assert [(each.method, each.is_pack) for each in posts] == 2 * [("POST", False)]
        assert all(each.replied - each.began >= 0.1 for each in (get, *posts))
        assert line.take() == []


def test_a_proxy_without_a_speed_passes_every_byte_on(tmp_path: Path) -> None:
    with server() as upstream, proxy(upstream, tmp_path / "record", adds_tags=True) as line:
        for _ in range(2):
            assert asked(f"{line.endpoint}/a")[0] == BODY
            assert asked(f"{line.endpoint}/b", os.urandom(3 << 20))[0] == b"abcde"
        assert [each.method for each in line.take()] == 2 * ["GET", "POST"]


def test_what_is_measured_becomes_every_key() -> None:
    first = {"ours": 2.0, "ours_proxied": 4.0, "limit_4": 1.8, "limit_8": 1.0, "dcp_fsspec_1": 8.0, "dcp_fsspec_4": 9.0}
    first |= {"s3torchconnector_1": 8.0, "s3torchconnector_4": 12.0}
    each: Round = {}
    for name, seconds in first.items():
        each |= {f"{name}_write": seconds, f"{name}_read": seconds / 2}
        each |= {f"{name}_write_cpu": 3 * seconds, f"{name}_read_cpu": seconds}
    found = store_speed.keys([each], {})
    assert {name: spread.median for name, spread in found.items()} == {
        "put_vs_limit": 0.5,
        "get_vs_limit": 0.5,
        "get_cpu_vs_limit": 2.0,
        "object_cpu_seconds_per_gib": 2.0,
        "vs_dcp_fsspec": 4.0,
        "vs_dcp_fsspec_save": 4.0,
        "vs_dcp_fsspec_load": 4.0,
        "vs_s3torchconnector_signed": 2.0,
        "vs_s3torchconnector_signed_save": 2.0,
        "vs_s3torchconnector_signed_load": 2.0,
    }
    for name in [name for name in each if name.startswith(("dcp", "s3torch"))]:
        del each[name]
    assert not [name for name in store_speed.keys([each], {}) if name.startswith("vs_")]


def test_an_interrupted_bench_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    ran: list[tuple[str, int]] = []
    interrupt_at = [3]

    def run(part: Part, params: dict[str, int], folder: Path, variables: dict[str, str]) -> Measured:
        assert variables == {VARIABLE: "s3://bucket/folder"}
        if len(ran) == interrupt_at[0]:
            interrupt_at.clear()
            interrupt_at.append(-1)
            raise KeyboardInterrupt
        ran.append((part.name, params["number"]))
        return Measured([{"amount": float(len(ran))}], ["said"])

    def keys_of(key: str) -> Any:
        def keys(rounds: list[Round], params: object) -> dict[str, Spread]:
            return {key: spread_of([each["amount"] for each in rounds])}

        return keys

    parts = {
        name: Part(name=name, question="?", ranks=1, full={}, quick={}, measure=lambda *_: 1 / 0, keys=keys_of(key))
        for name, key in (("one", "round_trips_before_return"), ("two", "stream_scaling"))
    }
    command = ["s3://bucket/folder", "--rounds", "2", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json")]
    assert stores.main(command, parts, run) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()
    # Round trips of 2 hold the floor, a scaling of 3 does not.
    assert stores.main(command, parts, run) == 1
    assert ran == [("one", 0), ("two", 0), ("one", 1), ("two", 1)]
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["round_trips_before_return"], written["stream_scaling_max"]) == (2.0, 4.0)
    assert [each["amount"] for each in written["rounds"]["one"]] == [1.0, 3.0]
    assert all(each["load_average_before"] >= 0 for each in written["rounds"]["two"])
    assert written["limits"] and written["notes"] == ["said"] and written["with"]["cores"]
    assert "below the floor" in capsys.readouterr().out
    assert not (tmp_path / "rounds.json").exists(), "the next command begins anew"


@pytest.mark.parametrize("arguments", [["/folder"], ["s3://bucket"], ["s3://bucket/a", "--only", "none"]])
def test_a_wrong_call_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(SystemExit) as refused:
        stores.main(arguments)
    assert refused.value.code == 2


def test_an_endpoint_that_no_proxy_can_look_into_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")
    with pytest.raises(SystemExit):
        stores.main(["s3://bucket/folder"])
    assert "expected the URL of a server over plain HTTP" in capsys.readouterr().err


def test_round_trips_are_requests_of_which_each_waits_for_the_one_before() -> None:
    times = [("a", 0, 1), ("b", 0, 2), ("c", 1.5, 2.5), ("r00000.safetensors", 3, 4), ("d", 3, 6), ("e", 5, 7)]
    requests = [store_requests.Answered("GET", f"/{name}", began, replied) for name, began, replied in times]
    assert store_requests._round_trips(requests) == 3  # a, c, d
    assert store_requests._round_trips([]) == 0


@pytest.mark.long
def test_requests_are_counted_on_the_wire(
    objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (objects.environment | {VARIABLE: objects.new_url()}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store_requests, "DELAY_SECONDS", 0.02)
    measured = store_requests.measure(tmp_path, {"number": 0})
    keys = {name: spread.median for name, spread in store_requests.keys(measured.rounds, {}).items()}
    # The goals. A count that is too low would mean that nothing was counted. What is asked behind a save is answered
    # before its call returns if the machine is busy for longer than a reply takes: tests/unit/runs counts it exactly.
    assert keys["round_trips_before_return"] >= 1
    assert 6 <= keys["requests_per_save_rank0"] <= 12
    assert 6 <= keys["requests_per_load"] <= 10

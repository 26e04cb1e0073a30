"""`holdfast serve` as a process, its file, and `holdfast alerts`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import holdfast
from tests.page.browsing import Seen
from tests.page.conftest import SLOW_RANK, state_of
from tests.page.test_bad_input import write_zeros
from tests.unit.cli.running import SOURCE, separately
from tests.unit.cli.running import holdfast as run


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run the command; yield the URL that it prints. It ends at Ctrl-C, with no word on stderr."""
    command = [sys.executable, "-W", "error", "-m", "holdfast.cli", "serve", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), process.communicate(timeout=30)[1]
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
        print(out, errors)
        assert process.returncode == 130 and "Traceback" not in errors


def fetched(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urlopen(Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_visitor_needs_the_printed_url(pristine: Path) -> None:
    with served(str(pristine)) as url:
        parts = urlsplit(url)
        token = parts.query.removeprefix("token=")
        cookie = f"holdfast-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        assert parts.hostname == "127.0.0.1" and len(token) >= 22, "128 bits"
        base = f"http://{parts.netloc}"
        assert fetched(f"{base}/") == (401, "401\n")
        status, text = fetched(f"{base}/", Authorization=f"Bearer {token}")
        assert status == 200 and "timeline 2" in Seen(text).text
        assert fetched(url)[0] == 200 and fetched(f"{base}/", Cookie=f"{cookie}={token}")[0] == 200
        assert fetched(f"{base}/", Authorization=f"Bearer {token}", Host="elsewhere.example")[0] == 421
        with socket.create_connection((parts.hostname, parts.port or 0), timeout=30) as line:
            line.sendall(b"GET /?x=" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: " + parts.netloc.encode() + b"\r\n\r\n")
            assert re.match(rb"HTTP/1.1 4\d\d", line.recv(100))
        assert fetched(f"{base}/", Authorization=f"Bearer {token}")[0] == 200, "it still serves"


def test_ports_and_hosts(pristine: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = run("serve", str(pristine), "--port", str(taken.getsockname()[1]))
        assert outcome.status == 2 and "expected a free one" in outcome.err
    outcome = run("serve", str(pristine), "--host", "no-such.invalid")
    assert outcome.status == 2 and "--host no-such.invalid" in outcome.err and "of this machine" in outcome.err
    with served(str(pristine), "--no-token", "--allow-host", "proxy.example:80") as first:
        assert "token" not in first
        assert fetched(first)[0] == 200 and fetched(first, Host="proxy.example:80")[0] == 200
        with served(str(pristine), "--root-path", "/page") as second:
            assert urlsplit(first).port != urlsplit(second).port
            token = urlsplit(second).query.removeprefix("token=")
            base = second.partition("/page")[0]
            _, text = fetched(f"{base}/", Authorization=f"Bearer {token}")
            links = [link for link in Seen(text).links if not link.startswith("#")]
            assert links and all(link.startswith("/page/") for link in links)


def test_ctrl_c_waits_for_no_long_work(tmp_path: Path) -> None:
    large = [str(write_zeros(tmp_path / f"{name}.safetensors", {"large": 1 << 36})) for name in "ab"]
    with served("--no-token", *large) as url:
        status, text = fetched(f"{url}run/0/diff?step=-&subject=1&other=-")
        assert status == 200 and "<progress" in text


def test_wrong_calls_are_refused(pristine: Path, tmp_path: Path) -> None:
    outcome = run("serve", str(pristine), "--no-token", "--host", "0.0.0.0")
    assert outcome.status == 2 and "--no-token with --host 0.0.0.0" in outcome.err
    (tmp_path / "nothing").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "absent"):
        outcome = run("serve", str(path))
        assert outcome.status == 2 and str(path) in outcome.err
    assert run("serve", str(pristine), "--events", str(tmp_path / "no-such")).status == 2
    outcome = separately("serve", pristine, absent=("starlette",))
    assert outcome.status == 2 and "pip install 'holdfast[page]'" in outcome.err


def test_a_report_is_one_file(pristine: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run("serve", str(pristine), "--out", str(out)).status == 0
    text = out.read_text()
    seen = Seen(text)
    assert all(link.startswith("#") for link in seen.links) and "http" not in re.sub(r"http-equiv", "", text)
    assert {link[1:] for link in seen.links if link != "#"} <= set(re.findall(r'id="([^"]+)"', text))
    assert f"{SLOW_RANK} on host-1" in seen.text and seen.text.count("save of step") == 6 and "timeline 2" in seen.text
    before = out.read_bytes()
    outcome = run("serve", str(pristine), "--out", str(out))
    assert outcome.status == 2 and "--force" in outcome.err and out.read_bytes() == before
    assert run("serve", str(pristine), "--out", str(out), "--force").status == 0
    command = [sys.executable, "-m", "holdfast.cli", "serve", str(pristine), "--out", str(out), "--force"]
    limited = ["bash", "-c", 'ulimit -f 1; trap "" XFSZ; "$@"', "-", *command]
    refused = subprocess.run(limited, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert refused.returncode == 2 and "expected a file that can be written" in refused.stderr, refused.stderr
    assert "</html>" in out.read_text() and [*tmp_path.iterdir()] == [out], "the old file stays whole"
    ascii_only = {**os.environ, "PYTHONPATH": str(SOURCE), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(command, env=ascii_only, check=True)
    assert "·" in out.read_text(encoding="utf-8")
    outcome = run("serve", str(pristine), "--out", "-")
    assert outcome.out.startswith("<!doctype html>") and outcome.status == 0
    assert run("serve", str(pristine / "step-000000000300"), "--out", "-").status == 2


def test_alerts_have_an_exit_status(pristine: Path, tmp_path: Path) -> None:
    outcome = run("alerts", str(pristine))
    assert outcome.status == 1 and f"slow_rank, step 400, rank {SLOW_RANK}, host host-1" in outcome.out
    found = json.loads(run("alerts", "--json", str(pristine), str(pristine)).out)
    assert [each["rule"] for each in found].count("slow_rank") == 2 and found[0]["act"]
    quiet = tmp_path / "quiet"
    with holdfast.CheckpointManager(quiet, process_group=False) as manager:
        for step in range(3):
            manager.save(step, state_of(step)).wait()
    outcome = run("alerts", str(quiet))
    assert (outcome.status, outcome.out) == (0, "no alerts\n")
    assert run("alerts", "--json", str(quiet)).out == "[]\n"
    outcome = run("alerts", str(tmp_path / "absent"))
    assert (outcome.status, outcome.out) == (2, "")
    for options, rules in ((), "slow_rank, step 400"), (("--json",), '"rule": "slow_rank"'):
        outcome = run("alerts", *options, str(pristine), str(quiet), str(tmp_path / "absent"))
        assert outcome.status == 2 and rules in outcome.out and str(tmp_path / "absent") in outcome.err


def test_a_report_of_many_steps_names_an_unfinished_one(tmp_path: Path) -> None:
    root = tmp_path / "long"
    with holdfast.CheckpointManager(root, process_group=False) as manager:
        for step in range(302):
            manager.save(step, {"epoch": step}).wait()
    (root / "step-000000000300" / "manifest.json").unlink()
    outcome = run("serve", str(root), "--out", str(tmp_path / "report.html"))
    assert outcome.status == 0, outcome.err
    seen = Seen((tmp_path / "report.html").read_text())
    assert "the newest 300 of 301 steps" in seen.text and "save of step 301" in seen.text

"""Only a visitor with the token sees a page, at the name that is served, and the page changes nothing."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from httpx2 import Response
from starlette.testclient import TestClient

import holdfast
from holdfast.observers import jsonl
from tests.page.browsing import TOKEN, Browser, Seen
from tests.support.file_modes import GROUP, OTHER_USER, as_user, open_folder


@pytest.fixture
def stranger(browser: Browser) -> TestClient:
    return TestClient(browser.app)


COOKIE = {"Cookie": f"holdfast-{hashlib.sha256(TOKEN.encode()).hexdigest()[:8]}=wrong"}
ROUTES = (
    "/", "/?format=json", "/run/0",
    "/run/0/step?step=300", "/run/0/tensors?step=300", "/run/0/trace", "/static/page.js",
    "/static/page.css", "/run/0/tensor?step=300&name=half", "/run/0/diff?step=300&other=200", "/nothing",
)  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_without_the_token_there_is_nothing(stranger: TestClient, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, COOKIE):
        answer = stranger.get(path, headers=headers)
        assert (answer.status_code, answer.text) == (401, "401\n")
    assert stranger.get("/?token=wrong").status_code == 401


def led_to(answer: Response) -> str:
    """Return the path that an answer to the token leads a browser to."""
    assert answer.status_code == 200
    (icon, _), (name, fields) = Seen(answer.text).active
    assert (icon, name, fields["http-equiv"]) == ("link", "meta", "refresh")
    return (fields["content"] or "").removeprefix("0;url=")


def test_the_first_visit_turns_the_token_into_a_cookie(stranger: TestClient, pristine: Path) -> None:
    answer = stranger.get(f"/run/0/step?rank=5&step=300&token={TOKEN}", follow_redirects=False)
    assert led_to(answer) == "/run/0/step?rank=5&step=300" and TOKEN not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert stranger.get("/run/0/step?step=300").status_code == 200
    other = TestClient(Browser(pristine).pages.app("another-token", ["testserver"]), cookies=stranger.cookies)
    assert other.get("/?token=another-token").status_code == 200
    stranger.cookies.update(other.cookies)
    assert stranger.get("/").status_code == 200, "a server at another port logs nobody out"
    for away in ("//elsewhere.example/", "/%5Celsewhere.example/", "/%0A/elsewhere.example/", '/"><b>&x="><b>'):
        path = led_to(stranger.get(f"{away}?token={TOKEN}", follow_redirects=False))
        assert re.fullmatch(r"/(?!/)[^\\\s<>\"]*", path), path


@pytest.mark.parametrize(
    "host", ["elsewhere.example", "testserver.elsewhere.example", "testserver:99", "", "127.0.0.1"]
)
def test_another_host_is_refused(browser: Browser, host: str) -> None:
    answer = browser.client.get("/", headers={"Host": host})
    assert answer.status_code == 421 and "holdfast" not in answer.text.lower()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/static/..%2fapp.py", 404),
        ("/static/%2e%2e/guard.py", 404),
        ("/static/page.css%00", 404),
        ("/run/0/../../etc/passwd", 404),
        ("/run/-1", 404),
        ("/run/99999999999999999999", 404),
        ("/run/" + "9" * 5000, 404),
        ("/run/%C2%B2", 404),
        ("/run/0/diff?step=300&other=300&subject=" + "9" * 5000, 200),
        ("/run/0/step?step=../../etc", 404),
        ("/run/0/step?step=%00", 404),
        ("/run/0/step?step=300&work=%00&rank=99999999999999", 200),
        ("/run/0/tensors?step=300&start=999999999999999999999", 200),
        ("/run/0/tensors?step=300&glob=[", 200),
        ("/run/0/diff?step=300&other=300&subject=77777", 200),
        ("/run/0/diff?step=300&other=300&sort=__class__", 200),
        ("/run/0/tensor?step=300&name=" + "a" * 20_000, 404),
        ("/?x=" + "a" * 60_001, 414),
    ],
)
def test_odd_requests_are_answered_in_short(browser: Browser, path: str, status: int) -> None:
    answer = browser.client.get(path)
    assert answer.status_code == status, answer.text[-300:]
    assert "Traceback" not in answer.text and "root:" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_no_route_changes_anything(browser: Browser, method: str) -> None:
    for path in ROUTES:
        assert browser.client.request(method, path).status_code in (404, 405)


def test_every_answer_has_the_policy(browser: Browser) -> None:
    for path in ROUTES:
        headers = browser.client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "no-referrer"
    for seen in browser.walk().values():
        assert not seen.handlers, "no handler and no style in an element: the policy would block both"
        assert all(not link.startswith(("http", "//", "javascript", "data")) for link in seen.links)


def state_of(root: Path) -> list[tuple[object, ...]]:
    """Names, sizes, times and inodes of everything under a root."""
    found: list[tuple[object, ...]] = []
    for folder, _, files in os.walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in files)]:
            facts = os.lstat(path)
            found.append((path, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_mode))
    return sorted(found, key=str)


def ask_every_route(root: Path) -> None:
    browser = Browser(root)
    assert len(browser.walk()) > 30
    for path in ROUTES:
        browser.client.get(path)


def test_no_page_writes_to_the_root(pristine: Path) -> None:
    with open_folder() as folder:
        root = Path(shutil.copytree(pristine, folder / "run"))
        for path in [root, *root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = state_of(root)
        ask_every_route(root)
        # Root may write everywhere. The first round imported the modules, which another user may not read.
        with as_user(OTHER_USER, GROUP) if os.geteuid() == 0 else nullcontext():
            with pytest.raises(PermissionError):
                (root / "new").touch()
            ask_every_route(root)
        assert state_of(root) == before
        for path in [root, *root.rglob("*")]:
            path.chmod(stat.S_IRWXU)


def test_no_page_writes_to_a_near_tier(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    near = holdfast.Tier(tmp_path / "near", every=1)
    settings = holdfast.Settings(collect_grace_seconds=0.0)
    with holdfast.CheckpointManager(
        tmp_path / "run", every=2, near=near, observers=[jsonl(events)], settings=settings, process_group=False
    ) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step, {"w": torch.full((4,), float(step))})
    before = state_of(tmp_path)
    browser = Browser(tmp_path / "run", events=[str(events)])
    for _ in range(2):
        assert any("/tensor?step=3" in path for path in browser.walk()), "a step of the near tier alone"
    assert state_of(tmp_path) == before

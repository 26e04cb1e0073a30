"""Asks the page over HTTP, and reads the answers as a browser would."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from holdfast.page.app import Pages, environment
from holdfast.page.subjects import subjects_at
from holdfast.settings import Settings

TOKEN = "a-token-of-the-tests"
ACTIVE = {"script", "iframe", "object", "embed", "base", "link", "meta", "style", "template", "form", "input", "button"}
"""Elements that do something."""


# Templates are compiled once: a visitor that asks for one page would spend most of the time on them.
templates = cache(environment)


class Seen(HTMLParser):
    """What a browser finds on a page: text, links, and elements that do something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.active: list[tuple[str, dict[str, str | None]]] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "data-source")]
        self.handlers += [f"{tag} {name}" for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag in ACTIVE:
            self.active.append((tag, named))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


class Browser:
    """A visitor with the token."""

    def __init__(self, *paths: Path | str, events: Iterable[str] = ()) -> None:
        self.pages = Pages(subjects_at([str(path) for path in paths], list(events), Settings()))
        self.pages.templates = templates()
        self.app = self.pages.app(TOKEN, ["testserver"])
        self.client = TestClient(self.app)
        self.client.headers["Authorization"] = f"Bearer {TOKEN}"

    def get(self, path: str, status: int = 200) -> Seen:
        answer = self.client.get(path)
        assert answer.status_code == status, (path, answer.status_code, answer.text[-500:])
        assert "Traceback" not in answer.text
        return Seen(answer.text)

    def json(self, path: str, status: int = 200) -> Any:
        answer = self.client.get(path + ("&" if "?" in path else "?") + "format=json")
        assert answer.status_code == status, (path, answer.status_code, answer.text[-500:])
        return answer.json()

    def walk(self, limit: int = 150) -> dict[str, Seen]:
        """Every page that links lead to, by its path."""
        seen: dict[str, Seen] = {}
        ahead = ["/"]
        while ahead and len(seen) < limit:
            path = ahead.pop(0)
            if path in seen:
                continue
            answer = self.client.get(path)
            assert answer.status_code < 500, (path, answer.text[-500:])
            is_page = answer.headers["content-type"].startswith("text/html")
            seen[path] = Seen(answer.text if is_page else "")
            ahead += [link.partition("#")[0] for link in seen[path].links if link.startswith("/")]
        return seen

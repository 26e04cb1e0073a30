"""The pages as an application: a function for each returns a template and the facts that the template shows."""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
import msgspec
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from holdfast import api, errors
from holdfast.errors import CheckpointError, MissingError
from holdfast.page.guard import Guard
from holdfast.page.subjects import LongWork, Subject, WorkQueue, shown_moment

ROWS_MAX, CELLS_MAX, PHASES_MAX = 500, 8192, 64
"""Rows of one table, before a link to the next ones; cells of a heat map without JavaScript, and its phases."""

_HERE = Path(__file__).parent
_STATUS = {"MissingError": 404, "ConflictError": 409, "CorruptError": 422, "UnavailableError": 503}
Facts = dict[str, Any]


def shown(value: object) -> object:
    """Return text of strangers without control characters; a template escapes the markup."""
    return errors.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def json_of(facts: object) -> bytes:
    """Return facts as JSON; paths that are not UTF-8 are shown as on a page."""
    try:
        return msgspec.json.encode(facts, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_all_shown(msgspec.to_builtins(facts, enc_hook=str)))


def _all_shown(value: object) -> object:
    if isinstance(value, dict):
        return {shown(key): _all_shown(each) for key, each in value.items()}
    return [_all_shown(each) for each in value] if isinstance(value, (list, tuple)) else shown(value)


def link(base: str, **query: object) -> str:
    """Return a URL with a query, from which empty values are left out."""
    given = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return base + ("?" + urlencode(given, errors="surrogatepass") if given else "")


def phases_of(work: Any) -> list[str]:
    """Return the first phases of some work, by name: the columns of a heat map."""
    return [*dict.fromkeys(name for rank in work.ranks for name in rank.phases)][:PHASES_MAX]


def environment() -> jinja2.Environment:
    """Return the templates, with the words in use there."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        finalize=shown, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters |= {"bytes": errors.shown_bytes, "ranks": errors.shown_ranks, "seconds": api.shown_seconds}
    made.filters |= {"time": shown_moment, "zip": zip}
    made.filters["age"] = lambda created: api.shown_age(shown_moment(created).replace(" UTC", "+00:00"))
    made.filters["number"] = lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    made.globals |= {"link": link, "counted": errors.counted, "value_text": api.value_text, "cells_max": CELLS_MAX}
    made.globals |= {"agent_notes": api.agent_notes, "phases_of": phases_of, "phases_max": PHASES_MAX}
    made.globals["asset"] = lambda name: Markup((_HERE / "static" / name).read_text(encoding="utf-8"))
    return made


class Pages:
    """The pages over some runs and checkpoints."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        """Read nothing yet."""
        self.subjects, self.work, self.templates = subjects, WorkQueue(), environment()
        self.numbered = {str(number): subject for number, subject in enumerate(subjects)}
        # Another server at this port shows another run, and counts its news from the start.
        self._nonce = secrets.token_hex()

    def app(self, token: str, hosts: Collection[str]) -> ASGIApp:
        """Return the application, guarded.

        Args:
            token: The token; empty without one.
            hosts: Values of `Host` that are accepted.
        """
        views = (step_page, tensors_page, tensor_page, diff_page, trace_page)
        paths = {f"/{view.__name__.removesuffix('_page')}": view for view in views} | {"": run_page}
        routes = [Route("/run/{subject}" + path, self._endpoint(view)) for path, view in paths.items()]
        routes.append(Route("/", self._endpoint(first_page)))
        static = Mount("/static", StaticFiles(directory=_HERE / "static"))
        handlers: Any = {HTTPException: self._refused, Exception: self._refused}
        return Guard(Starlette(routes=[*routes, static], exception_handlers=handlers), token, hosts)

    def _endpoint(self, view: Callable[[Pages, Request, Subject], tuple[str, Facts]]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            number = request.path_params.get("subject", "0")
            try:
                if (subject := self.numbered.get(number)) is None:
                    raise MissingError(f"there is no run {number[:80]!r}; expected a number below {len(self.subjects)}")
                template, facts = view(self, request, subject)
                return self._answer(request, template, facts | ({"path": subject.path} if template else {}))
            except CheckpointError as error:
                return self._refused(request, error)

        return answer

    def _answer(self, request: Request, template: str, facts: Facts, status: int = 200) -> Response:
        version = facts.pop("version", None)
        tag = hashlib.sha256(f"{self._nonce} {version} {request.url}".encode()).hexdigest()[:32]
        headers = {} if version is None else {"ETag": f'"{tag}"'}
        if version is not None and request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        if not template or request.query_params.get("format") == "json":
            return Response(json_of(facts), status, headers, "application/json")
        return HTMLResponse(self.render(template, facts, request), status, headers)

    def render(self, template: str, facts: Facts, request: Request | None = None) -> str:
        """Return a page as text; without a request one that leads nowhere else."""
        base = None if request is None else request.scope.get("root_path", "")
        number = 0 if request is None else request.path_params.get("subject", "0")
        where = {"base": base, "number": number, "run_base": f"{base}/run/{number}", "here": request}
        query = defaultdict(str, {} if request is None else request.query_params)
        where |= {"query": query, "subjects": [subject.path for subject in self.subjects]}
        return self.templates.get_template(template).render(where | facts)

    def _refused(self, request: Request, error: Exception) -> Response:
        status, text = 500, "an error of Holdfast: the log of the command has the traceback"
        if isinstance(error, HTTPException):
            status, text = error.status_code, error.detail
        elif isinstance(error, CheckpointError):
            status, text = _STATUS.get(type(error).__name__, 400), str(error)
        return self._answer(request, "error.html", {"status": status, "error": text}, status)


def first_page(pages: Pages, request: Request, subject: Subject) -> tuple[str, Facts]:
    """Return the list of runs; with one run the run."""
    return (
        ("subjects.html", {"subjects": [each.path for each in pages.subjects]})
        if len(pages.subjects) > 1
        else run_page(pages, request, subject)
    )


def run_page(pages: Pages, request: Request, subject: Subject) -> tuple[str, Facts]:
    """Return steps, alerts, work under way and timelines of a run; for one checkpoint its facts."""
    return ("run.html", subject.refresh()) if subject.watch is not None else step_page(pages, request, subject)


def step_page(pages: Pages, request: Request, subject: Subject) -> tuple[str, Facts]:
    """Return the facts about one checkpoint, and the heat map and timelines of one save, load or drain."""
    step, query = _known(subject, request.query_params.get("step", "")), request.query_params
    checkpoint = subject.checkpoint(step)
    stored = subject.reports(step)
    reports = [report for report in stored if not isinstance(report, CheckpointError)]
    works = {f"{work.verb}-{work.id}": work for work in api.works_of(reports)}
    chosen = query.get("work", f"save-{checkpoint.manifest.attempt}")
    chosen = chosen if chosen in works else next(iter(works), "")
    ranks = {name: rank.rank for name, rank in works[chosen].extremes.items()} if chosen else {}
    if query.get("rank", "").isdecimal():
        ranks["asked for"] = int(query["rank"][:9])
    of_work = [report for report in reports if f"{report.operation.verb}-{report.id}" == chosen]
    return "step.html", {
        "step": step, "facts": api.provenance(checkpoint), "works": [*works], "work": works.get(chosen), "ranks": ranks,
        "timelines": {each.operation.rank: each for each in of_work if each.operation.rank in ranks.values()},
        "codings": {each.operation.rank: each.codings for each in of_work if each.codings},
        "values": api.value_lines(checkpoint.objects, whole_names=False),
        "unreadable": [str(each) for each in stored if isinstance(each, CheckpointError)],
    }  # fmt: skip


def trace_page(pages: Pages, request: Request, subject: Subject) -> tuple[str, Facts]:
    """Return the trace of a step, or of all steps, for Perfetto."""
    step = request.query_params.get("step", "-").partition("@")[0]
    number, settings = None if step == "-" else step, subject.settings
    return "", subject.answer_of(lambda: api.trace(subject.path, step=number, settings=settings)).document


def tensors_page(pages: Pages, request: Request, subject: Subject) -> tuple[str, Facts]:
    """Return the tensors of a checkpoint: a tree by prefix, or those that a filter matches."""
    step, query = _known(subject, request.query_params.get("step", "")), request.query_params
    checkpoint = subject.checkpoint(step)
    prefix, glob, dtype, start = (query.get(name, "") for name in ("prefix", "glob", "dtype", "start"))
    folders, names = dict[str, list[int]](), list[str]()
    for name, info in checkpoint.tensors.items():
        if not name.startswith(prefix) or (glob and not fnmatchcase(name, glob)) or dtype not in ("", info.dtype):
            continue
        head, dot, _ = name[len(prefix) :].partition(".")
        if dot and not glob and not dtype:
            total = folders.setdefault(f"{prefix}{head}.", [0, 0])
            total[:] = total[0] + 1, total[1] + info.bytes
        else:
            names.append(name)
    if query.get("sort") == "bytes":
        names.sort(key=lambda name: -checkpoint.tensors[name].bytes)
    first = int(start[:9]) if start.isdecimal() else 0
    return "tensors.html", {
        "step": step, "prefix": prefix, "glob": glob, "dtype": dtype, "start": first, "count": len(names),
        "tensors": [_tensor(checkpoint, name) for name in names[first : first + ROWS_MAX]],
        "folders": [(key, *total) for key, total in [*folders.items()][:ROWS_MAX]], "folder_count": len(folders),
        "tensor_count": len(checkpoint.tensors), "aliases": dict([*checkpoint.aliases.items()][:ROWS_MAX]),
        "dtypes": sorted({info.dtype for info in checkpoint.tensors.values()}),
    }  # fmt: skip


def _tensor(checkpoint: api.Checkpoint, name: str) -> Facts:
    pieces, ranks = len(checkpoint.pieces(name)), sorted(checkpoint.written_by(name))
    info, form = checkpoint.tensors[name], checkpoint.stored_form(name)
    return {"name": name, "info": info, "form": form, "pieces": pieces, "ranks": ranks}


def tensor_page(pages: Pages, request: Request, subject: Subject) -> tuple[str, Facts]:
    """Return the statistics of one tensor."""
    step, name = _known(subject, request.query_params.get("step", "")), request.query_params.get("name", "")
    checkpoint = subject.checkpoint(step)
    stored = checkpoint.aliases.get(name, name)
    if stored not in checkpoint.tensors:
        raise MissingError(f"there is no tensor {name[:200]!r}; {_nearest(name, [*checkpoint.tensors])}")
    facts: Facts = {"step": step, "name": name, "tensor": checkpoint.tensors[stored]}
    key, is_stopped = f"{checkpoint.url} {checkpoint.identity} {stored}", "stop" in request.query_params
    found = pages.work.run(
        f"reading {name[:200]}", key, lambda work: api.statistics(checkpoint, stored, observer=work), stop=is_stopped
    )
    return _when_done("tensor.html", facts, "statistics", found)


def diff_page(pages: Pages, request: Request, subject: Subject) -> tuple[str, Facts]:
    """Return the differences between two steps, or between a step and a checkpoint of another subject."""
    step, query = _known(subject, request.query_params.get("step", "")), request.query_params
    where, other = query.get("subject", ""), query.get("other", "")
    if not other and not where:
        return "diff.html", {"step": step, "diff": None}
    elsewhere = pages.numbered.get(where, subject)
    b, a = subject.checkpoint(step), elsewhere.checkpoint(_known(elsewhere, other))
    name, key = f"comparing {a.url} with {b.url}", f"{a.identity} {b.identity}"
    found = pages.work.run(name, key, lambda work: api.diff(a, b, observer=work), stop="stop" in query)
    return _when_done("diff.html", {"step": step}, "diff", found)


def _when_done(template: str, facts: Facts, name: str, result: object) -> tuple[str, Facts]:
    if not isinstance(result, LongWork):
        return template, {**facts, name: result}
    progress = {"doing": result.name, "done": result.done_bytes, "total": result.total_bytes}
    return "progress.html", {**facts, **progress, "is_stopped": result.is_stopped and result.future.done()}


def _known(subject: Subject, step: str) -> str:
    """Return a step of a run as the page names the step; `-` for the one checkpoint of a subject."""
    if subject.watch is None:
        return "-"
    names = [each.name for each in subject.refresh()["steps"]]
    # A name with more digits of the digest is as good.
    if step in names or step in subject.removed or ("@" in step and step.partition("@")[0] in names):
        return step
    raise MissingError(f"there is no step {step[:80]!r}; {_nearest(step, names)}")


def _nearest(name: str, names: Sequence[str]) -> str:
    if near := get_close_matches(name[:200], names[-20_000:]):
        return f"the nearest names are {errors.first_three(near)}"
    return f"the last names are {errors.first_three(names[-3:])}" if names else "the list is empty"

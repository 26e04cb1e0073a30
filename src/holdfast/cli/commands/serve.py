"""`holdfast serve`: a run, or a checkpoint, in a browser; or as one file."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.arguments import AllowRoot, settings_with
from holdfast.cli.exit_status import INTERRUPTED, ended_well
from holdfast.cli.output import write_output
from holdfast.cli.screen import stdout
from holdfast.errors import ConflictError, InvalidError, UnavailableError

_NEEDED = {"starlette", "uvicorn", "jinja2", "anyio", "markupsafe"}
_PORTS = range(8470, 8570)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Option = typer.Option


def serve(
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", help="Runs, folders of runs, or checkpoints.")],
    port: Annotated[int | None, Option(help="Default: 8470, else the next free one.", min=0, max=65535)] = None,
    host: Annotated[str, Option(help="The address to bind.")] = "127.0.0.1",
    events: Annotated[list[str] | None, Option(metavar="FILE", help="Lines of observers.jsonl. Repeatable.")] = None,
    allow_host: Annotated[list[str] | None, Option(help="A further Host, as NAME:PORT. Repeatable.")] = None,
    root_path: Annotated[str, Option(help="The path under which a proxy shows the page.")] = "",
    no_token: Annotated[bool, Option("--no-token", help="Let every user of this host look; on loopback only.")] = False,
    out: Annotated[str | None, Option(metavar="FILE", help="Write one HTML file instead; - for stdout.")] = None,
    force: Annotated[bool, Option("--force", help="Replace the file of --out.")] = False,
    allow_root: AllowRoot = None,
) -> None:
    """Show runs and checkpoints in a browser: steps, alerts, slow ranks, tensors, differences. Writes to no root."""
    with ended_well():
        if no_token and host not in _LOOPBACK:
            raise InvalidError(f"--no-token with --host {host}; expected {_LOOPBACK[0]}: anyone could look")
        try:
            import uvicorn

            from holdfast.page.app import Pages
            from holdfast.page.report import report_of
            from holdfast.page.subjects import subjects_at
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _NEEDED:
                raise
            raise InvalidError(f"the page needs {error.name}; pip install 'holdfast[page]'") from error
        if out not in (None, "-") and Path(out).exists() and not force:
            raise ConflictError(f"{out}: exists; expected a new file. Pass --force to replace the file")
        subjects = subjects_at(paths, events or (), settings_with(allow_root))
        if out is not None:
            write_output(out, report_of(subjects), "--out")
            return
        with _bound(host, port) as listening:
            number, token = listening.getsockname()[1], "" if no_token else secrets.token_urlsafe(16)
            names = [f"[{name}]" if ":" in name else name for name in {host, *(_LOOPBACK * (host in _LOOPBACK))}]
            # A browser leaves out the port of HTTP.
            hosts = [f"{name}:{number}" for name in names] + names * (number == 80)
            pages = Pages(subjects).app(token, [*hosts, *(allow_host or ())])
            where = f"[{host}]" if ":" in host else host
            stdout().line(f"http://{where}:{number}{root_path}/{'?token=' * bool(token)}{token}")
            sys.stdout.flush()
            config = uvicorn.Config(pages, log_level="warning", root_path=root_path, server_header=False)
            try:
                uvicorn.Server(config).run(sockets=[listening])
            except KeyboardInterrupt:
                # Python would wait for threads that read: a long diff, a store that does not answer. No thread writes.
                os._exit(INTERRUPTED)


def _bound(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port: the asked one, or the first free one."""
    try:
        socket.getaddrinfo(host, 0)
    except OSError as error:
        raise InvalidError(f"--host {host}: {error}; expected a name or an address of this machine") from error
    for number in _PORTS if port is None else (port,):
        try:
            return socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            failure = error
    raise UnavailableError(f"{host}, port {number}: {failure}; expected a free one. Pass another --port") from failure

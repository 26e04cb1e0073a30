"""Refuses requests without the token or for another host, and adds the headers that keep strangers' text harmless."""

from __future__ import annotations

import hashlib
import html
import secrets
from collections.abc import Collection
from urllib.parse import quote

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

_QUERY_BYTES_MAX = 60_000
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, no-cache",
}


class Guard(BaseHTTPMiddleware):
    """An application around the page's own."""

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str]) -> None:
        """Guard an application; arguments as `Pages.app`."""
        super().__init__(app)
        self._token, self._hosts = token, {host.lower() for host in hosts}
        # A browser sends the cookies of one port to all ports of the host.
        self._cookie = f"holdfast-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Refuse a request, or pass the request on."""
        response = self._refusal(request) or await call_next(request)
        response.headers.update(_HEADERS)
        return response

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("host", "").lower() not in self._hosts:
            return PlainTextResponse("this host name is not served; see --allow-host\n", 421)
        if len(request.scope["query_string"]) > _QUERY_BYTES_MAX:
            return PlainTextResponse("the query is too long\n", 414)
        given = request.query_params.get("token", "")
        if self._token and self._is_token(given):
            url = request.url.remove_query_params("token")
            # One slash: a browser takes two for the name of another host.
            path = quote(f"/{url.path.lstrip('/')}{'?' * bool(url.query)}{url.query}", safe=":/%?=@&+,;")
            # No redirect: a browser sends a strict cookie to no request that a link of another site led to.
            # Without an icon here, a browser would ask for one at a path that is not served.
            icon = f'<link rel="icon" href="{html.escape(request.scope["root_path"])}/static/icon.svg">'
            response = HTMLResponse(f'{icon}<meta http-equiv="refresh" content="0;url={html.escape(path)}">\n')
            response.set_cookie(
                self._cookie, given, path=request.scope["root_path"] or "/", httponly=True, samesite="strict"
            )
            return response
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer if scheme.lower() == "bearer" else request.cookies.get(self._cookie, "")
        return PlainTextResponse("401\n", 401) if self._token and (given or not self._is_token(shown)) else None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

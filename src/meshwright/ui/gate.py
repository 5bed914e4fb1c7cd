"""Who may ask the explorer: only this machine's page, by its token. Everything else is answered with 403.

    GET /?token=...     the address that is printed: sets the cookie, and leads to / without the token
    GET /?start=...     the same, once: the address that a browser is started with, which other users may see in ``ps``
    anything else       needs the cookie, or ``Authorization: Bearer TOKEN``

Pages of other sites, and of other ports of this machine, are refused by Host, Origin and Sec-Fetch-Site: a cookie is
the same for all ports. The answers forbid scripts, frames and requests elsewhere (Content-Security-Policy).
"""

import hmac
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "open the address that `meshwright ui` has printed, with its token"


class Gate:
    """Lets requests of the page at ``host:port`` through to ``app``. ``start`` is a token for one use."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self._app, self._token, self.start = app, token, secrets.token_urlsafe(16)
        self._hosts = {f"{name}:{port}" for name in (host, "127.0.0.1", "localhost")}
        self._cookie = f"meshwright-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it through."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket: the page opens none, and the server refuses what is not answered

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        answer = self._refusal(request) or self._greeting(request)
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request from elsewhere or without the token; None for others."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("nothing can be changed here\n", 405)
        if request.headers.get("host", "") not in self._hosts:
            return _forbidden("this is not the address of the explorer")
        origin = request.headers.get("origin", "")
        if origin and origin not in {f"http://{host}" for host in self._hosts}:
            return _forbidden("another site's page asks")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _forbidden("another site's page asks")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        known = any(_equal(each, self._token) for each in (bearer, request.cookies.get(self._cookie, "")))
        return None if known or self._comes_with_token(request) else _forbidden("the token is missing or wrong")

    def _greeting(self, request: Request) -> Response | None:
        """Where the token stands in the address: the way to the page without it, with the cookie."""
        if not self._comes_with_token(request):
            return None
        if "start" in request.query_params:
            self.start = ""
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer

    def _comes_with_token(self, request: Request) -> bool:
        query = request.query_params
        return request.url.path == "/" and (
            _equal(query.get("token", ""), self._token) or _equal(query.get("start", ""), self.start)
        )


def _equal(received: str, expected: str) -> bool:
    return bool(expected) and hmac.compare_digest(received.encode(errors="replace"), expected.encode())


def _forbidden(why: str) -> Response:
    return PlainTextResponse(f"{why}\n  -> {REFUSED}\n", 403)

"""Tells other hosts how a run is doing: an HTTP server over the run's folder, and its client.

    GET /health     JSON, for `meshwright watch HOST:PORT`
    GET /metrics    Prometheus's text format

Every request carries a token (``Authorization: Bearer ...``), which is compared in constant time. Nothing can be
changed through it. What is sent is not encrypted: let it pass through ssh.
"""

import hmac
import http.client
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.ir import prometheus
from meshwright.report.health import RunHealth

ANSWER_S = 10.0
"""Seconds in which the server must answer, and in which it reads a request."""
MOST_BYTES = 16 * 2**20
REMEDY = "give the token that `meshwright watch RUN --serve` has printed: MESHWRIGHT_TOKEN, or --token"


class HealthServer:
    """Answers at ``host`` and ``port`` (0: any free port) until ``close``; ``address`` is where. ``read`` returns the
    state of the run.

    Raises:
        LaunchError: the address cannot be used.
    """

    def __init__(self, host: str, port: int, token: str, read: Callable[[], RunHealth]) -> None:
        class Handler(_Handler):
            expected, health = f"Bearer {token}".encode(), staticmethod(read)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise LaunchError(
                f"cannot be used: {error.strerror or error}", where=f"{host}:{port}", remedy="choose another address"
            ) from None
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_address[1]}"

    def run(self) -> None:
        """Answer requests until ``close`` is called in another thread."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    expected: bytes
    health: Callable[[], RunHealth]
    timeout = ANSWER_S
    server_version, sys_version = "meshwright", ""

    def do_GET(self) -> None:
        """Answer a request."""
        authorization = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(authorization, self.expected):
            self._answer(401, "text/plain", b"the token is missing or wrong\n")
            return
        if self.path not in ("/health", "/metrics"):
            self._answer(404, "text/plain", b"there are /health and /metrics\n")
            return
        try:
            health = type(self).health()
        except MeshwrightError as error:
            self._answer(503, "text/plain", f"{error}\n".encode())
            return
        if self.path == "/health":
            self._answer(200, "application/json", msgspec.json.encode(health))
        else:
            self._answer(200, prometheus.CONTENT_TYPE, health.prometheus().encode())

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: requests come every second."""


def ask_health(address: str, token: str) -> RunHealth:
    """The state of the run that a server at ``host:port`` tells of.

    Raises:
        LaunchError: nobody answers there, the token is wrong, or the answer is not ours.
    """
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_S)
    try:
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        content = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
        raise LaunchError(
            f"no answer: {error or type(error).__name__}", where=address,
            remedy="run `meshwright watch RUN --serve ADDRESS` there; from another host, through ssh -L",
        ) from None  # fmt: skip
    finally:
        connection.close()
    if answer.status == 401:
        raise LaunchError("the token is missing or wrong", where=address, remedy=REMEDY)
    if answer.status != 200:
        text = content.decode(errors="replace").strip()
        raise LaunchError(f"answers {answer.status}: {text[:500]}", where=address, remedy="look at that run")
    try:
        return msgspec.json.decode(content, type=RunHealth)
    except msgspec.MsgspecError as error:
        raise LaunchError(
            f"what it answers is no state of a run: {error}", where=address, remedy="correct the port"
        ) from None

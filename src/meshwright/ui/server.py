"""The explorer's web server: pages, parts of pages and files, all of them read only."""

import gc
import os
import socket
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote_from_bytes, unquote_to_bytes, urlencode

import msgspec

from meshwright.errors import FileFormatError, LaunchError, LayoutError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.layout import RECOMPUTE
from meshwright.ir.plan import Plan
from meshwright.report import drawing, named_traces, read_run, render, render_run
from meshwright.report.front import front_plot
from meshwright.report.page import shares
from meshwright.report.plan_difference import Difference, difference
from meshwright.report.run_files import PLAN
from meshwright.report.run_page import run_pictures, run_values
from meshwright.report.template import packaged, rendered_of
from meshwright.report.timeline import ranks_timeline
from meshwright.ui.comparison import layout_lines
from meshwright.ui.explorer import CHANGED, Explorer, Question, commands, fixed, read_question
from meshwright.ui.run_list import RunFolders

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from meshwright.ui.gate import Gate
except ModuleNotFoundError as error:
    raise LaunchError(
        f"{(error.name or '').partition('.')[0]} is not installed",
        where="meshwright ui",
        remedy="pip install 'meshwright[ui]'",
    ) from None

HOST = "127.0.0.1"
"""The only address at which the explorer listens."""
ROOM = "meshwright.ui"
MOST_NAMES = 200
"""Number of runs whose names are suggested where plans are compared."""
RUN_PLAN, LAYOUT = "run:", "layout:"
"""Where plans are compared, these begin the name of a run's plan, and a question of the explorer."""


class Pages:
    """Answers requests from an explorer, the runs of a folder, and plan files that the command line has named."""

    def __init__(self, explorer: Explorer, runs: RunFolders, plans: Sequence[Path] = ()) -> None:
        self._explorer, self._runs = explorer, runs
        self._plans = {str(path): path for path in plans}

    def routes(self) -> list[Route]:
        """The routes of the application."""
        pages: dict[str, Callable[[Request], Response]] = {
            "/": self._index, "/explore/answer": self._answer, "/explore/timeline.json": self._timeline,
            "/explore/cluster.toml": self._cluster, "/explore/layout.json": self._layout,
            "/explore/report.html": self._report, "/runs": self._run_list, "/run": self._run,
            "/run/timeline.json": self._run_timeline, "/run/report.html": self._run_report,
            "/run/plan.json": self._plan, "/compare": self._compare,
        }  # fmt: skip
        return [
            *(Route(path, _with_error_pages(page)) for path, page in pages.items()),
            *(Route(f"/static/{name}", _static(name, room)) for name, room in STATIC.items()),
        ]

    def _page(self, name: str, shown: str, pictures: Mapping[str, str] | None = None, **values: Any) -> Response:
        return _html(name, pictures or {}, {"shown": shown, **values})

    def _index(self, request: Request) -> Response:
        explorer = self._explorer
        return self._page(
            "explore.html.j2", "explore", question=explorer.first, models=explorer.models, clusters=explorer.clusters,
            software=explorer.software, recomputations=("any", *RECOMPUTE),
        )  # fmt: skip

    def _answer(self, request: Request) -> Response:
        question = read_question(request.query_params)
        answer = self._explorer.answer(question)
        report, trace = answer.report, answer.trace
        limit = report.memory_limit_bytes
        drawn = {
            "front": front_plot(report.front, limit, report.words, answer.others),
            "over_time": drawing.memory(trace, limit) if trace is not None else "",
        }
        return self._page(
            "answer.html.j2", "explore", drawn, report=report, others=answer.others, shares=shares(report),
            commands=commands(question, answer.chosen), rehearsed=trace is not None,
            query=_query(fixed(answer)),
            cluster_file=CHANGED if answer.cluster.name != question.cluster else "",
        )  # fmt: skip

    def _timeline(self, request: Request) -> Response:
        return _json(self._explorer.timeline(read_question(request.query_params)))

    def _cluster(self, request: Request) -> Response:
        answer = self._explorer.answer(read_question(request.query_params))
        return _file(files.encode_toml(answer.cluster), "application/toml", CHANGED)

    def _layout(self, request: Request) -> Response:
        answer = self._explorer.answer(read_question(request.query_params))
        return _file(msgspec.json.format(msgspec.json.encode(answer.chosen)), "application/json", "layout.json")

    def _report(self, request: Request) -> Response:
        answer = self._explorer.answer(read_question(request.query_params))
        return _file(render(answer.report).encode(), "text/html", "plan.html")

    def _run_list(self, request: Request) -> Response:
        words, number = request.query_params.get("q", ""), request.query_params.get("page", "1")
        run_page = self._runs.page(words, int(number) if number.isdecimal() and len(number) < 9 else 1)
        links = [_linked(row.link) for row in run_page.rows]
        folder = os.fsencode(self._runs.folder).decode(errors="replace")
        return self._page(
            "runs.html.j2", "runs", run_page=run_page, words=words, links=links, folder=folder, run=RUN_PLAN
        )

    def _folder(self, request: Request) -> Path:
        return self._runs.path(_run_name(request))

    def _run(self, request: Request) -> Response:
        run, link = read_run(self._folder(request)), _linked(_run_name(request))
        drawn = run_pictures(run) | {"timeline_source": f"/run/timeline.json?name={link}"}
        return self._page("run_view.html.j2", "runs", drawn, link=link, command="", **run_values(run))

    def _run_timeline(self, request: Request) -> Response:
        return _json(ranks_timeline(named_traces(read_run(self._folder(request)))))

    def _run_report(self, request: Request) -> Response:
        folder = self._folder(request)
        return _file(
            render_run(read_run(folder), f"meshwright report {folder}").encode(errors="replace"),
            "text/html",
            "report.html",
        )

    def _plan(self, request: Request) -> Response:
        return _file(files.encode_json(files.load(self._folder(request) / PLAN, Plan)), "application/json", PLAN)

    def _compare(self, request: Request) -> Response:
        old, new = (request.query_params.get(key, "") for key in ("old", "new"))
        known = [*self._plans, *(f"{RUN_PLAN}{name}" for name in self._runs.names(MOST_NAMES))]
        lines: tuple[Difference, ...] | None = None
        problem = ""
        if old and new:
            try:
                lines = self._lines(old, new)
            except MeshwrightError as error:
                problem = str(error)
        return self._page("compare.html.j2", "compare", old=old, new=new, known=known, lines=lines, problem=problem)

    def _lines(self, old: str, new: str) -> tuple[Difference, ...]:
        if old.startswith(LAYOUT) and new.startswith(LAYOUT):
            words = (dict(parse_qsl(name.removeprefix(LAYOUT))) for name in (old, new))
            before, after = (self._explorer.answer(read_question(each)) for each in words)
            return layout_lines(before.report, after.report)
        return difference(self._named_plan(old), self._named_plan(new)).differences

    def _named_plan(self, name: str) -> Plan:
        if name.startswith(LAYOUT):
            remedy = "give two layouts of the explorer, or two plans"
            raise LayoutError("a layout by sizes is no plan", where=name, remedy=remedy)
        if name in self._plans:
            return files.load(self._plans[name], Plan)
        if not name.startswith(RUN_PLAN):
            remedy = f"give {RUN_PLAN}NAME of a run in the list, or a file of `meshwright ui --plan FILE`"
            raise FileFormatError("there is no such plan", where=name, remedy=remedy)
        return files.load(self._runs.path(name.removeprefix(RUN_PLAN)) / PLAN, Plan)


STATIC = {
    "style.css": "meshwright.report", "timeline.js": "meshwright.report", "explorer.css": ROOM, "explorer.js": ROOM,
    "icon.svg": ROOM,
}  # fmt: skip
"""Files that pages name, with the package in which each lies."""


def _with_error_pages(page: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """The page, with errors of users as answers: an error as HTML for pages and parts of pages, else as text."""

    def answer(request: Request) -> Response:
        try:
            return page(request)
        except MeshwrightError as error:
            name = "problem.html.j2" if request.url.path == "/explore/answer" else "problem_page.html.j2"
            if request.url.path.endswith((".json", ".toml")):
                return PlainTextResponse(f"{error}\n".encode(errors="replace"), 400)
            shown = "runs" if request.url.path.startswith("/run") else "explore"
            return _html(name, {}, {"shown": shown, "error": error}, 400)

    return answer


def _html(name: str, pictures: Mapping[str, str], values: Mapping[str, Any], status: int = 200) -> Response:
    """A template as an answer. Names of files that are no text have marks in place of their strange bytes."""
    return HTMLResponse(rendered_of(ROOM, name, pictures, values).encode(errors="replace"), status)


def _static(name: str, room: str) -> Callable[[Request], Response]:
    kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
    return lambda request: Response(packaged(name, room), media_type=kind)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _file(content: bytes, kind: str, name: str) -> Response:
    """A file that the browser saves, and never shows as a page of the explorer."""
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=kind, headers=headers)


def _query(question: Question) -> str:
    """The question as a query string, without default values."""
    usual = msgspec.to_builtins(Question())
    changed = {key: value for key, value in msgspec.to_builtins(question).items() if value != usual[key]}
    return urlencode({"model": question.model, "cluster": question.cluster} | changed)


def _run_name(request: Request) -> str:
    """The name of a run in the query string. A folder's name may be bytes that are no text."""
    for part in request.url.query.split("&"):
        key, _, value = part.partition("=")
        if key == "name":
            return os.fsdecode(unquote_to_bytes(value.replace("+", " ")))
    return ""


def _linked(name: str) -> str:
    """The name of a run for a query string."""
    return quote_from_bytes(os.fsencode(name), safe="")


def application(explorer: Explorer, runs: RunFolders, token: str, port: int, plans: Sequence[Path] = ()) -> Gate:
    """The ASGI application. Every request needs ``token``, and the address ``127.0.0.1:port``."""
    app: ASGIApp = Starlette(routes=Pages(explorer, runs, plans).routes())
    return Gate(app, token, HOST, port)


def listening(port: int) -> socket.socket:
    """A socket that listens at ``port`` of this machine alone; 0: any free port.

    Raises:
        LaunchError: the port is taken, or may not be used.
    """
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((HOST, port))
        opened.listen(64)
    except OSError as error:
        opened.close()
        raise LaunchError(
            f"the port cannot be used: {error.strerror}", where=f"{HOST}:{port}",
            remedy="give another --port, or leave it out: any free port is taken",
        ) from None  # fmt: skip
    return opened


def server_of(app: Gate) -> "uvicorn.Server":
    """The server of an application: ``run(sockets=[listening(port)])`` answers requests until Ctrl-C. All that exists
    now is left out of Python's garbage collections, which would hold up an answer for 0.1 s."""
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off", ws="none")
    return uvicorn.Server(config)


def open_browser(url: str) -> bool:
    """Show ``url`` in the user's browser; False if there is none."""
    try:
        return webbrowser.open(url)
    except (webbrowser.Error, OSError):
        return False

"""`attnfuse view`: the pages of models, served to the browser of this machine."""

from __future__ import annotations

import contextlib
import http.server
import pathlib
import urllib.parse
import webbrowser
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse_cli.endings import ended_by
from onnx_attnfuse_cli.explain import FIELDS
from onnx_attnfuse_cli.files import Files, check_there, located, several
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import SECTIONS, derived_options
from onnx_attnfuse_cli.policy import policy_options
from onnx_attnfuse_cli.show import progress_bar, start_logging
from onnx_attnfuse_cli.terminal import MEANINGS, Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report

_ADDRESS = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_EXAMPLES = [
    Example("attnfuse view model.onnx", "Opens the page of a model."),
    Example("attnfuse view models --ep cuda --arch sm90", "A list of all models in a folder, and the page of each."),
    Example("attnfuse view model.onnx --no-open --port 8080", "Over SSH, with `ssh -L 8080:127.0.0.1:8080 HOST`."),
]


@click.command(
    "view",
    cls=Manual,
    short_help="Show models in the browser: each attention before and after, or why it is left.",
    examples=_EXAMPLES,
    sections=SECTIONS,
    statuses={status: what for status, what in MEANINGS.items() if status in {Exit.DONE, Exit.BAD_INPUT, Exit.DEFECT}},
)
@click.argument("model", nargs=-1, required=True, type=click.Path(path_type=pathlib.Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Port to serve at. Default: a free one.")
@click.option("--open/--no-open", "opens", default=True, help="Open the page in the browser; or only print its address.")
@derived_options(only=FIELDS)
@policy_options
@click.pass_context
def command(context: click.Context, *, model: Sequence[pathlib.Path], port: int, opens: bool, **chosen: Any) -> int:
    """Show the page of MODEL in the browser, until Ctrl+C. Writes nothing.

    MODEL may be several files, folders and quoted patterns; a list then leads to the page of each. Only this machine can read
    the pages, and they load nothing from elsewhere.
    """
    from onnx_attnfuse.report.html import check_installed

    check_installed()
    model = [*map(located, model)]
    for path in model[: len(model) == 1]:
        check_there(path)
    files = several(model, None, None, dry_run=True)
    start_logging(verbose=False)
    try:
        server = Server(port)
    except OSError as error:
        raise click.UsageError(f"port {port} cannot be used: {error.strerror}; choose another --port") from error
    with server:
        server.pages = _pages(files, chosen, context.obj)
        with contextlib.suppress(KeyboardInterrupt):
            echo(f"{server.url} shows {len(files)} model{'s' * (len(files) != 1)}; Ctrl+C ends it")
            if opens:
                webbrowser.open(server.url)
            server.serve_forever()
    return Exit.DONE


def _pages(files: Sequence[Files], chosen: Mapping[str, Any], args: Sequence[str]) -> Mapping[str, bytes]:
    """The page of each model by path, and the first page, which is that of the only model or a list."""
    import onnx_attnfuse
    from onnx_attnfuse.report.files import href, index
    from onnx_attnfuse.report.html import page

    reports: dict[str, Report | None] = {}
    pages: dict[str, bytes] = {}
    with progress_bar(shown=True) as progress:
        options = onnx_attnfuse.Options(**chosen, pictures=True, progress=progress)
        for item in files:
            try:
                reports[item.title] = report = onnx_attnfuse.explain(item.model, options=options)
            except Exception as error:  # noqa: PERF203 - the others are to be shown all the same
                if len(files) == 1:
                    raise
                reports[item.title] = None
                ended_by(error, args, str(item.model))
            else:
                pages[f"/{href(item.title)}"] = page(report, item.title, "would fuse").encode("utf-8", "replace")
    first = next(iter(pages.values())) if len(files) == 1 else index(reports, "would fuse").encode("utf-8", "replace")
    return {**pages, "/": first}


class Server(http.server.ThreadingHTTPServer):
    """A server of pages in memory, on the loopback address, that answers this machine's own requests only."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__((_ADDRESS, port), _Handler)
        self.pages: Mapping[str, bytes] = {}

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"http://{_ADDRESS}:{self.server_port}/"

    def trusts(self, headers: Mapping[str, str]) -> bool:
        """Whether a request names this server as its host and its origin: a page of another site cannot send such a one."""
        hosts = {f"{name}:{self.server_port}" for name in (_ADDRESS, "localhost")}
        origin = headers.get("Origin")
        return headers.get("Host") in hosts and (origin is None or origin in {f"http://{host}" for host in hosts})


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD; every other method is refused by the base class."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        page = self.server.pages.get(urllib.parse.urlsplit(self.path).path)
        status = 403 if not self.server.trusts(dict(self.headers.items())) else 404 if page is None else 200
        body = page if page is not None and status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        del format, args

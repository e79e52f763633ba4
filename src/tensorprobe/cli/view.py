"""`tensorprobe view`: the page of a result, or of two runs, from a server on this machine."""

from __future__ import annotations

import importlib.util
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorprobe.cli.options import progress
from tensorprobe.errors import SettingsError

if TYPE_CHECKING:
    from tensorprobe.view.server import Shown

MOST_ROWS = 200_000
"""A comparison with more rows leaves them on disk: the page asks the server for those in view."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="view")(view)


def view(
    result: Path = typer.Argument(metavar="RESULT", help="The folder of a result or of a run, or the baseline."),
    candidate: Path | None = typer.Argument(None, metavar="[CANDIDATE]", help="The run to compare the first one with."),
    port: int = typer.Option(0, min=0, metavar="N", help="The port. Default: one that is free."),
) -> None:
    """Show the page with full tensors, from a server on this machine.

    The server listens on 127.0.0.1 only, under a random address, and changes nothing. Stop it with Ctrl-C. When the result
    changes, the page is loaded again. Needs the extra 'view'.
    """
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise SettingsError(f"view needs {' and '.join(missing)}. Install them: pip install 'tensorprobe[view]'")
    load, version = _of_runs(result, candidate) if candidate is not None else _of_folder(result)
    serve(load, version, port)


def _of_folder(path: Path) -> tuple[Callable[[], Shown], Callable[[], str]]:
    """Return what shows a folder, read again when it changes."""
    from tensorprobe.cli.results import open_result

    def version() -> str:
        marks = []
        for name in ("summary.json", "online.json", "manifest.json"):
            try:
                found = (path / name).stat()
                marks.append(f"{found.st_mtime_ns}.{found.st_size}")
            except OSError:
                continue
        return "-".join(marks)

    open_result(path)  # what cannot be shown is refused before a port is open
    return lambda: _show(open_result(path), version()), version


def _of_runs(baseline: Path, candidate: Path) -> tuple[Callable[[], Shown], Callable[[], str]]:
    """Compare two runs, once, and return what shows the result."""
    from tensorprobe.engine import compare

    with progress("comparing calls") as bar:
        result = compare(baseline, candidate, progress=bar)
    return lambda: _show(result, "1"), lambda: "1"


def _show(held: Any, version: str) -> Shown:
    from tensorprobe.cli.results import page_of
    from tensorprobe.engine.result import Result
    from tensorprobe.report.page.html import to_html
    from tensorprobe.view.rows import TableView
    from tensorprobe.view.server import Shown

    if not isinstance(held, Result):
        return Shown(version, to_html(page_of(held, full=True), server=True))
    path = held.rows.path
    rows = TableView(path if path is not None and path.suffix == ".parquet" else held.rows.batches)
    page = page_of(held, full=True, rows=len(held.rows) <= MOST_ROWS)
    return Shown(version, to_html(page, server=True), rows, held.summary)


def serve(load: Callable[[], Shown], version: Callable[[], str], port: int) -> None:
    """Print the address and serve until Ctrl-C."""
    import uvicorn

    from tensorprobe.view.server import make_app

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()  # whoever reads the address below may use it at once
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", "") or "it must be below 65536"
        raise SettingsError(f"port {port} cannot be used: {why}. Leave out --port to take a free one.") from None
    with listener:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        app = make_app(load, version, port=port, token=token)
        typer.echo(f"http://127.0.0.1:{port}/{token}/")
        typer.echo(
            f"From another machine:   ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}   and open the same address there.\n"
            "Stop with Ctrl-C.",
            err=True,
        )
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
        uvicorn.Server(config).run(sockets=[listener])

"""The server of `tensorprobe view`: one page and what it asks for, to one reader on this machine.

It answers GET and HEAD on 127.0.0.1 only, under a random token, and only to requests that name this machine as their host, so
that a page of another site cannot reach it through a name that it has pointed here. It writes nothing. What it cannot answer is an
error in one line of text. Tensors are read from the mapped files, and only a picture of them is sent.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from tensorprobe.engine.call_diff import open_call
from tensorprobe.errors import TensorprobeError
from tensorprobe.model.comparison import Comparison
from tensorprobe.numerics.picture import picture_of
from tensorprobe.pairing.call_pairs import pair_slots
from tensorprobe.pairing.diff import diff_tensor, view_of
from tensorprobe.record.stored import StoredSlot
from tensorprobe.report.pattern import pattern_words
from tensorprobe.standard_json import encode
from tensorprobe.text import message
from tensorprobe.view.rows import BadQuery, TableView, read_query

MOST_ELEMENTS = 1 << 25
"""Elements of a tensor, or of a slice of one, that are looked at for one answer."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass
class Shown:
    """What is shown at one moment: the page, and for a comparison its rows and its two runs."""

    version: str
    html: str
    rows: TableView | None = None
    summary: Comparison | None = None


def make_app(load: Callable[[], Shown], version: Callable[[], str], *, port: int, token: str) -> Starlette:
    """Return the application. `load` makes what is shown, again whenever `version` changes."""
    held: list[Shown] = []

    def shown() -> Shown:
        if not held or held[0].version != version():
            held[:] = [load()]
        return held[0]

    async def page(request: Request) -> Response:
        return HTMLResponse((await run_in_threadpool(shown)).html)

    async def answer(request: Request) -> Response:
        asked = _ANSWERS.get(request.path_params["what"])
        if asked is None:
            return PlainTextResponse("there is no such thing here", 404)
        found = await run_in_threadpool(lambda: asked(shown(), dict(request.query_params)))
        return Response(encode(found), media_type="application/json")

    async def current(request: Request) -> Response:
        return Response(encode({"version": version()}), media_type="application/json")

    routes = [
        Route("/{token}/", _guarded(page, port, token)),
        Route("/{token}/api/version", _guarded(current, port, token)),
        Route("/{token}/api/{what}", _guarded(answer, port, token)),
    ]
    return Starlette(routes=routes, exception_handlers={404: _refused, 405: _refused})


Handler = Callable[[Request], Awaitable[Response]]


def _guarded(handler: Handler, port: int, token: str) -> Handler:
    """Let only requests through that carry the token and name this machine; turn a refusal of ours into one line of text."""
    hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def checked(request: Request) -> Response:
        if request.headers.get("host", "") not in hosts:
            answer: Response = PlainTextResponse("this server answers to 127.0.0.1 and localhost only", 403)
        elif not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            answer = PlainTextResponse("not found", 404)
        else:
            try:
                answer = await handler(request)
            except (TensorprobeError, BadQuery) as error:
                answer = PlainTextResponse(message(error), 400)
        answer.headers.update(_HEADERS)
        return answer

    return checked


async def _refused(request: Request, error: Exception) -> Response:
    code = getattr(error, "status_code", 404)
    return PlainTextResponse("this server is read-only" if code == 405 else "not found", code, headers=_HEADERS)


def _columns(shown: Shown, given: dict[str, str]) -> object:
    table = _table(shown)
    return {"total": table.total, "columns": table.columns()}


def _rows(shown: Shown, given: dict[str, str]) -> object:
    table, query = _table(shown), read_query(given.get("query", "{}"))
    first, last = _numbers(given.get("from", "0"), 1)[0], _numbers(given.get("to", "0"), 1)[0]
    try:
        count = len(table.find(query))
    except ValueError:  # Arrow's error for an expression that is not valid
        return {"valid": False, "count": 0, "rows": []}
    wanted = [name for name in given.get("columns", "").split(",") if name]
    return {"valid": True, "count": count, "rows": table.rows(query, first, last, wanted)}


def _position(shown: Shown, given: dict[str, str]) -> object:
    query = read_query(given.get("query", "{}"))
    return {"position": _table(shown).position(query, _place(given), given.get("slot", ""))}


def _calls(shown: Shown, given: dict[str, str]) -> object:
    found = _table(shown).calls(_numbers(given.get("rank", "0"), 1)[0])
    return {"calls": found.table, "producers": found.producers}


def _tensor(shown: Shown, given: dict[str, str]) -> object:
    with _open_slots(shown, given) as (runs, ours, theirs):
        found = diff_tensor(runs, ours, theirs, pictures=True, most=MOST_ELEMENTS)
        if not found.pictures and found.figures:
            found = msgspec.structs.replace(
                found, pictures=[_picture_at(ours, theirs, [0] * max(0, len(ours.shape) - 2))]
            )
    return {"tensor": found, "words": pattern_words(found.pattern)}


def _picture(shown: Shown, given: dict[str, str]) -> object:
    fixed = [int(part) for part in given.get("fixed", "").split(",") if part.strip().isdigit()]
    with _open_slots(shown, given) as (_, ours, theirs):
        return _picture_at(ours, theirs, fixed)


def _picture_at(ours: StoredSlot, theirs: StoredSlot, fixed: list[int]) -> object:
    shape = ours.shape
    if len(fixed) > len(shape) or any(not 0 <= at < size for at, size in zip(fixed, shape, strict=False)):
        raise BadQuery(f"the slice {fixed} is not in a tensor of shape {list(shape)}")
    pair = view_of(ours, theirs)
    size = math.prod(shape[len(fixed) :])
    if size > MOST_ELEMENTS and len(fixed) < len(shape):
        every = -(-size // MOST_ELEMENTS)
        rows = (*(slice(at, at + 1) for at in fixed), slice(None, None, every))
        pair = type(pair)(pair.baseline[rows], pair.candidate[rows], pair.eps, pair.tiny, pair.widen)
        held = picture_of(pair, fixed=[0] * len(fixed))
        return msgspec.structs.replace(held, title=f"{held.title}, every {every}th of axis {len(fixed)}", fixed=fixed)
    return picture_of(pair, fixed=fixed)


_ANSWERS: dict[str, Callable[[Shown, dict[str, str]], object]] = {
    "columns": _columns,
    "rows": _rows,
    "position": _position,
    "calls": _calls,
    "tensor": _tensor,
    "picture": _picture,
}


def _table(shown: Shown) -> TableView:
    if shown.rows is None:
        raise BadQuery("only a comparison has a table here")
    return shown.rows


def _numbers(text: str, count: int) -> list[int]:
    parts = text.split(",")
    if len(parts) != count or not all(part.lstrip("-").isdigit() and len(part) < 19 for part in parts):
        raise BadQuery(f"{text[:80]!r} is not {count} whole number{'s' if count > 1 else ''}")
    return [int(part) for part in parts]


def _place(given: dict[str, str]) -> tuple[int, int, int]:
    step, rank, index = _numbers(given.get("place", ""), 3)
    return step, rank, index


def _open_slots(shown: Shown, given: dict[str, str]) -> Any:
    """Open the runs at a call and return one slot of both sides; a context manager."""
    place, wanted = _place(given), given.get("slot", "")
    table = _table(shown)
    own = table.rows_of(place)
    if shown.summary is None or not len(own):
        raise BadQuery(f"no call in step {place[0]}, rank {place[1]} has the line {place[2]}")
    names = [table.column(name).take(own).to_pylist() for name in ("call", "candidate_call", "slot")]
    slot = wanted if wanted in names[2] else next((name for name in names[2] if name.startswith("output")), names[2][0])
    if wanted and wanted not in names[2]:
        raise BadQuery(f"{names[0][0]} has no tensor {wanted!r}; it has {', '.join(names[2])}")
    paths = (shown.summary.baseline.path, shown.summary.candidate.path)
    return _Slots(paths, (names[0][0], names[1][0]), place, slot)


@dataclass
class _Slots:
    """A slot of a call in both runs, open while the block runs."""

    paths: tuple[str, str]
    calls: tuple[str, str]
    place: tuple[int, int, int]
    slot: str

    def __enter__(self) -> tuple[Any, StoredSlot, StoredSlot]:
        self._opened = open_call(*self.paths, *self.calls, self.place)
        runs, (ours, theirs) = self._opened.__enter__()
        pairs, _, _ = pair_slots(ours.model, theirs.model)
        first, second = next(pair for pair in pairs if pair[0].name == self.slot)
        return runs, StoredSlot(first, ours), StoredSlot(second, theirs)

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

"""The server of `tensorprobe view`: what it answers, what it refuses, and the page that asks it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
import uvicorn

from tensorprobe.cli import view
from tensorprobe.errors import RunNotFound
from tensorprobe.report.page.comparison import STATUSES
from tensorprobe.view.server import make_app
from tests.web.browser import until
from tests.web.conftest import Watched

TOKEN = "a-token-that-is-not-random"
SOFTMAX = "0,0,8"
"""Step, rank and line of the call with the fault."""


class Server(NamedTuple):
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{TOKEN}/"

    def ask(
        self, path: str = "", *, method: str = "GET", token: str = TOKEN, host: str = "", **given: object
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        words = f"?{urlencode(given)}" if given else ""
        connection.request(method, f"/{token}/{path}{words}", headers={"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        self_text = answer.read().decode()
        connection.close()
        return answer.status, self_text

    def json(self, path: str, **given: object) -> Any:
        code, text = self.ask(f"api/{path}", **given)
        assert code == 200, text
        return json.loads(text)


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Server]]:
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(folder: Path) -> Server:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        load, version = view._of_folder(folder)
        app = make_app(load, version, port=port, token=TOKEN)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="served")
        thread.start()
        running.append((server, thread))
        return Server(port, folder)

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


@pytest.fixture
def served(serve: Callable[[Path], Server], compared: Callable[[str], Path]) -> Server:
    return serve(compared("fault"))


def rows(served: Server, first: int = 0, last: int = 5, columns: str = "call,relative_l2", **query: object) -> Any:
    return served.json("rows", query=json.dumps(query), **{"from": first, "to": last}, columns=columns)


def test_the_page_and_its_rows_are_served(served: Server) -> None:
    code, text = served.ask()
    assert code == 200 and "connect-src 'self'" in text and '"server": true' in text
    found = rows(served, text="softmax output.0")
    assert (found["valid"], found["count"], len(found["rows"])) == (True, 16, 5)
    assert all("softmax" in row["cells"]["call"] for row in found["rows"])


def test_queries_filter_and_sort_as_the_page_does(served: Server) -> None:
    assert rows(served)["count"] == 192
    assert rows(served, statuses=[list(STATUSES).index("introduced")], outputs=True)["count"] == 2
    assert rows(served, module="layers.1.softmax")["count"] == 8
    assert rows(served, text=r"softmax\.[01]\.forward$", regex=True)["count"] == 8
    assert rows(served, text="softmax[", regex=True)["valid"] is False
    assert rows(served, rank=0, step=1)["count"] == 96
    assert rows(served, range=[[0, 2], [0, 4]], rank=0)["count"] == 6
    errors = [float(row["cells"]["relative_l2"]) for row in rows(served, last=50, sort="relative_l2")["rows"]]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0
    position = served.json("position", query="{}", place=SOFTMAX, slot="output.0")["position"]
    found = rows(served, position, position + 1)["rows"][0]
    assert found["place"] == [0, 0, 8] and found["cells"]["slot"] == "output.0"


def test_a_tensor_and_a_slice_of_it_are_sent_as_pictures(served: Server) -> None:
    found = served.json("tensor", place=SOFTMAX, slot="output.0")
    assert "only the last 4 columns" in found["words"]
    assert found["tensor"]["pictures"][0]["columns"] == 32
    picture = served.json("picture", place=SOFTMAX, slot="output.0", fixed="3")
    assert (picture["rows"], picture["columns"], picture["fixed"]) == (16, 32, [3])
    equal = served.json("tensor", place="0,0,0", slot="input.0")
    assert equal["words"] == "" and equal["tensor"]["figures"]["different"] == 0


def test_a_large_tensor_is_looked_at_in_parts(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe.view import server

    monkeypatch.setattr(server, "MOST_ELEMENTS", 200)
    found = served.json("tensor", place=SOFTMAX, slot="output.0")["tensor"]
    assert "more than are looked at" in found["problem"] and found["figures"]["different"] > 0
    assert found["pictures"][0]["title"] == "[0, :, :], every 3th of axis 1"


@pytest.mark.parametrize(
    ("path", "given", "says"),
    [
        ("tensor", {"place": "9,9,9"}, "no call in step 9, rank 9 has the line 9"),
        ("tensor", {"place": "1,2"}, "is not 3 whole numbers"),
        ("tensor", {"place": SOFTMAX, "slot": "output.9"}, "has no tensor 'output.9'; it has input.0, output.0"),
        (
            "picture",
            {"place": SOFTMAX, "slot": "output.0", "fixed": "99"},
            "the slice [99] is not in a tensor of shape",
        ),
        ("rows", {"query": "{bad"}, "the query cannot be read"),
        ("rows", {"query": '{"unknown": 1}'}, "the query cannot be read"),
        ("rows", {"from": 0, "to": 100_000}, "at most 1,000"),
        ("rows", {"from": -4, "to": 2}, "at most 1,000"),
        ("rows", {"from": "x", "to": 2}, "is not 1 whole number"),
        ("rows", {"query": json.dumps({"text": "x" * 5000})}, "at most 2,000"),
        ("rows", {"query": json.dumps({"sort": "os.system"})}, "there is no column"),
        ("rows", {"columns": "../../etc", "to": 2}, "there is no column"),
    ],
)
def test_what_cannot_be_answered_is_an_error_in_one_line(
    served: Server, path: str, given: dict[str, object], says: str
) -> None:
    code, text = served.ask(f"api/{path}", **given)
    assert code == 400 and says in text and "\n" not in text and "Traceback" not in text


def test_strangers_are_refused(served: Server) -> None:
    assert served.ask(host="evil.example")[0] == 403
    assert served.ask(host=f"evil.example:{served.port}")[0] == 403
    assert served.ask(token="guessed")[0] == 404
    assert served.ask("api/rows", host="evil.example", query="{}")[0] == 403
    assert served.ask(host=f"localhost:{served.port}")[0] == 200
    assert served.ask("../../../etc/passwd")[0] == 404
    assert served.ask("api/nothing")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert served.ask(method=method) == (405, "this server is read-only")


def test_answers_forbid_frames_caches_and_other_sites(served: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    for path in ("", "api/version", "api/nothing"):
        connection.request("GET", f"/{TOKEN}/{path}", headers={"Host": f"127.0.0.1:{served.port}"})
        answer = connection.getresponse()
        answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin" and "access-control-allow-origin" not in headers
    connection.close()


def test_the_version_changes_with_the_result(
    serve: Callable[[Path], Server], compared: Callable[[str], Path], tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "result"
    shutil.copytree(compared("clean"), folder)
    served = serve(folder)
    before, _ = served.json("version")["version"], served.ask()
    assert "AGREES" in served.ask()[1]
    for path in compared("nonfinite").iterdir():
        shutil.copy(path, folder / path.name)
    assert served.json("version")["version"] != before
    assert "DIVERGED" in served.ask()[1]


def test_other_results_and_runs_have_a_page_too(
    serve: Callable[[Path], Server], compared: Callable[[str], Path]
) -> None:
    served = serve(compared("fault").parent / "baseline")
    assert '"kind": "run"' in served.ask()[1]
    assert served.ask("api/rows", query="{}") == (400, "only a comparison has a table here")


def test_the_page_asks_for_rows_and_tensors_that_are_not_in_it(
    served: Server, watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "MOST_ROWS", 10)  # as if there were too many for a page
    held = watched(served.url, network=served.url)
    page = held.page
    held.shows("192 of 192")
    until(page, "() => document.querySelector('.rows .active')?.innerText.includes('Functional.softmax.1.forward')")
    page.wait_for_selector(".maps canvas")  # what is still loading may move the rows away from under a click
    page.fill("input[type=search]", "gelu.2.forward output.0")
    held.shows("2 of 192")
    page.locator(".rows .line", has_text="gelu.2.forward").first.click()
    held.selects("Functional.gelu.2.forward")
    page.wait_for_selector(".slices input")
    page.locator(".slices input").first.fill("1")
    page.locator(".slices input").first.press("Enter")
    until(page, "() => document.querySelector('.readout') !== null")
    assert page.locator("#selected .node").count() > 2


def test_the_command_prints_where_it_serves_and_ends_with_ctrl_c(compared: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "tensorprobe", "view", str(compared("clean"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", url)
        assert match, url
        assert f"ssh -N -L {match[1]}:127.0.0.1:{match[1]}" in process.stderr.readline()
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
        connection.request("GET", f"/{match[2]}/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in (0, 130, -signal.SIGINT)


def test_a_folder_that_is_missing_is_refused_before_a_port_is_open(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        view._of_folder(tmp_path / "nothing")

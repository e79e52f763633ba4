"""The page of every command: each writes it into its folder, `tensorprobe report` makes it again, and a browser opens it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli import report
from tests.web.conftest import Watched

HEADLINES = {"run": "RUN", "precheck": "PASSED", "audit": "PASSED", "online": "AGREES", "overflow": "FIRST INF"}
"""Kind → what the page says first."""


def make_page(*arguments: object) -> str:
    app = typer.Typer()
    report.register(app)
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def data_of(page: Path) -> dict[str, object]:
    """What a page holds."""
    found: dict[str, object] = json.loads(page.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0])
    return found


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, and the result of each command that checks one or watches a training."""
    place = tmp_path_factory.mktemp("kinds")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    data = torch.randn(4, 8)
    with tensorprobe.capture(place / "run", model=model):
        model(data).sum().backward()
    tensorprobe.precheck(place / "run", out=place / "precheck", jobs=0)
    tensorprobe.audit(place / "run", out=place / "audit", jobs=0)
    with tensorprobe.online(model, out=place / "online"):
        model(data).sum().backward()
    with tensorprobe.overflow(model, out=place / "overflow"):
        (model(data) * 1e38 * 1e38).sum().backward()
    return {kind: place / kind for kind in HEADLINES}


@pytest.mark.parametrize("kind", HEADLINES)
def test_report_makes_the_page_that_the_command_wrote(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    printed = make_page(folders[kind], "--html", tmp_path / "again.html")
    assert printed.startswith(f"Page: {tmp_path / 'again.html'} (")
    made = data_of(tmp_path / "again.html")
    assert made["kind"] == kind
    if kind != "run":
        written = next(folders[kind].rglob("report.html"))  # online: in the folder of its rank
        assert made == data_of(written)


@pytest.mark.parametrize("kind", HEADLINES)
def test_the_page_opens_with_its_answer(
    folders: dict[str, Path], kind: str, tmp_path: Path, watched: Callable[..., Watched]
) -> None:
    make_page(folders[kind], "-o", tmp_path / "page.html")
    page = watched(tmp_path / "page.html").page
    assert page.locator("h1").text_content() == HEADLINES[kind]
    assert page.locator("main section").count() >= 2
    assert page.locator("#selected").count() == 0  # there are no two tensors, and no neighbours


def test_a_page_for_sharing_holds_no_code_and_no_path(compared: Callable[[str], Path], tmp_path: Path) -> None:
    result = compared("fault")
    make_page(result, "--no-source", "--html", tmp_path / "shared.html")
    text = json.dumps(data_of(tmp_path / "shared.html"))
    assert "runs.py" in json.dumps(data_of(result / "report.html"))
    for told in ("runs.py", "train.py", "model(x)", "dim=-1", str(result.parent)):
        assert told not in text, told
    assert "Functional.softmax.1.forward" in text


def test_rows_that_are_left_out_are_said(
    compared: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorprobe.report.page.comparison.MOST_ROWS", 170)
    printed = make_page(compared("fault"), "--html", tmp_path / "page.html")
    assert "170 of 192 rows are in this file. Not in it: 22 agrees. All of them: --full" in printed
    assert "All of them" not in make_page(compared("fault"), "--full", "--html", tmp_path / "page.html")

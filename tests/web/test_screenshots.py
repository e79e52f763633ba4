"""The pictures in the documentation. `make screenshots` (TENSORPROBE_SCREENSHOTS=1) puts them into docs/images."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorprobe
from tests.web.conftest import Watched

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
SHOTS: dict[str, tuple[dict[str, Any], str]] = {
    "page.png": ({}, ""),
    "page-dark.png": ({"color_scheme": "dark"}, "#selected"),
    "page-zh.png": ({"locale": "zh-CN"}, ""),
    "page-ranks.png": ({}, "#execution"),
}
"""Name → how the browser is set, and the part of the page that is at the top."""
SMALL_FILE = 400_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of the comparison in the README, of one step."""
    place = tmp_path_factory.mktemp("demo")
    shutil.copytree(ROOT / "examples", place / "examples")
    program = [sys.executable, "-m", "tensorprobe"]
    for name, fault in (("baseline", []), ("candidate", ["--fault", "softmax-tail"])):
        script = [sys.executable, "examples/train_gpt.py", "--device", "npu", "--steps", "1"]
        command = [*program, "capture", "-o", f"runs/{name}", "--", *program, "sim", *fault, "--", *script]
        subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert tensorprobe.compare("runs/baseline", "runs/candidate", out="result").divergence is not None
    return place / "result"


@pytest.mark.process
@pytest.mark.parametrize("name", SHOTS)
def test_a_picture_of_the_page_is_made(
    name: str, watched: Callable[..., Watched], compared: Callable[[str], Path], trained: Path, tmp_path: Path
) -> None:
    context, part = SHOTS[name]
    result = compared("eight_ranks") if name == "page-ranks.png" else trained
    page = watched(result / "report.html", **context).page
    page.wait_for_selector(".maps canvas, .matrix canvas")
    if result == trained and not context:
        assert "the candidate is wrong" in page.locator(".verdict").inner_text()
        assert "F.softmax(" in page.locator(".source .here").inner_text()
    if part:
        page.evaluate("(selector) => document.querySelector(selector).scrollIntoView()", part)
    folder = IMAGES if os.environ.get("TENSORPROBE_SCREENSHOTS") else tmp_path
    folder.mkdir(exist_ok=True)
    page.screenshot(path=folder / name)
    assert 20_000 < (folder / name).stat().st_size < SMALL_FILE


def test_the_documentation_shows_them() -> None:
    assert {path.name for path in IMAGES.glob("*.png")} == set(SHOTS), "run: make screenshots"
    shown = "".join(path.read_text(encoding="utf-8") for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    assert [name for name in SHOTS if f"images/{name}" not in shown] == []

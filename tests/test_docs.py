"""The documentation is held to the program.

In the pages of `PAGES` every ```python block is run as a script of its own, and every `$ ` line of a ```console
block by bash, or without it where bash would only split it into words, in the order of the page, in one folder with a copy
of examples/. Each must exit with 0, or with the code
that a comment `# exit code 1` behind the command says. The output that is shown must be there, line for line and in its
order; a line `…` stands for any number of lines. Numbers may differ, words may not; the folder is called
/home/you/tensorprobe. A ```toml or ```text block that begins with `# name.suffix` is written to that file. Blocks in another
language are not run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensorprobe.judge import POLICIES
from tensorprobe.model.comparison import COLUMNS, STATUSES
from tensorprobe.model.measured import JUDGED
from tensorprobe.taps.settings import CaptureSettings
from tests import warm

ROOT = Path(__file__).resolve().parents[1]
HABITS = ["docs/trainers.md", "docs/tests-and-ci.md", "docs/notebooks-and-shells.md"]
PAGES = ["README.md", "docs/index.md", "docs/guide.md", *HABITS, "README.zh.md", "docs/zh/guide.md"]
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
HOME = "/home/you/tensorprobe"
TIME_LIMIT_S = 300
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?[0-9][0-9,.e+-]*")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SHELL = re.compile(r"[|&;<>$`*?(]|\\$|^\w+=")
EXIT_CODE = re.compile(r"  # exit code ([0-9]+)$")
FILE_NAME = re.compile(r"# (\w+\.\w+)\n")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def read_blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of a page: language and text."""
    return [(match[1], match[2]) for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))]


def split_console(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block with the output that is shown for it."""
    commands: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def expected_exit(command: str) -> int:
    """The exit code that a command must have."""
    said = EXIT_CODE.search(command)
    return int(said[1]) if said else 0


def find_missing(shown: list[str], printed: list[str]) -> str | None:
    """The first shown line that was not printed at its place; None when all were."""
    at, loose = 0, False
    for line in shown:
        if line == "…":
            loose = True
            continue
        wanted = _comparable(line)
        while loose and at < len(printed) and _comparable(printed[at]) != wanted:
            at += 1
        if at >= len(printed) or _comparable(printed[at]) != wanted:
            return line
        at, loose = at + 1, False
    return None if loose or at == len(printed) else f"(nothing more; but it printed {printed[at]!r})"


def _comparable(line: str) -> str:
    return " ".join(NUMBER.sub("N", line).split())


def run_in(folder: Path, command: list[str], *, exit_code: int = 0) -> str:
    """What a command prints on both channels; it must end as expected."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "",
    }
    done = warm.run(command, cwd=folder, env=environment, stderr=subprocess.STDOUT, timeout_s=TIME_LIMIT_S)
    assert done.returncode == exit_code, f"exit code {done.returncode}: {command[-1]}\n{done.stdout}"
    return done.stdout.replace(str(folder), HOME)


def page_with_its_needs(page: str) -> Any:
    simulated = "tensorprobe sim" in (ROOT / page).read_text(encoding="utf-8")
    return pytest.param(page, marks=pytest.mark.simulated) if simulated else page


@pytest.mark.parametrize("page", [page_with_its_needs(page) for page in PAGES])
def test_the_blocks_of_a_page_do_what_it_says(page: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = 0
    for language, text in read_blocks(page):
        if language == "python":
            commands += 1
            script = tmp_path / f"block{commands}.py"
            script.write_text(text, encoding="utf-8")
            run_in(tmp_path, [sys.executable, "-W", "error", str(script)])
        elif language == "console":
            for command, shown in split_console(text):
                commands += 1
                words = ["bash", "-c", command] if SHELL.search(command) else shlex.split(command, comments=True)
                printed = run_in(tmp_path, words, exit_code=expected_exit(command)).splitlines()
                missing = find_missing(shown, printed)
                assert missing is None, f"$ {command}\nshould print: {missing}\nprints:\n" + "\n".join(printed)
        elif language in ("toml", "text") and (name := FILE_NAME.match(text)):
            (tmp_path / name[1]).write_text(text, encoding="utf-8")
    assert commands >= 4


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        (["a 1", "b"], ["a 2.5", "b"], None),
        (["a", "…", "c"], ["a", "b", "b", "c"], None),
        (["…"], [], None),
        (["a", "c"], ["a", "b", "c"], "c"),
        (["a", "…", "d", "…"], ["a", "b"], "d"),
        (["b", "…", "a", "…"], ["a", "b"], "b"),
        (["a"], ["a", "b"], "(nothing more; but it printed 'b')"),
        (["calls 3"], ["slots 3"], "calls 3"),
    ],
)
def test_shown_output_is_looked_for_in_order(shown: list[str], printed: list[str], missing: str | None) -> None:
    assert find_missing(shown, printed) == missing


@pytest.mark.parametrize(
    ("command", "code"),
    [("tensorprobe compare a b", 0), ("tensorprobe compare a b   # exit code 1", 1), ("echo '# exit code 2' here", 0)],
)
def test_a_command_may_say_its_exit_code(command: str, code: int) -> None:
    assert expected_exit(command) == code


def read_table(page: str, heading: str) -> dict[str, str]:
    """The first two cells of the table under a heading, by the first one without its backticks."""
    section = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    section = re.split(r"^#+ ", section, maxsplit=1, flags=re.MULTILINE)[0]
    cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return {name.strip().strip("`"): text.strip() for name, text in cells}


def test_the_columns_of_a_result_are_in_the_guide_word_for_word() -> None:
    found = list(read_table("docs/guide.md", "### The columns").items())
    assert found == list(COLUMNS.items()), "run: tools/make_tables.py"


def test_every_status_and_every_policy_is_explained_in_the_guide() -> None:
    assert list(read_table("docs/guide.md", "### Reading the answer")) == list(STATUSES)
    assert list(read_table("docs/guide.md", "### Policies")) == list(POLICIES)


def test_the_figures_of_a_rule_are_listed_in_the_guide() -> None:
    section = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").partition("\n### Rules of your own\n")[2]
    listed = section.partition("Figures: ")[2].partition(".\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == set(JUDGED[1:])


def load_generator() -> ModuleType:
    """tools/make_cli_docs.py as a module."""
    spec = importlib.util.spec_from_file_location("make_cli_docs", ROOT / "tools" / "make_cli_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_current() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == load_generator().render(), "run: .venv/bin/python tools/make_cli_docs.py"


def test_every_option_of_every_command_is_in_the_docs_and_no_other() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## tensorprobe ([\w ]+)\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL))
    for command, section in sections.items():
        table = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
        code = "from tensorprobe.cli.main import main; main()"
        done = warm.run(
            [sys.executable, "-c", code, *command.split(), "--help"], env={**os.environ, "TYPER_USE_RICH": "0"}
        )
        assert done.returncode == 0, done.stderr
        listed = re.findall(r"^  (-.*?)(?:  |$)", done.stdout, re.MULTILINE)
        offered = {flag for flags in listed for flag in OPTION.findall(flags)} - {"--help"}
        assert set(OPTION.findall(table)) == offered, command
    assert set(sections) >= {"capture", "compare", "merge", "inspect", "export", "doctor"}


def test_every_setting_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    tables = load_generator().TABLES
    assert list(tables) == ["capture", "compare", "audit", "precheck", "online", "overflow"]
    for about, table in tables.values():
        section = text.partition(f"## Settings of {about}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(table.declared())
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)[`=]", guide + readme))
    assert set(CaptureSettings.declared()) - explained <= {"ring_bytes", "in_process"}  # docs/how-it-works.md has those


@pytest.mark.parametrize("page", sorted({*DOCUMENTS} - {"CHANGELOG.md", "docs/cli.md"}))
def test_prose_is_wrapped(page: str) -> None:
    """Rows of tables and lines of code and output may be longer."""
    text = BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    wide = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "    "))]
    assert wide == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_files_of_the_six_changes_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Six changes")[2].partition("\n## ")[0]
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|h|md))`", text) if "NAME" not in name}
    assert len(named) >= 8
    assert [
        name for name in named if not any((base / name).is_file() for base in (ROOT, ROOT / "src/tensorprobe"))
    ] == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that a page's headings have."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.is_file(), f"{page} links to {link}"
        assert not anchor or anchor in anchors_of(path), f"{page} links to {link}"


@pytest.mark.parametrize("page", ["llms.txt", "SKILL.md"])
def test_what_agents_read_names_every_command_and_option_that_exists(page: str) -> None:
    from typer.main import get_command

    from tensorprobe.cli.main import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    text = (ROOT / page).read_text(encoding="utf-8")
    for line in re.findall(r"`(tensorprobe [^`]+)`", text):
        name = line.split()[1]
        assert name in commands, line
        known = {flag for option in commands[name].params for flag in option.opts} | {"--", "--vs", "--help"}
        ours = line.partition(" -- ")[0].split()[2:]
        assert {word for word in ours if word.startswith("-")} <= known, line
    if page == "llms.txt":
        assert {name for name, each in commands.items() if not each.hidden} <= {
            *re.findall(r"tensorprobe (\w+)", text),
            "merge",
        }

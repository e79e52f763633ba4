"""The pytest plug-in: a fixture that compares what a test computes with a golden run beside the test.

    def test_step(tensorprobe_golden):
        with tensorprobe_golden("gpt-step"):
            train()

The first run writes `goldens/gpt-step.tpz` beside the test file. Later runs compare with it; a failure prints what
`tensorprobe compare` prints and names the page. Until the fixture is used, this imports the standard library and pytest alone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tensorprobe import Probe, Run

FOLDER = "goldens"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_WRITTEN = "tensorprobe wrote"

Golden = Callable[..., "AbstractContextManager[Probe]"]


class GoldenWarning(UserWarning):
    """A golden was made with another torch, device or setting, so it is judged by what rounding explains."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("tensorprobe", "goldens of tensorprobe")
    group.addoption("--tensorprobe-update", action="store_true", help="Write the goldens again.")
    group.addoption(
        "--tensorprobe-report",
        metavar="FOLDER",
        help="Of each golden that fails, write NAME.md, a comment for a pull request, and NAME.html, the page, here.",
    )
    group.addoption(
        "--tensorprobe-strict",
        action="store_true",
        help="Fail where a golden is missing, or was made with another torch, device or setting.",
    )


@pytest.fixture
def tensorprobe_golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Return `golden(name, policy="noise-aware", **settings)`: a context that records, and compares with the golden at its end.

    `settings` are those of `tensorprobe.capture`; `model=` gives modules their names.
    """
    config = request.config
    folder = request.path.parent / FOLDER
    test = f"{_shown(request.path, config)}::{request.node.nodeid.partition('::')[2]}"
    again = f"pytest {shlex.quote(test)} --tensorprobe-update"
    strict, update = config.getoption("--tensorprobe-strict"), config.getoption("--tensorprobe-update")

    @contextmanager
    def golden(name: str, *, policy: str = "noise-aware", **settings: Any) -> Iterator[Probe]:
        import tensorprobe

        if _NAME.fullmatch(name) is None:
            raise ValueError(f"golden {name!r}: use letters, digits, '.', '_' and '-'; it names a file.")
        file = folder / f"{name}.tpz"
        place = tmp_path_factory.mktemp(f"golden-{name}")
        with tensorprobe.capture(place / "run", **settings) as probe:
            yield probe
        run = tensorprobe.open_run(place / "run")
        if update or not file.exists():
            if strict and not update:
                pytest.fail(f"no golden {_shown(file, config)}. Write it, and commit it: {again}", pytrace=False)
            size = _write(run, file, config.rootpath)
            request.node.user_properties.append((_WRITTEN, f"{_shown(file, config)} ({size:,} bytes)"))
        else:
            report = config.getoption("--tensorprobe-report")
            _compare(file, run, place, policy, strict=strict, report=report, again=again)
        shutil.rmtree(place / "run")  # its values; after a failure they stay, beside the page

    return golden


def _shown(path: Path, config: pytest.Config) -> str:
    """Return a path as it is typed where pytest was started."""
    return os.path.relpath(path, config.invocation_params.dir)


def _write(run: Run, file: Path, root: Path) -> int:
    from tensorprobe.record.sealed import seal_run

    if not any(part.coverage.recorded for part in run.parts.values()):
        pytest.fail("nothing was recorded: the block calls no torch function.", pytrace=False)
    file.parent.mkdir(exist_ok=True)
    return seal_run(run, file, root=root)


def _compare(file: Path, run: Run, place: Path, policy: str, *, strict: bool, report: str | None, again: str) -> None:
    import tensorprobe

    golden = tensorprobe.open_run(file)
    if others := _differences(golden, run):
        told = f"golden {file.name} was made with another setting: {'; '.join(others)}"
        if strict:
            threads = "To use as many threads on every machine: torch.set_num_threads(1) in conftest.py.\n"
            advice = threads if any(other.startswith("threads:") for other in others) else ""
            pytest.fail(f"{told}.\n{advice}To write it with these settings: {again}", pytrace=False)
        if policy == "bitwise":
            policy = "noise-aware"
        judged = "what rounding explains" if policy == "noise-aware" else policy
        warnings.warn(GoldenWarning(f"{told}. It is judged by {judged}."), stacklevel=1)
    result = tensorprobe.compare(file, run.path, policy=policy, out=place / "result", prove="off")
    if not result:
        if report is not None:
            folder = Path(report)
            folder.mkdir(parents=True, exist_ok=True)
            result.save(folder / f"{file.stem}.md", "md")
            shutil.copy(place / "result" / "report.html", folder / f"{file.stem}.html")
        pytest.fail(f"golden {file.name}: {result}\nIf this change is intended: {again}", pytrace=False)


def _differences(golden: Run, run: Run) -> list[str]:
    """Return what may change numbers and is not the same: torch, device, packages, switches."""
    from tensorprobe.record.provenance import differences

    def facts(held: Run) -> dict[str, Any]:
        devices = sorted({part.device for part in held.parts.values()})
        about = held.manifest.provenance
        loaded = {name: number for name, number in about.get("packages", {}).items() if _is_imported(name)}
        facts = {"packages": loaded, "switches": about.get("switches", {})}
        return {"torch": held.manifest.torch, "device": ", ".join(devices), **facts}

    return differences(facts(golden), facts(run))


def _is_imported(package: str) -> bool:
    """Return whether the tests have imported a package: another version of one that is only installed changes no number."""
    return bool({package.replace("-", "_"), package.removesuffix("-core")} & sys.modules.keys())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which goldens were written, also by the processes of xdist."""
    for report in terminalreporter.getreports(""):
        for name, text in report.user_properties if report.when == "teardown" else ():
            if name == _WRITTEN:
                terminalreporter.write_line(f"tensorprobe: wrote {text}. Commit it.")

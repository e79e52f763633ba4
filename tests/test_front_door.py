"""The public functions: real signatures that say the same as the tables of settings, help that reads well, `python -m`."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorprobe
from tensorprobe.checks.settings import AuditSettings, PrecheckSettings
from tensorprobe.engine.settings import CompareSettings
from tensorprobe.errors import SettingsError, UnknownSetting
from tensorprobe.settings import Settings
from tensorprobe.taps.settings import CaptureSettings
from tensorprobe.watches.online.settings import OnlineSettings
from tensorprobe.watches.overflow import OverflowResult, OverflowWatch
from tensorprobe.watches.overflow.settings import OverflowSettings
from tests.e2e.programs import Program

FUNCTIONS: dict[str, tuple[type[Settings], set[str]]] = {
    "capture": (CaptureSettings, {"out", "model", "overwrite", "steps_by"}),
    "compare": (CompareSettings, {"baseline", "candidate", "out", "keep_rows", "progress"}),
    "audit": (AuditSettings, {"run", "out", "resume", "progress"}),
    "precheck": (PrecheckSettings, {"run", "out", "resume", "progress"}),
    "online": (OnlineSettings, {"model"}),
    "overflow": (OverflowSettings, {"target"}),
}
"""Function → its table of settings, and the arguments that are no settings."""


@pytest.fixture(params=FUNCTIONS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def function_of(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(tensorprobe, name)
    return found


def test_it_is_a_function_whose_signature_is_the_table_of_settings(name: str) -> None:
    table, others = FUNCTIONS[name]
    assert inspect.isfunction(function_of(name))
    parameters = inspect.signature(function_of(name)).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    settings = {key: parameter.default for key, parameter in parameters.items() if key not in others}
    assert settings == {key: declared.default for key, declared in table.declared().items()}
    assert others <= set(parameters)
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())


def test_help_explains_every_argument(name: str) -> None:
    function = function_of(name)
    page = pydoc.plain(pydoc.render_doc(function))
    explained = (function.__doc__ or "").partition("Args:")[2]
    for parameter in inspect.signature(function).parameters:
        assert f"{parameter}:" in explained or f"{parameter}," in explained, parameter
    assert "overwrite" not in inspect.signature(function).parameters or "overwrite: bool = False" in " ".join(
        page.split()
    )


def test_an_unknown_setting_is_an_error_with_the_nearest_name(name: str) -> None:
    with pytest.raises(UnknownSetting, match=r"unknown setting 'stepz'\. Did you mean 'steps'\?"):
        function_of(name)(stepz=1)


def test_importing_a_room_does_not_change_what_a_name_means() -> None:
    code = (
        "import tensorprobe, tensorprobe.taps.probe, tensorprobe.engine.comparison, tensorprobe.watches.overflow.watch, "
        "tensorprobe.watches.online.watch, tensorprobe.checks.runner, inspect; "
        f"assert all(inspect.isfunction(getattr(tensorprobe, name)) for name in {list(FUNCTIONS)})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_overflow_takes_a_run_or_watches(tmp_path: Path) -> None:
    run = Program().record(tmp_path / "run")
    found = tensorprobe.overflow(run)
    assert isinstance(found, OverflowResult) and found.exit_code == 0
    assert isinstance(tensorprobe.overflow(str(run), steps=0), OverflowResult)
    assert tensorprobe.overflow(tensorprobe.open_run(run)).to_dict() == found.to_dict()
    assert isinstance(tensorprobe.overflow(), OverflowWatch)
    with pytest.raises(SettingsError, match="stop_after applies only to a running program"):
        tensorprobe.overflow(run, stop_after=1)  # type: ignore[call-overload]


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensorprobe", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tensorprobe {tensorprobe.__version__}\n"

"""The program `msprobe`: old and new spellings of its commands, their files, their exit codes, and what wrong words give."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorprobe.errors import NotFound, RunNotFound, SettingsError, UnknownSetting
from tensorprobe.legacy.msprobe import cli, cli_checks
from tensorprobe.legacy.msprobe.cli import run
from tests.builders.msprobe import conv_net, write_conv_net, write_dump
from tests.compat.reading import read_csv

NPU, BENCH = "npu/step0/proc77/dump.json", "bench/step0/proc77/dump.json"


@pytest.fixture(autouse=True)
def dumps(fresh: None) -> None:
    """The dumps of two sides, the NPU's with an error, and a compare.json that names them."""
    for side, error in (("npu", 0.5), ("bench", 0.0)):
        write_conv_net(Path(side), error=error)
    Path("compare.json").write_text(json.dumps({"npu_path": NPU, "bench_path": BENCH}))


def test_a_fresh_process_shows_its_commands_without_torch_and_numpy() -> None:
    code = (
        "import sys, runpy; sys.argv = ['msprobe', '--help']\n"
        "try: runpy.run_module('msprobe', run_name='__main__')\n"
        "finally: sys.stderr.write(' '.join({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert all(command in done.stdout for command in ("compare", "run_ut", "acc_check", "parse"))


def test_compare_of_the_older_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-f", "pytorch", "compare", "-i", "compare.json", "-o", "out"]) == 1
    (table,) = capsys.readouterr().out.splitlines()
    assert table.startswith("out/compare_result_") and "NPU_Stack_Info" not in read_csv(table)[0]
    assert len([*Path("out").glob("advisor_*.txt")]) == 1


def test_compare_with_its_switches(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"npu_path": NPU, "bench_path": NPU, "stack_path": "npu/step0/proc77/stack.json"}
    Path("compare.json").write_text(json.dumps(given))
    assert run(["--framework=pytorch", "compare", "-i", "compare.json", "-o", "out", "-s", "-f", "-c"]) == 0
    (table,) = capsys.readouterr().out.splitlines()
    assert "NPU_Stack_Info" in read_csv(table)[0]
    assert [*Path("out").glob("advisor_*.txt")] == []
    with pytest.raises(SettingsError, match="please turn on the stack_mode"):
        run(["compare", "-i", "compare.json"])


def test_compare_of_the_newer_spelling_has_stacks_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "-tp", NPU, "-gp", BENCH, "-o", "out"]) == 1
    assert "NPU_Stack_Info" in read_csv(capsys.readouterr().out.strip())[0]
    Path("npu/step0/proc77/stack.json").unlink()
    assert run(["compare", "--target_path", "npu", "--golden_path", "bench", "-fm", "-da", "--xlsx"]) == 1
    table = Path(capsys.readouterr().out.strip())
    assert (table.parent, table.suffix) == (Path("output"), ".xlsx")


def test_folders_of_ranks_give_a_table_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    data, _, _ = conv_net()
    for side in ("target", "golden"):
        for rank in (0, 1):
            write_dump(Path(side, f"step0/rank{rank}"), data, task="statistics")
    assert run(["compare", "-tp", "target/step0", "-gp", "golden/step0", "-o", "out"]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert [name[:27] for name in names] == ["compare_result_rank0-rank0_", "compare_result_rank1-rank1_"]
    Path("compare.json").write_text(json.dumps({"npu_path": "target", "bench_path": "golden", "stack_path": NPU}))
    with pytest.raises(SettingsError, match="is of one rank, and the dumps have several"):
        run(["compare", "-i", "compare.json", "-s"])


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["compre"], SettingsError, "no command 'compre'. Did you mean 'compare'"),
        (["-x", "compare"], SettingsError, "msprobe has no option '-x'"),
        (["-f", "mindspore", "compare"], SettingsError, "only pytorch is here"),
        (["-f", "pytorhc", "compare"], SettingsError, "Did you mean 'pytorch'"),
        (["merge_result", "-i", "x"], SettingsError, "is not part of tensorprobe: tensorprobe compare"),
        (["compare", "--gp", "x"], UnknownSetting, "no option '--gp'. Did you mean '-gp'"),
        (["compare", "-fuzzy"], UnknownSetting, "no option '-fuzzy'"),
        (["compare", "-o"], SettingsError, "expected one argument"),
        (["compare", "stray", "-tp", "x", "-gp", "y"], SettingsError, "unrecognized arguments: stray"),
        (["compare", "-tp", "x"], SettingsError, "-gp is missing"),
        (["compare", "-i", "compare.json", "-tp", "x"], SettingsError, "leave out -tp and -gp, or -i"),
        (["compare", "-i", "nowhere.json"], SettingsError, "'nowhere.json' cannot be read: No such file"),
        (["compare", "-i", "no.json"], SettingsError, "'no.json' is no JSON: .*line 2 column 1"),
        (["compare", "-i", "typo.json"], UnknownSetting, "'typo.json', line 3: .*Did you mean 'bench_path'"),
        (["compare", "-tp", "nowhere", "-gp", BENCH], RunNotFound, "nowhere"),
        (["run_ut"], SettingsError, "arguments are required: -api_info"),
        (["multi_run_ut", "-api_info", NPU, "-n", "0"], SettingsError, "-n is 0; .* from 1 to 64"),
        (["run_ut", "-api_info", NPU, "-csv_path", "x.csv"], SettingsError, "names no check that was stopped"),
        (["run_overflow_check", "-api_infos", NPU], UnknownSetting, "Did you mean '-api_info'"),
        (["overflow_check"], SettingsError, "either -i FOLDER or -api_info FILE"),
        (["parse"], SettingsError, "tensorprobe inspect DUMP"),
    ],
)
def test_wrong_words_are_told_in_one_sentence(words: list[str], error: type[Exception], says: str) -> None:
    Path("no.json").write_text("{\n")
    Path("typo.json").write_text('{\n"npu_path": "x",\n"bench_paht": "y"}')
    with pytest.raises(error, match=says):
        run(words)


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (lambda _: 1, 1, ""),
        (SettingsError("wrong"), 2, "SettingsError: wrong"),
        (ValueError("odd"), 3, "This is a bug of"),
    ],
)
def test_exit_codes(
    found: Any, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(_: Any) -> int:
        if isinstance(found, Exception):
            raise found
        return int(found(_))

    monkeypatch.setattr(cli, "run", fake)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert said in capsys.readouterr().err


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "msprobe COMMAND --help" in capsys.readouterr().err
    assert run(["--version"]) == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `precheck` was asked for; it runs the calls in this process."""
    calls: list[dict[str, Any]] = []
    real: Callable[..., Any] = cli_checks.precheck

    def here(run: Any, **given: Any) -> Any:
        calls.append(given)
        # By the rule of 2023 every result in bfloat16 fails: its roundings are coarser than a thousandth.
        standard = "binary" if "failing" in str(run.path) else given["standard"]
        return real(run, **{**given, "jobs": 0, "standard": standard})

    monkeypatch.setattr(cli_checks, "precheck", here)
    return calls


def test_run_ut_writes_two_tables(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-f", "pytorch", "run_ut", "-api_info", NPU, "-o", "ut", "-j", "-d", "0"]) == 0
    names = sorted(path.name for path in Path("ut").iterdir())
    assert [name[:26] for name in names] == ["accuracy_checking_details_", "accuracy_checking_result_2"]
    rows = read_csv(Path("ut", names[1]))
    assert [row["API name"] for row in rows] == [
        "Functional.conv2d.0",
        "Tensor.__gt__.0",
        "Tensor.masked_fill.0",
        "Torch.max.0",
    ]
    assert {row["Forward Test Success"] for row in rows} == {"True"}
    assert asked[0]["data"] == "real" and asked[0]["dedupe"] is False and asked[0]["jobs"] == 1
    assert "PASSED" in capsys.readouterr().out


def test_a_failing_api_is_saved_and_fails_the_command(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.linspace(-3, 3, 4096)  # the standard asks for more than float32 gives
    entry = {"input_args": [x], "input_kwargs": {}, "output": [x.exp()]}
    write_dump(Path("failing"), {f"Torch.{op}.0.forward": entry for op in ("exp", "sin")})
    Path("config.json").write_text('{"task": "run_ut", "run_ut": {"white_list": ["exp"], "error_data_path": "saved"}}')
    words = ["-api_info", "failing/dump.json", "-config", "config.json", "-save_error_data", "-f", "-n", "2"]
    assert run(["multi_acc_check", *words]) == 1
    assert asked[0]["calls"] == ["Torch.exp.*"] and asked[0]["jobs"] == 2 and asked[0]["dedupe"] is True
    (script,) = Path("saved").glob("ut_error_data*/Torch.exp.0.forward.py")
    assert f"python {script}" in capsys.readouterr().out
    (table,) = Path().glob("accuracy_checking_result_*.csv")
    assert [(row["API name"], row["Forward Test Success"]) for row in read_csv(table)] == [("Torch.exp.0", "False")]


def test_the_lists_of_a_config_choose_the_apis(asked: list[dict[str, Any]]) -> None:
    Path("config.json").write_text('{"run_ut": {"black_list": ["conv2d", "Torch.max"]}}')
    assert run(["acc_check", "-api_info", BENCH, "-config", "config.json"]) == 0
    assert asked[0]["calls"] == ["Tensor.__gt__.*", "Tensor.masked_fill.*"]
    Path("config.json").write_text('{"run_ut": {"white_list": ["conv3d"]}}')
    with pytest.raises(NotFound, match=r"no API 'conv3d'.*Nearest: conv2d"):
        run(["run_ut", "-api_info", BENCH, "-config", "config.json"])
    Path("config.json").write_text('{"run_ut": {"white_list": ["a"], "black_list": ["b"]}}')
    with pytest.raises(SettingsError, match="both a white_list and a black_list"):
        run(["run_ut", "-api_info", BENCH, "-config", "config.json"])


def test_a_check_that_was_stopped_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real: Callable[..., Any] = cli_checks.precheck

    def stopped(run: Any, **given: Any) -> Any:
        def stop(done: int, total: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

        return real(run, **{**given, "jobs": 0}, progress=stop)

    monkeypatch.setattr(cli_checks, "precheck", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(["run_ut", "-api_info", BENCH, "-o", "ut"])
    table = caplog.text.partition("-csv_path ")[2].split()[0]
    assert not Path(table).exists()
    monkeypatch.setattr(cli_checks, "precheck", lambda run, **given: real(run, **{**given, "jobs": 0}))
    assert run(["run_ut", "-api_info", BENCH, "-csv_path", table]) == 0
    assert len(read_csv(table)) == 4
    assert [path.name for path in Path("ut").iterdir() if path.name.startswith(".")] == []


def test_parse_writes_the_tensors_of_a_dump(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parse", "-d", "npu", "-t", "npy", "-o", "arrays"]) == 0
    assert "arrays: 26 tensors" in capsys.readouterr().out
    name = "Functional.conv2d.0.forward.output.0"
    assert np.load(f"arrays/step0/rank0/{name}.npy").ravel().tolist() == [5.5, 7.5, 9.5, 11.5]
    assert run(["parse", "-d", NPU, "-o", "tensors"]) == 0
    held = torch.load(f"tensors/step0/rank0/{name}.pt", weights_only=True)
    assert held.flatten().tolist() == [5.5, 7.5, 9.5, 11.5]


def test_parse_turns_one_file_into_the_other_form() -> None:
    torch.save(torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "a.pt")
    assert run(["parse", "-d", "a.pt", "-t", "npy", "-o", "one"]) == 0
    assert np.load("one/a.npy").tolist() == [1.5, 2.0]
    assert run(["parse", "-d", "one/a.npy", "-o", "back"]) == 0
    assert torch.load("back/a.pt", weights_only=True).dtype == torch.float32
    with pytest.raises(SettingsError, match="nothing is overwritten"):
        run(["parse", "-d", "a.pt", "-t", "npy", "-o", "one"])
    Path("bad.npy").write_bytes(b"no array")
    with pytest.raises(SettingsError, match=r"'bad\.npy' cannot be read"):
        run(["parse", "-d", "bad.npy"])

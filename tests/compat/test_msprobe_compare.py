"""`msprobe.pytorch.compare`: the tables of msprobe from dumps of every generation, and from runs in other layouts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
import torch

from msprobe.pytorch import compare, compare_distributed
from tensorprobe.errors import CannotCompare, NothingPaired, RunDamaged, SettingsError, UnknownSetting
from tensorprobe.legacy.compared import comparing
from tensorprobe.legacy.msprobe.tables import DIGEST_COLUMNS, STATISTICS_COLUMNS, TENSOR_COLUMNS
from tests.builders import runs as made_runs
from tests.builders.msprobe import STACKS, conv_net, write_conv_net, write_dump
from tests.builders.ptdbg import tensor, write_rank
from tests.compat.reading import read_csv

Rows = list[dict[str, str]]
VERDICT, RESULT, MESSAGE = "Accuracy Reached or Not", "Result", "Err_message"
CONV = "Functional.conv2d.0.forward"
GREATER = "Tensor.__gt__.0.forward"
X = np.linspace(-1, 2, 24, dtype=np.float32).reshape(4, 6)


def write_sides(root: Path = Path("dumps"), *, error: float = 0.5, **more: Any) -> dict[str, Any]:
    """Two dumps of a net, the NPU's with an error in its convolution, as the dict that `compare` takes."""
    for side, wrong in (("npu", error), ("bench", 0.0)):
        write_conv_net(root / side, error=wrong, **more)
    return {f"{side}_json_path": str(root / side / "step0/proc77/dump.json") for side in ("npu", "bench")}


def compared(param: dict[str, Any], output: str = "output", **more: Any) -> Rows:
    return read_csv(compare(param, output, **more))


def row_of(rows: Rows, name: str) -> dict[str, str]:
    (row,) = [row for row in rows if name in (row["NPU Name"], row["Bench Name"])]
    return row


def advice(output: str = "output") -> str:
    (file,) = Path(output).glob("advisor_*.txt")
    return file.read_text(encoding="utf-8")


def dump_of(folder: str, **calls: dict[str, torch.Tensor]) -> str:
    """A dump of calls with one input and one output each."""
    data = {
        f"Torch.{name}.0.forward": {"input_args": [held["x"]], "input_kwargs": {}, "output": [held["y"]]}
        for name, held in calls.items()
    }
    return str(write_dump(Path(folder), data) / "dump.json")


def pair_of(npu: dict[str, Any], bench: dict[str, Any], **more: Any) -> Rows:
    return compared({"npu_path": dump_of("npu", **npu), "bench_path": dump_of("bench", **bench)}, **more)


def test_the_function_is_found_whatever_was_imported_before_it() -> None:
    code = (
        "import sys, msprobe.pytorch.compare\n"
        "from msprobe.pytorch import compare, compare_distributed\n"
        "print(compare.__name__, compare_distributed.__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "compare compare_distributed False\n"


def test_the_table_with_values_has_the_columns_and_the_figures() -> None:
    rows = compared(write_sides())
    assert tuple(rows[0]) == (*TENSOR_COLUMNS, "Data_name")
    row = row_of(rows, f"{CONV}.output.0")
    ours, theirs = np.array([5.5, 7.5, 9.5, 11.5]), np.array([5.0, 7.0, 9.0, 11.0])
    cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
    expected = {"Cosine": cosine, "EucDist": 1.0, "MaxAbsErr": 0.5, "MaxRelativeErr": 0.1}
    expected |= {"NPU max": 11.5, "NPU min": 5.5, "NPU mean": 8.5, "NPU l2norm": np.linalg.norm(ours)}
    expected |= {"Bench max": 11, "Bench min": 5, "Bench mean": 8, "Bench l2norm": np.linalg.norm(theirs)}
    expected |= {"One Thousandth Err Ratio": 0.0, "Five Thousandths Err Ratio": 0.0}
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-6)
    assert row["NPU Dtype"] == row["Bench Dtype"] == "torch.float32"
    assert row["NPU Tensor Shape"] == "[1, 1, 2, 2]"
    assert row["Data_name"] == f"['{CONV}.output.0.pt', '{CONV}.output.0.pt']"


def test_rows_are_named_as_msprobe_names_them() -> None:
    rows = compared(write_sides(error=0))
    names = [row["NPU Name"] for row in rows if row["NPU Dtype"].startswith("torch.")]
    data, _, _ = conv_net()
    expected = []
    for call, entry in data.items():
        for key, held in entry.items():
            if isinstance(held, dict):
                expected += [f"{call}.{'' if 'grad' in call else f'{key}.'}{name}" for name in held]
            else:
                side = "input" if key == "input_args" else key
                tensors = [at for at, value in enumerate(held) if isinstance(value, torch.Tensor)]
                single = "parameters_grad" in call
                expected += [f"{call}.{side}" if single else f"{call}.{side}.{at}" for at in tensors]
    wanted = {name for name in expected if not name.endswith((".dim", ".keepdim"))}
    assert {*names} == wanted
    assert "Module.conv.Conv2d.parameters_grad.0.weight" in names
    assert "Module.conv.Conv2d.forward.0.parameters.bias" in names


def test_numbers_among_the_arguments_have_rows() -> None:
    rows = compared(write_sides(error=0))
    numbers = {row["NPU Name"]: row for row in rows if not row["NPU Dtype"].startswith("torch.")}
    assert {f"{CONV}.input.5.0", f"{CONV}.input.6", "Torch.max.0.forward.input.keepdim"} <= {*numbers}
    row = numbers[f"{CONV}.input.6"]
    assert (row["NPU Dtype"], row["NPU Tensor Shape"], row["NPU max"], row["Bench l2norm"]) == (
        "<class 'int'>",
        "[]",
        "1",
        "1",
    )
    assert row[VERDICT] == "Yes" and row["Cosine"] == "N/A"
    places = [row["NPU Name"] for row in rows]
    assert places.index(f"{CONV}.input.2") < places.index(f"{CONV}.input.6") < places.index(f"{CONV}.output.0")


def test_a_digest_that_the_published_tool_took_too_late_is_no_difference() -> None:
    param = write_sides(error=0, task="statistics", md5=True)
    for side, changes in (("npu_json_path", {"tool": "tensorprobe"}), ("bench_json_path", {})):
        dump = json.loads(Path(param[side]).read_text()) | changes
        if not changes:
            dump["data"][CONV]["output"][0]["md5"] = "00000000"
        Path(param[side]).write_text(json.dumps(dump))
    row = row_of(compared(param), f"{CONV}.output.0")
    assert row[RESULT] == "N/A" and "takes the digest after later writes" in row[MESSAGE]


def test_the_first_row_that_fails_is_advised_on(caplog: pytest.LogCaptureFixture) -> None:
    rows = compared(write_sides())
    failing = [at for at, row in enumerate(rows) if row[VERDICT] == "No"]
    assert rows[failing[0]]["NPU Name"] == f"{GREATER}.output.0"
    assert advice().startswith(f"Line: {failing[0] + 2}\nSuspect Nodes: {GREATER}.output.0\nExpert Advice: The inputs")
    assert f"line {failing[0] + 2}: {GREATER}.output.0" in caplog.text


def test_the_rule_is_that_of_2024() -> None:
    base = torch.from_numpy(X)
    tilted = base.clone()
    tilted[0, 0] += 0.3
    bench = {name: {"x": base, "y": base} for name in "abc"} | {"d": {"x": base * 1e-4, "y": base}}
    npu = {
        "a": {"x": base, "y": tilted},  # cosine above 0.99, error of 0.3
        "b": {"x": base, "y": base + 1.5},  # greatest error above 1
        "c": {"x": base, "y": base * 1.4},  # blind to scale: the log says so
        "d": {"x": -base * 1e-4, "y": base},  # opposite, if ever so small
    }
    rows = pair_of(npu, bench)
    assert [row[VERDICT] for row in rows] == ["Yes", "Yes", "Yes", "No", "Yes", "Yes", "No", "Yes"]


def test_identical_dumps_pass_in_each_form(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name, more, column, good in (
        ("a", {}, VERDICT, "Yes"),
        ("b", {"task": "statistics"}, RESULT, "pass"),
        ("c", {"task": "statistics", "md5": True}, RESULT, "pass"),
    ):
        rows = compared(write_sides(Path(name), error=0, **more), name)
        # What is nothing but infinities, alike on both sides, was not measured and is not called well.
        unmeasured = {row["NPU Name"] for row in rows if row[column] == "N/A"}
        assert unmeasured <= {"Tensor.masked_fill.0.forward.output.0"}
        assert {row[column] for row in rows if row["NPU Name"] not in unmeasured} == {good}
        assert advice(name).startswith("Line: NA\nSuspect Nodes: NA")
    assert caplog.text.count("AGREES") == 3


def test_statistics_have_their_own_table() -> None:
    rows = compared(write_sides(task="statistics"))
    assert tuple(rows[0]) == STATISTICS_COLUMNS
    row = row_of(rows, f"{CONV}.output.0")
    assert [float(row[name]) for name in ("Max diff", "Min diff", "Mean diff")] == [0.5, 0.5, 0.5]
    assert row["MaxRelativeErr"] == "4.54545454545%" and row["MeanRelativeErr"] == "6.25%"
    assert row[RESULT] == "error" and "introduced by this call" in row[MESSAGE]
    later = row_of(rows, "Module.conv.Conv2d.forward.0.output.0")
    assert later[RESULT] == "warning" and "inherited" in later[MESSAGE]
    same = row_of(rows, f"{CONV}.input.0")
    assert (same["Max diff"], same["MaxRelativeErr"], same[RESULT]) == ("0.0", "0%", "pass")
    infinite = row_of(rows, "Torch.max.0.forward.input.0")
    assert (infinite["Min diff"], infinite["NPU min"]) == ("0.0", "-inf")
    line = rows.index(row) + 2
    assert advice().startswith(f"Line: {line}\nSuspect Nodes: {CONV}.output.0")


def test_digests_have_their_own_table() -> None:
    rows = compared(write_sides(task="statistics", md5=True))
    assert tuple(rows[0]) == DIGEST_COLUMNS
    assert row_of(rows, f"{CONV}.input.0")[RESULT] == "pass"
    row = row_of(rows, f"{CONV}.output.0")
    assert row[RESULT] == "Different" and len({row["NPU MD5"], row["BENCH MD5"]}) == 2
    assert all(len(row[name]) == 8 for name in ("NPU MD5", "BENCH MD5"))


def test_a_digest_on_one_side_only_is_no_agreement() -> None:
    param = write_sides(error=0, task="statistics", md5=True)
    path = Path(param["npu_json_path"])
    dump = json.loads(path.read_text())
    del dump["data"][CONV]["output"][0]["md5"]
    path.write_text(json.dumps(dump))
    row = row_of(compared(param), f"{CONV}.output.0")
    assert (row[RESULT], row["NPU MD5"]) == ("N/A", "N/A")
    assert row[MESSAGE].startswith("no digests of one kind on both sides")


def test_values_on_one_side_only_are_compared_by_statistics(caplog: pytest.LogCaptureFixture) -> None:
    write_conv_net(Path("npu"), error=0.5)
    write_conv_net(Path("bench"), task="statistics")
    rows = compared({"npu_path": "npu", "bench_path": "bench"})
    assert tuple(rows[0]) == STATISTICS_COLUMNS
    assert row_of(rows, f"{CONV}.output.0")[RESULT] == "error"
    assert "the NPU dump has values, the bench dump has not" in caplog.text


def test_a_nan_shows_in_the_statistics() -> None:
    hole = torch.tensor([1.0, float("nan")])
    rows = pair_of({"a": {"x": hole, "y": hole}}, {"a": {"x": torch.ones(2), "y": torch.ones(2)}})
    assert (rows[0]["NPU max"], rows[0]["Bench max"], rows[0][VERDICT]) == ("nan", "1.0", "No")
    assert rows[0]["EucDist"] == "N/A"


def test_a_nan_on_both_sides_hides_the_statistics_and_never_passes() -> None:
    """Statistics of msprobe are all NaN then: the other elements may differ by anything."""
    param = write_sides(error=0.5, task="statistics")
    for path in (param["npu_json_path"], param["bench_json_path"]):
        dump = json.loads(Path(path).read_text())
        dump["data"][CONV]["output"][0] |= dict.fromkeys(("Max", "Min", "Mean", "Norm"), "NaN")
        Path(path).write_text(json.dumps(dump))
    row = row_of(compared(param), f"{CONV}.output.0")
    assert (row[RESULT], row["NPU max"], row["Max diff"]) == ("N/A", "nan", "N/A")
    assert row[MESSAGE].startswith("not measured: a NaN on both sides")


def test_a_bench_of_zeros_has_a_distance() -> None:
    three_four = torch.tensor([3.0, 4.0])
    rows = pair_of({"a": {"x": three_four, "y": three_four}}, {"a": {"x": torch.zeros(2), "y": three_four}})
    assert (float(rows[0]["EucDist"]), float(rows[1]["EucDist"])) == (5.0, 0.0)


def test_a_call_without_a_partner_never_passes() -> None:
    base = {"x": torch.ones(3), "y": torch.ones(3)}
    for npu, bench, who in (
        ({"a": base, "b": base}, {"a": base}, "bench"),
        ({"a": base}, {"a": base, "b": base}, "NPU"),
    ):
        rows = pair_of(npu, bench, output=who)
        assert [row[VERDICT] for row in rows] == ["Yes", "Yes", "Unmatched", "Unmatched"]
        assert {row[MESSAGE] for row in rows[2:]} == {f"no partner in the {who} dump"}
        assert "not everything was compared: 2 rows are Unmatched" in advice(who)


def test_other_shapes_are_unmatched() -> None:
    rows = pair_of({"a": {"x": torch.ones(3), "y": torch.ones(2)}}, {"a": {"x": torch.ones(3), "y": torch.ones(3)}})
    assert [row[VERDICT] for row in rows] == ["Yes", "Unmatched"]
    assert rows[1][MESSAGE] == "shapes differ: [2] on the NPU, [3] on the bench"


def test_an_argument_that_differs_is_said_in_the_first_row_of_its_call() -> None:
    for side, dim in (("npu", 1), ("bench", 0)):
        entry = {"input_args": [torch.ones(2, 2)], "input_kwargs": {"dim": dim}, "output": [torch.ones(2) * 2]}
        write_dump(Path(side), {"Torch.sum.0.forward": entry})
    rows = compared({"npu_path": "npu/dump.json", "bench_path": "bench/dump.json"})
    assert "kwarg dim: 0 → 1 (baseline: bench, candidate: NPU)" in rows[0][MESSAGE]
    assert [row[VERDICT] for row in rows] == ["Yes", "N/A", "Yes"] and rows[2][MESSAGE] == ""
    assert rows[1]["NPU Name"] == "Torch.sum.0.forward.input.dim" and rows[1][MESSAGE] == "1 on the NPU, 0 on the bench"


def test_fuzzy_match_pairs_calls_with_other_numbers() -> None:
    entry = {"input_args": [torch.ones(3)], "input_kwargs": {}, "output": [torch.ones(3)]}
    for side, number in (("npu", 7), ("bench", 0)):
        write_dump(Path(side), {f"Torch.relu.{number}.forward": entry})
    rows = compared({"npu_path": "npu/dump.json", "bench_path": "bench/dump.json"}, fuzzy_match=True)
    assert [row["Bench Name"] for row in rows] == ["Torch.relu.0.forward.input.0", "Torch.relu.0.forward.output.0"]
    assert {row[VERDICT] for row in rows} == {"Yes"}


def test_another_step_and_rank_can_be_the_partner(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data, _, _ = conv_net()
    paths = [write_dump(Path(place), data) / "dump.json" for place in ("npu/step3/rank1", "bench/step0/rank0")]
    rows = compared({"npu_path": paths[0], "bench_path": paths[1]})
    assert row_of(rows, f"{CONV}.output.0")[VERDICT] == "Yes"
    assert "step 3 of the candidate is compared with step 0 of the baseline" in caplog.text


def test_a_workbook_has_the_same_cells() -> None:
    param = write_sides()
    path = compare(param, "output", xlsx=True)
    assert path.suffix == ".xlsx"
    sheet = list(openpyxl.load_workbook(path).active.iter_rows(values_only=True))
    rows = compared(param)
    assert sheet[0] == tuple(rows[0])
    assert [str(line[0]) for line in sheet[1:]] == [row["NPU Name"] for row in rows]
    at = sheet[0].index("MaxAbsErr")
    (line,) = [line for line in sheet if line[0] == f"{CONV}.output.0"]
    assert isinstance(line[at], float | int) and line[at] == 0.5


def test_without_xlsxwriter_it_is_said_before_anything_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(SettingsError, match=r"pip install 'tensorprobe\[xlsx\]'"):
        compare({"npu_path": "nowhere", "bench_path": "nowhere"}, "output", xlsx=True)


OLD_STACKS = {name: lines for names, lines in STACKS.values() for name in names}
"""As versions up to 1.2.2 wrote them."""


@pytest.mark.parametrize("stacks", [STACKS, OLD_STACKS], ids=["shared", "by name"])
def test_stacks_are_a_column_wherever_their_file_is(stacks: Any) -> None:
    param = write_sides()
    Path(param["npu_json_path"]).with_name("stack.json").write_text(json.dumps(stacks))
    Path("elsewhere.json").write_text(json.dumps(stacks))
    beside = compared(param, stack_mode=True)
    named = compared({**param, "stack_json_path": "elsewhere.json"}, stack_mode=True)
    assert list(beside[0])[-2:] == ["NPU_Stack_Info", "Data_name"]
    texts = [row["NPU_Stack_Info"] for row in named]
    assert [row["NPU_Stack_Info"] for row in beside] == texts
    text = row_of(named, f"{GREATER}.output.0")["NPU_Stack_Info"]
    assert text.startswith("/home/you/net.py:10 in forward: ") and " <- /home/you/net.py:17" in text
    assert texts[-1] == "N/A"


def test_a_stack_json_that_is_not_to_be_shown_is_told_of() -> None:
    param = {**write_sides(), "stack_json_path": "dumps/npu/step0/proc77/stack.json"}
    words = "The current file contains stack information, please turn on the stack_mode"
    with pytest.raises(SettingsError, match=words):
        compare(param, "output")
    assert not Path("output").exists()


def test_stacks_that_are_not_there_are_told_of() -> None:
    param = write_sides()
    Path("dumps/npu/step0/proc77/stack.json").unlink()
    with pytest.raises(SettingsError, match=r"please turn off the stack_mode.\n.*no stack.json beside"):
        compare(param, "output", stack_mode=True)
    Path("broken.json").write_text('{"0": ')
    with pytest.raises(RunDamaged, match=r"broken\.json"):
        compare({**param, "stack_path": "broken.json"}, "output", stack_mode=True)


def test_npy_files_and_bare_infinities_are_read() -> None:
    data, _, _ = conv_net(error=0.5)
    npu = write_dump(Path("npu"), data, form=".npy")
    param = write_sides()
    rows = compared({"npu_path": npu / "dump.json", "bench_path": param["bench_json_path"]})
    assert "-Infinity" in (npu / "dump.json").read_text()
    assert row_of(rows, f"{CONV}.output.0")["Data_name"].startswith(f"['{CONV}.output.0.npy'")
    assert float(row_of(rows, f"{CONV}.output.0")["MaxAbsErr"]) == 0.5


def test_a_moved_dump_has_its_values_beside_it() -> None:
    param = write_sides()
    Path("dumps").rename("moved")
    rows = compared({key: path.replace("dumps", "moved") for key, path in param.items()})
    assert float(row_of(rows, f"{CONV}.output.0")["MaxAbsErr"]) == 0.5


def test_runs_in_other_layouts_are_taken_on_either_side() -> None:
    entry = {"input_args": [torch.from_numpy(X)], "input_kwargs": {}, "output": [torch.from_numpy(X + 1)]}
    sides = {
        "native": made_runs.write(
            Path("native"), [made_runs.call("Functional.relu.0.forward", inputs=[X], outputs=[-X])]
        ),
        "ptdbg": write_rank(
            Path("ptdbg"),
            [tensor("Functional_relu_0_forward_input.0", X), tensor("Functional_relu_0_forward_output", X + 1)],
            name="dump",
        ),
        "msprobe": write_dump(Path("msprobe"), {"Functional.relu.0.forward": entry}) / "dump.json",
    }
    for npu, bench, expected in (
        ("native", "msprobe", "No"),
        ("msprobe", "native", "No"),
        ("msprobe", "ptdbg", "Yes"),
        ("ptdbg", "native", "No"),
    ):
        rows = compared({"npu_path": sides[npu], "bench_path": sides[bench]}, f"{npu}-{bench}")
        assert [row["NPU Name"] for row in rows] == [
            f"Functional.relu.0.forward.{end}" for end in ("input.0", "output.0")
        ]
        assert [row[VERDICT] for row in rows] == ["Yes", expected]


def test_lists_and_keywords_are_named_by_their_place() -> None:
    lists = {"input_args": [torch.ones(2), [torch.ones(2), torch.ones(3)]], "input_kwargs": {"mask": torch.ones(2)}}
    for side in ("npu", "bench"):
        write_dump(Path(side), {"VF.lstm.99.forward": {**lists, "output": [torch.ones(2)]}})
    rows = compared({"npu_path": "npu/dump.json", "bench_path": "bench/dump.json"})
    ends = ("input.0", "input.1.0", "input.1.1", "input.mask", "output.0")
    assert [row["NPU Name"] for row in rows] == [f"VF.lstm.99.forward.{end}" for end in ends]


def test_the_log_of_rows_is_for_those_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    param = write_sides()
    compare(param, "output")
    assert f"[{CONV}.input.0]" not in caplog.text
    compare({**param, "is_print_compare_log": True}, "output", auto_analyze=False)
    assert f"[{CONV}.input.0] Cosine 1.0, MaxAbsErr 0.0: Yes" in caplog.text
    assert len([*Path("output").glob("advisor*")]) == 1


def test_what_stands_in_a_dump_cannot_command_a_spreadsheet() -> None:
    entry = {"input_args": [torch.ones(2)], "input_kwargs": {}, "output": [torch.ones(2)]}
    for side in ("npu", "bench"):
        write_dump(Path(side), {"=cmd|calc.0.forward": entry})
    rows = compared({"npu_path": "npu/dump.json", "bench_path": "bench/dump.json"})
    assert {row["NPU Name"][:2] for row in rows} == {"'="}


@pytest.mark.parametrize(
    ("param", "error", "words"),
    [
        ([], SettingsError, "the first argument is list"),
        ({"npu_jsn_path": "x"}, UnknownSetting, "Did you mean 'npu_json_path'"),
        ({"npu_path": "x"}, SettingsError, "bench_json_path or bench_path is not given"),
        ({"npu_path": "x", "npu_json_path": "y"}, SettingsError, "mean the same and are not equal"),
        ({"npu_path": 3, "bench_path": "x"}, SettingsError, "npu_path is 3; it must be a path"),
        ({"npu_path": "x", "bench_path": "x", "stack_path": "none"}, SettingsError, "'none' does not exist"),
        ({"npu_path": "x", "bench_path": "x", "is_print_compare_log": "yes"}, SettingsError, "must be True or False"),
    ],
)
def test_wrong_parameters_are_told_at_once(param: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        compare(param, "output", stack_mode=isinstance(param, dict) and "stack_path" in param)


def test_wrong_switches_and_outputs_are_told() -> None:
    param = write_sides()
    with pytest.raises(SettingsError, match="fuzzy_match is 'no'"):
        compare(param, "output", fuzzy_match="no")  # type: ignore[arg-type]
    Path("taken").touch()
    with pytest.raises(SettingsError, match="'taken' is a file"):
        compare(param, "taken")


def test_nothing_in_common_is_an_error_and_leaves_nothing() -> None:
    ones = {"x": torch.ones(2), "y": torch.ones(2)}
    with pytest.raises(NothingPaired, match="0 of"):
        pair_of({"a": ones}, {"b": ones})
    assert [*Path("output").iterdir()] == []


def test_a_damaged_dump_is_one_clear_error() -> None:
    param = write_sides()
    path = Path(param["npu_json_path"])
    path.write_text(path.read_text()[:-40])
    with pytest.raises(RunDamaged, match=r"dump\.json' cannot be read"):
        compare(param, "output")


def test_a_missing_file_is_not_measured() -> None:
    param = write_sides(error=0)
    Path(f"dumps/npu/step0/proc77/dump_tensor_data/{CONV}.output.0.pt").unlink()
    row = row_of(compared(param), f"{CONV}.output.0")
    assert row[VERDICT] == "N/A" and row[MESSAGE].startswith("not measured") and row["NPU max"] == "11.0"


def write_ranks(**errors: float) -> None:
    """`npu` and `bench`, two ranks of a step each; `rank1=0.5` is an error in the NPU's."""
    for side in ("npu", "bench"):
        for rank in ("rank0", "rank1"):
            data, stacks, _ = conv_net(error=errors.get(rank, 0.0) if side == "npu" else 0.0)
            write_dump(Path(side, "step0", rank), data, stacks=stacks)


def test_ranks_are_compared_by_their_numbers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(comparing.time, "strftime", lambda _: "20240104132544")
    write_ranks(rank1=0.5)
    paths = compare_distributed("npu/step0", "bench/step0", "output", stack_mode=True, jobs=1)
    assert [path.name for path in paths] == [f"compare_result_rank{at}-rank{at}_20240104132544.csv" for at in (0, 1)]
    verdicts = [{row[VERDICT] for row in read_csv(path)} for path in paths]
    assert "No" not in verdicts[0] and "No" in verdicts[1]
    assert "1 of 2 ranks have rows that are 'No', the earliest first: rank1-rank1" in caplog.text
    assert "NPU_Stack_Info" in read_csv(paths[0])[0]
    assert len([*Path("output").glob("advisor_rank?-rank?_*.txt")]) == 2


def test_the_folder_above_the_steps_is_taken_too() -> None:
    for side in ("npu", "bench"):
        write_conv_net(Path(side), steps=2, task="statistics")
    paths = compare_distributed("npu", "bench", "output", jobs=1)
    assert [path.name[:32] for path in paths] == [f"compare_result_step{at}_rank0-rank0"[:32] for at in (0, 1)]


def test_other_ranks_and_wrong_folders_are_told() -> None:
    write_ranks()
    Path("npu/step0/rank1").rename("npu/step0/rank4")
    with pytest.raises(CannotCompare, match="only in the NPU dump: rank 4; only in the bench dump: rank 1"):
        compare_distributed("npu/step0", "bench/step0", "output")
    with pytest.raises(SettingsError, match="npu_dump_dir 'nowhere' does not exist"):
        compare_distributed("nowhere", "bench/step0", "output")

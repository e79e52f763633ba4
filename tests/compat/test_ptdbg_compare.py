"""`ptdbg_ascend.compare`: every line of either dump is in the table, and nothing is `Yes` that was not measured."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorprobe.errors import CannotCompare, NothingPaired
from tensorprobe.legacy.compared import comparing
from tensorprobe.legacy.layouts.ptdbg_reader import PtdbgSegment
from tensorprobe.legacy.ptdbg.compare import COLUMNS, compare
from tests.builders import runs as made_runs
from tests.builders.ptdbg import stack, tensor, write_rank
from tests.compat.reading import read_csv
from tests.compat.tiny_net import (
    CONV,
    MESSAGE,
    RELU,
    RELU_BACKWARD,
    STACK,
    SUM,
    VERDICT,
    Rows,
    Tensors,
    X,
    dumps,
    failing,
    tensors,
    write,
)


def without(held: Tensors, *prefixes: str) -> Tensors:
    return {name: value for name, value in held.items() if not name.startswith(prefixes)}


def compared(npu: Tensors, bench: Tensors, **more: Any) -> Rows:
    Path("output").mkdir(exist_ok=True)
    return read_csv(compare(dumps(npu, bench), "./output", **more))


def row_of(rows: Rows, name: str) -> dict[str, str]:
    (row,) = [row for row in rows if name in (row["NPU Name"], row["Bench Name"])]
    return row


def advice() -> list[str]:
    (file,) = Path("output").glob("advisor_*.txt")
    return file.read_text(encoding="utf-8").splitlines()


@pytest.fixture(autouse=True)
def output() -> Path:
    Path("output").mkdir()
    return Path("output")


def test_identical_dumps_are_yes_in_every_row(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = compare(dumps(tensors(), tensors()), "./output", True)
    rows = read_csv(path)
    assert tuple(rows[0]) == COLUMNS
    assert [row["NPU Name"] for row in rows] == [row["Bench Name"] for row in rows] == list(tensors())
    assert {row[VERDICT] for row in rows} == {"Yes"}
    assert {float(row["Cosine"]) for row in rows} == {1.0}
    assert {float(row["MaxAbsErr"]) for row in rows} == {0.0}
    assert {row[MESSAGE] for row in rows} == {""}
    assert advice()[:3] == ["Line: NA", "Suspect Nodes: NA", "Expert Advice: NA"]
    assert "AGREES" in caplog.text
    assert "tensorprobe compare bench/bench_dump.pkl npu/npu_dump.pkl" in caplog.text


def test_each_dump_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    read = PtdbgSegment._read_lines

    def counted(segment: PtdbgSegment) -> Any:
        passes.append(str(segment._pkl))
        return read(segment)

    monkeypatch.setattr(PtdbgSegment, "_read_lines", counted)
    assert compared(tensors(), tensors())
    assert len(passes) == len({*passes}) == 2


def test_the_row_says_what_the_pkl_says() -> None:
    row = row_of(compared(tensors(), tensors()), f"{CONV}_input.1")
    assert row["NPU Tensor Dtype"] == row["Bench Tensor Dtype"] == "torch.float32"
    assert row["NPU Tensor Shape"] == row["Bench Tensor Shape"] == "[4, 6]"
    for side in ("NPU", "Bench"):
        figures = [float(row[f"{side} {kind}"]) for kind in ("max", "min", "mean")]
        assert figures == pytest.approx([4.0, -2.0, 1.0])


def test_a_planted_fault_is_the_first_no(caplog: pytest.LogCaptureFixture) -> None:
    npu = {**tensors(), f"{RELU}_output": -X, f"{RELU_BACKWARD}_output.0": -X}
    rows = compared(npu, tensors())
    assert failing(rows) == [
        f"{RELU}_output",
        f"{RELU_BACKWARD}_output.0",
    ]
    row = row_of(rows, f"{RELU}_output")
    ours, theirs = (-X).ravel().astype(np.float64), np.maximum(X + 1, 0).ravel().astype(np.float64)
    cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
    assert float(row["Cosine"]) == pytest.approx(cosine, abs=1e-12)
    assert float(row["MaxAbsErr"]) == pytest.approx(abs(ours - theirs).max())
    line, node, expert = advice()
    assert line == "Line: 6"
    assert Path(next(Path("output").glob("*.csv"))).read_text().splitlines()[5].startswith(f"{RELU}_output,")
    assert node == f"Suspect Nodes: {RELU}_output"
    assert "The inputs of this call agree and its output does not" in expert
    assert f"line 6: {RELU}_output" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{CONV}_input.0", "The inputs of this call already differ"),
        (f"{CONV}_output", "The inputs of this call agree"),
        (f"{RELU_BACKWARD}_input.0", "The incoming gradient of this call already differs"),
        (f"{RELU_BACKWARD}_output.0", "the backward of this op differs"),
    ],
)
def test_the_advice_fits_the_side_and_the_direction(name: str, words: str) -> None:
    compared({**tensors(), name: -X}, tensors())
    assert advice()[1] == f"Suspect Nodes: {name}"
    assert words in advice()[2]


def test_the_rule_is_that_of_the_guide() -> None:
    small, tilted = X * 1e-4, X.copy()
    tilted[0, 0] += 0.3  # cosine stays above 0.99
    bench = {f"{CONV}_input.0": small, f"{CONV}_output": X, f"{SUM}_output": X}
    npu = {f"{CONV}_input.0": -small, f"{CONV}_output": tilted, f"{SUM}_output": X * 1.5}
    rows = compared(npu, bench)
    assert [row[VERDICT] for row in rows] == ["Yes", "Yes", "Yes"]
    assert float(rows[0]["Cosine"]) < 0.99 and float(rows[0]["MaxAbsErr"]) < 0.001
    assert float(rows[1]["Cosine"]) > 0.99 and float(rows[1]["MaxAbsErr"]) > 0.001
    assert float(rows[2]["Cosine"]) == pytest.approx(1)  # blind to scale: the log says so


def test_a_call_that_one_side_lacks_is_listed_and_not_passed() -> None:
    lines = [*tensors()]
    for npu, bench, who in (
        (without(tensors(), RELU), tensors(), "NPU"),
        (tensors(), without(tensors(), RELU), "Bench"),
    ):
        rows = compared(npu, bench)
        assert [row["NPU Name" if who == "Bench" else "Bench Name"] for row in rows] == lines
        for name in (f"{RELU}_input.0", f"{RELU}_output"):
            row = row_of(rows, name)
            assert row[VERDICT] == "Unmatched"
            assert {
                row[f"{who} {what}"] for what in ("Name", "Tensor Dtype", "Tensor Shape", "max", "min", "mean")
            } == {"N/A"}
            assert row["Cosine"] == row["MaxAbsErr"] == "N/A"
            assert row[MESSAGE] == f"no partner in the {'NPU' if who == 'NPU' else 'bench'} dump"


@pytest.mark.parametrize("seed", range(12))
def test_every_line_of_either_dump_is_there_once_and_in_order(seed: int) -> None:
    chosen = np.random.default_rng(seed)
    lines = [f"Torch_{op}_0_forward_{slot}" for op in "abcdef" for slot in ("input.0", "input.1", "output")]
    sides = [{name: X for name in lines if chosen.random() < 0.7} | {lines[-1]: X} for _ in range(2)]
    rows = compared(*sides)
    for title, held in zip(("NPU Name", "Bench Name"), sides, strict=True):
        assert [row[title] for row in rows if row[title] != "N/A"] == list(held)
    other = {name[: len("Torch_a")] for name in {*sides[0]} ^ {*sides[1]}}
    whole = [name for name in lines if name in sides[0] and name[: len("Torch_a")] not in other]
    assert [row["NPU Name"] for row in rows if row[VERDICT] == "Yes"] == whole
    assert {row[VERDICT] for row in rows} <= {"Yes", "Unmatched"}


def test_an_api_with_another_shape_of_one_tensor_is_not_the_same_api() -> None:
    rows = compared({**tensors(), f"{CONV}_input.0": X[:1]}, tensors())
    assert {row[VERDICT] for row in rows if row["NPU Name"].startswith(CONV)} == {"Unmatched"}
    assert "shapes differ" in row_of(rows, f"{CONV}_input.0")[MESSAGE]
    assert "not the same API" in row_of(rows, f"{CONV}_output")[MESSAGE]
    assert row_of(rows, f"{RELU}_output")[VERDICT] == "Yes"


def test_both_sides_count_alike_when_they_are_swapped() -> None:
    npu = {**without(tensors(), SUM), f"{CONV}_output": -X, "Torch_abs_0_forward_output": X}
    one = compared(npu, tensors())
    other = compared(tensors(), npu)
    assert sorted(row[VERDICT] for row in one) == sorted(row[VERDICT] for row in other)
    assert {row["NPU Name"] for row in one} == {row["Bench Name"] for row in other}
    assert row_of(one, f"{CONV}_output")["Cosine"] == row_of(other, f"{CONV}_output")["Cosine"]


def test_unmatched_rows_are_not_well(caplog: pytest.LogCaptureFixture) -> None:
    rows = compared(without(tensors(), RELU), tensors())
    assert {row[VERDICT] for row in rows} == {"Yes", "Unmatched"}
    line, node, expert = advice()
    assert (line, node) == ("Line: NA", "Suspect Nodes: NA")
    assert (
        "not everything was compared: 2 rows are Unmatched, first line 5: Functional_relu_0_forward_input.0" in expert
    )
    assert "2 rows are Unmatched, first line 5" in caplog.text


def test_a_fault_below_unmatched_rows_is_said_to_be_doubtful() -> None:
    npu = {**without(tensors(), CONV), f"{SUM}_output": np.float32(-7)}
    compared(npu, tensors())
    assert advice()[1] == f"Suspect Nodes: {SUM}_output"
    assert "of the rows above it 3 are Unmatched: the difference" in advice()[2]


def test_a_slot_that_one_side_lacks_is_unmatched_within_its_call() -> None:
    npu = without({f"{CONV}_input.2": X, **tensors()}, f"{CONV}_input.0")
    rows = compared(npu, tensors())
    assert row_of(rows, f"{CONV}_input.0")[MESSAGE] == "its call in the NPU dump has no such tensor"
    assert row_of(rows, f"{CONV}_input.2")[MESSAGE] == "its call in the bench dump has no such tensor"
    assert rows[0]["Bench Name"] == f"{CONV}_input.0"
    assert len(rows) == len(tensors()) + 1


def test_other_shapes_are_unmatched_whatever_the_flag() -> None:
    for flag in (False, True):
        rows = compared({**tensors(), f"{CONV}_output": X[:2]}, tensors(), shape_flag=flag)
        row = row_of(rows, f"{CONV}_output")
        assert (row["NPU Tensor Shape"], row["Bench Tensor Shape"]) == ("[2, 6]", "[4, 6]")
        assert (row[VERDICT], row["Cosine"]) == ("Unmatched", "N/A")
        assert row[MESSAGE] == "shapes differ: [2, 6] on the NPU, [4, 6] on the bench"


def test_other_dtypes_are_measured_and_said() -> None:
    row = row_of(compared({**tensors(), f"{CONV}_output": (X + 1).astype(np.float16)}, tensors()), f"{CONV}_output")
    assert (row["NPU Tensor Dtype"], row["Bench Tensor Dtype"]) == ("torch.float16", "torch.float32")
    assert row[VERDICT] == "Yes"
    assert "float16" in row[MESSAGE]


def test_nan_on_one_side_is_no_and_on_both_is_not_measured() -> None:
    one = X.copy()
    one[0, 0] = np.nan
    every = np.full_like(X, np.nan)
    npu = {**tensors(), f"{CONV}_input.0": one, f"{CONV}_input.1": one, f"{CONV}_output": every}
    bench = {**tensors(), f"{CONV}_input.1": one, f"{CONV}_output": every}
    rows = compared(npu, bench)
    assert [row[VERDICT] for row in rows[:3]] == ["No", "Yes", "N/A"]
    assert "NaN or infinite: 1 element, 1 of them not the same" in rows[0][MESSAGE]
    assert "the same on both sides: 1 element;" in rows[1][MESSAGE]
    assert "all 24 elements; nothing could be measured" in rows[2][MESSAGE]
    assert rows[2]["Cosine"] == "N/A"


def test_a_missing_file_and_a_damaged_file_are_not_measured() -> None:
    param = dumps(tensors(), tensors())
    Path(f"npu/npu_dump/{CONV}_output.npy").unlink()
    damaged = Path(f"bench/bench_dump/{RELU}_output.npy")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    rows = read_csv(compare(param, "output"))
    assert [row["NPU Name"] for row in rows] == list(tensors())
    lost, broken = row_of(rows, f"{CONV}_output"), row_of(rows, f"{RELU}_output")
    assert (lost[VERDICT], broken[VERDICT]) == ("N/A", "N/A")
    assert lost["Cosine"] == broken["Cosine"] == "N/A"
    assert lost[MESSAGE].startswith("not measured") and broken[MESSAGE].startswith("not measured")
    assert lost["NPU max"] != "N/A"
    assert "2 rows are not measured" in advice()[2]


def test_statistics_alone_are_no_measurement() -> None:
    param = dumps(tensors(), {**tensors(), f"{CONV}_output": -X})
    for side in ("npu", "bench"):
        shutil.rmtree(param.pop(f"{side}_dump_data_dir"))
    rows = read_csv(compare(param, "output"))
    assert {row[VERDICT] for row in rows} == {"N/A"}
    assert {row["Cosine"] for row in rows} == {"N/A"}
    assert {row[MESSAGE] for row in rows} == {"not measured: no values (.npy) in either dump"}
    assert float(row_of(rows, f"{CONV}_output")["Bench max"]) == 1


def test_stacks_alone_are_no_agreement(caplog: pytest.LogCaptureFixture) -> None:
    paths = [write_rank(Path(side), [stack(CONV, *STACK)], name="dump") for side in ("npu", "bench")]
    assert read_csv(compare({"npu_pkl_path": paths[0], "bench_pkl_path": paths[1]}, "output")) == []
    assert "there is no row: the dumps hold no tensors" in advice()[2]
    assert "there is no row: the dumps hold no tensors" in caplog.text


def test_an_empty_tensor_equals_an_empty_tensor() -> None:
    held = {**tensors(), f"{CONV}_output": np.zeros((0, 6), np.float32)}
    row = row_of(compared(held, held), f"{CONV}_output")
    assert (row[VERDICT], row[MESSAGE]) == ("Yes", "the tensor has no elements")


def test_fuzzy_match_pairs_calls_with_other_numbers() -> None:
    npu = {name.replace("relu_0", "relu_5"): value for name, value in tensors().items()}
    rows = compared(npu, tensors(), fuzzy_match=True)
    assert {row[VERDICT] for row in rows} == {"Yes"}
    assert row_of(rows, "Functional_relu_5_forward_output")["Bench Name"] == f"{RELU}_output"


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(NothingPaired, match="0 of"):
        compared({"Torch_abs_0_forward_output": X}, {"Torch_neg_0_forward_output": X})
    assert [*Path("output").iterdir()] == []


@pytest.mark.parametrize("sign", [*"=+-@\uff1d\uff0b\uff0d\uff20", "'="])
def test_what_stands_in_a_dump_cannot_command_a_spreadsheet(sign: str) -> None:
    evil = f'{sign}cmd|"calc"!A0,x.0.forward'
    for side in ("npu", "bench"):
        made_runs.write(Path(side), [{"name": evil, "slots": {"input.0": X, "output.\n=1\x1b[31m": X}}])
    path = compare({"npu_pkl_path": "npu", "bench_pkl_path": "bench"}, "output")
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3
    for row in read_csv(path):
        for name in (row["NPU Name"], row["Bench Name"]):
            assert name.isprintable()
            assert name.startswith(f'\'{sign}cmd|"calc"!A0')
    assert len(advice()) == 4


def test_a_hostile_dtype_is_a_text_too() -> None:
    lines = [tensor(name, value) for name, value in tensors().items()]
    for line in lines:
        line.fields[3] = "=HYPERLINK(1)"  # type: ignore[index]
    paths = [write_rank(Path(side), lines, name="dump") for side in ("npu", "bench")]
    path = compare({"npu_pkl_path": paths[0], "bench_pkl_path": paths[1]}, "output")
    assert {row["NPU Tensor Dtype"] for row in read_csv(path)} == {"'=HYPERLINK(1)"}
    assert {row[VERDICT] for row in read_csv(path)} == {"N/A"}


def test_a_line_that_cannot_be_read_is_not_well(caplog: pytest.LogCaptureFixture) -> None:
    param = dumps(tensors(), tensors())
    pkl = Path(param["npu_pkl_path"])
    pkl.write_text(pkl.read_text().replace('["Tensor_sum_0_forward_output", 1', '["Tensor_sum_0_forward_output", '))
    rows = read_csv(compare(param, "output"))
    assert row_of(rows, f"{SUM}_output")[VERDICT] == "Unmatched"
    assert "1 line of the dumps cannot be read" in caplog.text
    assert "1 line of the dumps cannot be read" in advice()[2]


def test_negative_numbers_stay_numbers() -> None:
    text = compare(dumps(tensors(), tensors()), "output").read_text(encoding="utf-8")
    assert ",-1.0," in text and "'-" not in text


def test_a_result_within_the_same_second_overwrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing.time, "strftime", lambda _: "20230104132544")
    param = dumps(tensors(), tensors())
    paths = [compare(param, "output", suffix="_x").name for _ in range(3)]
    assert paths == [f"compare_result_x_20230104132544{end}.csv" for end in ("", "_1", "_2")]
    Path("output", paths[1]).unlink()  # its advice is still there: the name stays taken
    assert compare(param, "output", suffix="_x").name == "compare_result_x_20230104132544_3.csv"
    assert len([*Path("output").glob("advisor_x_20230104132544*.txt")]) == 4
    assert [*Path("output").glob(".*")] == []


def test_a_failure_while_writing_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorprobe.legacy.compared.comparing.write_csv", full)
    with pytest.raises(OSError, match="No space"):
        compare(dumps(tensors(), tensors()), "output")
    assert [*Path("output").iterdir()] == []


def test_without_auto_analyze_there_is_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    compared({**tensors(), f"{CONV}_output": -X}, tensors(), auto_analyze=False)
    assert [*Path("output").glob("advisor*")] == []
    assert "the first row" not in caplog.text


def test_the_log_of_rows_is_for_those_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    param = dumps({**tensors(), f"{CONV}_output": -X}, tensors())
    compare({**param, "is_print_compare_log": False}, "output")
    quiet = len(caplog.messages)
    assert f"[{RELU}_output]" not in caplog.text
    compare({**param, "is_print_compare_log": True}, "output")
    assert len(caplog.messages) - quiet == quiet + len(tensors())
    assert f"[{RELU}_output] Cosine 1.0, MaxAbsErr 0.0: Yes" in caplog.text


def test_stacks_are_a_column_in_stack_mode() -> None:
    stacks = {CONV: STACK, RELU: STACK[1:]}
    param = dumps(tensors(), tensors(), "api_stack_", stacks=stacks)
    rows = read_csv(compare(param, "./output", True, stack_mode=True))
    assert tuple(rows[0]) == (*COLUMNS, "NPU_Stack_Info")
    assert [row["NPU Name"] for row in rows] == list(tensors())
    texts = [row["NPU_Stack_Info"] for row in rows]
    assert texts[0] == "net.py:12 in forward: y = F.relu(x) <- train.py:88 in main: loss = net(x)"
    assert texts[0] == texts[1] == texts[2]
    assert texts[3] == "train.py:88 in main: loss = net(x)"
    assert texts[5] == "N/A"


def test_the_folder_of_values_may_have_another_name() -> None:
    param = dumps(tensors(), {**tensors(), f"{CONV}_output": -X})
    for side in ("npu", "bench"):
        folder = Path(param[f"{side}_dump_data_dir"])
        param[f"{side}_dump_data_dir"] = str(folder.rename(folder.with_name(f"{folder.name}_20230104_13434")))
    rows = read_csv(compare(param, "output"))
    assert failing(rows) == [f"{CONV}_output"]
    assert {row[VERDICT] for row in rows} == {"Yes", "No"}


def test_values_in_another_place_are_found_by_what_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    param = dumps(tensors(), tensors())
    param["npu_dump_data_dir"] = str(Path(param["npu_dump_data_dir"]).rename("elsewhere"))
    assert {row[VERDICT] for row in read_csv(compare(param, "output"))} == {"Yes"}
    said = caplog.text.partition("rounding:   ")[2].partition("\n")[0]
    assert "open_run('npu/npu_dump.pkl', 'elsewhere')" in said
    exec(said)


def test_pkl_files_of_different_ranks_can_be_compared() -> None:
    paths = [
        write(Path("tag_v1.0", rank, "dump.pkl"), {**tensors(), f"{CONV}_output": value})
        for rank, value in (("rank0", X), ("rank3", -X))
    ]
    rows = read_csv(compare({"npu_pkl_path": paths[1], "bench_pkl_path": paths[0]}, "output"))
    assert failing(rows) == [f"{CONV}_output"]


def test_a_run_of_tensorprobe_is_taken_as_well() -> None:
    call = made_runs.call
    made_runs.write(Path("native"), [call("Functional.conv2d.0.forward", inputs=[X, X * 2], outputs=[X + 1])])
    pkl = write(Path("npu", "npu_dump.pkl"), {**tensors(), f"{CONV}_output": -X})
    rows = read_csv(compare({"npu_pkl_path": pkl, "bench_pkl_path": "native"}, "output"))
    first = row_of(rows[:3], f"{CONV}_output")
    assert first["Bench Name"] == f"{CONV}_output"
    assert first["Bench Tensor Dtype"] == "torch.float32" and first["Bench Tensor Shape"] == "[4, 6]"
    assert [row[VERDICT] for row in rows] == ["Yes", "Yes", "No"] + ["Unmatched"] * 6


def test_names_of_a_run_of_tensorprobe_are_spelled_by_rule() -> None:
    slots = {"input.0": X, "input.kwargs.weight": X, "output.0": X, "output.changed.1": X}
    calls = [
        {"name": "Functional.batch_norm.2.forward", "slots": slots},
        made_runs.call("Torch.max.0.forward", outputs=[X, X]),
        made_runs.call("Functional.relu.0.backward", inputs=[X], outputs=[X]),
    ]
    made_runs.write(Path("native"), calls)
    rows = read_csv(compare({"npu_pkl_path": "native", "bench_pkl_path": "native"}, "output"))
    assert [row["NPU Name"] for row in rows] == [
        "Functional_batch_norm_2_forward_input.0",
        "Functional_batch_norm_2_forward_input.kwargs.weight",
        "Functional_batch_norm_2_forward_output",
        "Functional_batch_norm_2_forward_output.changed.1",
        "Torch_max_0_forward_output.0",
        "Torch_max_0_forward_output.1",
        "Functional_relu_0_backward_input.0",
        "Functional_relu_0_backward_output.0",
    ]


def test_several_ranks_in_one_run_are_not_one_table() -> None:
    held = [made_runs.call("Functional.relu.0.forward", inputs=[X], outputs=[X])]
    made_runs.write(Path("native"), {(0, 0): held, (0, 1): held})
    with pytest.raises(CannotCompare, match="more than one step of a rank"):
        compare({"npu_pkl_path": "native", "bench_pkl_path": "native"}, "output")

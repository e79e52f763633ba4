"""Every code block of the ptdbg_ascend guide for one process, pasted into a script and run: files, columns and messages.

Each script is a process with a working directory of its own, on the CPU and on the simulated NPU, with a conv net and a GPT.
What it leaves behind is read with json and numpy only.
"""

from __future__ import annotations

import csv
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest

import ptdbg_ascend
from tensorprobe.errors import TensorprobeError
from tensorprobe.legacy.ptdbg.dump import MODES
from tests.compat import guide_blocks as guide
from tests.compat.guide_blocks import paste
from tests.compat.pasted import HOOK, PLAIN_STEPS, Pasted, Place, everywhere, pasted
from tests.compat.reading import Dump, read_dump
from tests.compat.scripts import run_on, write_program

__all__ = ["pasted"]  # a fixture: pytest finds it here
pytestmark = pytest.mark.xdist_group("guide")  # one worker, so that each script runs once


def whole_dump(pasted: Pasted, place: Place) -> Dump:
    return read_dump(pasted("whole", place).folder / "dump_conv2d_v1.0" / "rank0" / "npu_dump.pkl")


def mode_dump(pasted: Pasted, place: Place, mode: str, prefix: str = "") -> Dump:
    return read_dump(pasted("examples", place).folder / mode / "ptdbg_dump_v1.0" / "rank0" / f"{prefix}npu_dump.pkl")


def call_of(line: str) -> str:
    """`Tensor_abs_1_forward` of `Tensor_abs_1_forward_input.0`."""
    match = re.fullmatch(r"(\w+_[0-9]+_(?:forward|backward))_(?:input|output)(?:\.\w+)*", line)
    assert match, f"{line} is no name of the guide"
    return match[1]


def calls_of(dump: Dump) -> list[str]:
    """The calls that have a line, in the order of their first one."""
    return list(dict.fromkeys(map(call_of, dump.lines)))


# Scenario 1, first step: the whole network.


@everywhere
def test_the_layout_is_that_of_the_guide(pasted: Pasted, place: Place) -> None:
    folder, _, _, stderr = pasted("whole", place)
    made = sorted(path.relative_to(folder).as_posix() for path in folder.glob("dump_conv2d_v1.0/**/*"))
    assert [path for path in made if not path.endswith(".npy")] == [
        "dump_conv2d_v1.0/rank0",
        "dump_conv2d_v1.0/rank0/npu_dump",
        "dump_conv2d_v1.0/rank0/npu_dump.pkl",
    ]
    assert whole_dump(pasted, place).lines
    assert "dump_conv2d_v1.0/rank0/npu_dump.pkl'" in stderr and "[INFO] Dumped" in stderr
    assert "WARNING" not in stderr and "CaptureIncomplete" not in stderr


@everywhere
def test_training_is_the_same_to_the_last_bit(pasted: Pasted, place: Place) -> None:
    *plain, after_all_examples = pasted("examples", place).stdout.splitlines()[: PLAIN_STEPS + 1]
    assert pasted("whole", place).stdout.splitlines() == [plain[2]]
    assert after_all_examples == plain[-1]


@everywhere
def test_values_are_those_that_torch_computes(pasted: Pasted, place: Place) -> None:
    dump = whole_dump(pasted, place)
    expected = sorted((pasted("examples", place).folder / "expected").glob("*.npy"))
    assert len(expected) >= 8
    for path in expected:
        numpy.testing.assert_array_equal(dump.lines[path.stem].array, numpy.load(path), strict=True, err_msg=path.stem)


@everywhere
def test_lines_describe_the_arrays(pasted: Pasted, place: Place) -> None:
    dump = whole_dump(pasted, place)
    for name, line in dump.lines.items():
        array = dump.lines[name].array
        assert (line.step, line.shape) == (1, list(array.shape)), name
        assert line.dtype in (f"torch.{array.dtype}", "torch.bfloat16"), name
        mean = array.mean(dtype=numpy.float64)
        numpy.testing.assert_allclose(
            line.statistics, [array.max(), array.min(), mean], rtol=1e-5, atol=1e-7, err_msg=name
        )


@everywhere
def test_numbers_count_from_0_and_one_result_has_no_index(pasted: Pasted, place: Place) -> None:
    lines = whole_dump(pasted, place).lines
    for name in (
        "Functional_conv2d_0_forward_output",
        "Torch_relu_0_forward_output",
        "Tensor_permute_0_forward_output",
    ):
        assert name in lines and f"{name}.0" not in lines
    assert "Functional_conv2d_1_backward_input.0" in lines and "Functional_conv2d_1_backward_input" not in lines
    assert "Functional_conv2d_2_forward_output" not in lines


@everywhere
def test_bfloat16_is_widened_and_its_line_says_so(pasted: Pasted, place: Place) -> None:
    dump = whole_dump(pasted, place)
    narrow = [name for name, line in dump.lines.items() if line.dtype == "torch.bfloat16"]
    assert {call_of(name).rsplit("_", 1)[1] for name in narrow} == {"forward", "backward"}
    for name in narrow:
        array = dump.lines[name].array
        assert array.dtype == numpy.float32
        assert not (array.view(numpy.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_nested_inputs_have_a_number_for_each_level(pasted: Pasted, device: str) -> None:
    dump = whole_dump(pasted, Place(device, "conv"))
    assert dump.lines["VF_lstm_0_forward_input.1.0"].shape == [1, 2, 4]
    assert {"VF_lstm_0_forward_input.1.1", "VF_lstm_0_forward_input.2.3", "VF_lstm_0_forward_output.2"} <= dump.files


# The list of modes.


def is_in(place: Place, stack: list[list[str]]) -> bool:
    """Whether a stack, innermost frame first, begins in the reader's own program."""
    file, line, function, code = stack[0]
    source = Path(file)
    return (
        source.name == "small_nets.py"
        and function != ""
        and source.read_text().splitlines()[int(line) - 1].strip() == code
    )


@everywhere
def test_list_gives_the_named_calls(pasted: Pasted, place: Place) -> None:
    dump = mode_dump(pasted, place, "list")
    named = ["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_backward"]
    assert calls_of(dump) == named == list(dump.stacks)
    assert "Tensor_transpose_2_forward_output" in dump.files and "Torch_relu_3_backward_output.0" in dump.files
    assert all(is_in(place, stack) for stack in dump.stacks.values())


@everywhere
def test_range_gives_what_lies_between(pasted: Pasted, place: Place) -> None:
    dump, whole = mode_dump(pasted, place, "range"), mode_dump(pasted, place, "api_stack", "api_stack_")
    order = list(whole.stacks)
    between = order[order.index("Tensor_abs_1_forward") : order.index("Tensor_transpose_3_forward") + 1]
    assert list(dump.stacks) == between
    assert calls_of(dump) == [call for call in between if call in calls_of(whole)]
    assert len(calls_of(dump)) > 2
    assert {"Tensor_abs_1_forward_input.0", "Tensor_transpose_3_forward_output"} <= dump.files


@everywhere
def test_stack_gives_stacks_only(pasted: Pasted, place: Place) -> None:
    dump = mode_dump(pasted, place, "stack")
    assert not dump.lines
    rank = pasted("examples", place).folder / "stack" / "ptdbg_dump_v1.0" / "rank0"
    assert [path.name for path in rank.iterdir()] == ["npu_dump.pkl"]
    assert list(dump.stacks) == list(mode_dump(pasted, place, "range").stacks)
    assert all(is_in(place, stack) for stack in dump.stacks.values())


@everywhere
def test_api_list_gives_calls_of_that_api(pasted: Pasted, place: Place) -> None:
    dump = mode_dump(pasted, place, "api_list")
    assert sorted(calls_of(dump)) == sorted(
        f"Torch_relu_{number}_{direction}" for number in range(4) for direction in ("forward", "backward")
    )
    assert not dump.stacks


@everywhere
def test_api_stack_gives_everything_with_stacks_under_its_prefix(pasted: Pasted, place: Place) -> None:
    folder = pasted("examples", place).folder / "api_stack" / "ptdbg_dump_v1.0" / "rank0"
    assert {path.name for path in folder.iterdir()} == {"api_stack_npu_dump", "api_stack_npu_dump.pkl"}
    dump = mode_dump(pasted, place, "api_stack", "api_stack_")
    assert calls_of(dump) == calls_of(whole_dump(pasted, place))
    assert set(calls_of(dump)) <= set(dump.stacks)
    assert is_in(place, dump.stacks["Functional_conv2d_1_backward"])


@everywhere
def test_the_filter_keeps_integers_bools_and_scalars_out(pasted: Pasted, place: Place) -> None:
    filtered = mode_dump(pasted, place, "api_stack", "api_stack_")
    assert {line.dtype for line in filtered.lines.values()} == {"torch.float32", "torch.bfloat16"}
    dump = mode_dump(pasted, place, "unfiltered")
    assert set(filtered.lines) < set(dump.lines)
    assert not dump.stacks
    more = {line.dtype for line in dump.lines.values()}
    assert {"torch.int64", "<class 'int'>", "<class 'float'>"} <= more
    assert "torch.bool" in more or place.net == "conv"
    padding = dump.lines["Functional_conv2d_1_forward_input.4.0"]
    assert (padding.dtype, padding.shape, padding.statistics) == ("<class 'int'>", "[]", [1, 1, 1])
    assert dump.lines[padding.name].array.shape == () and dump.lines[padding.name].array == 1
    target = dump.lines["Functional_cross_entropy_0_forward_input.1"].array
    assert target.dtype == numpy.int64 and dump.lines["Functional_cross_entropy_0_forward_input.1"].shape == list(
        target.shape
    )


@everywhere
def test_a_second_dump_takes_the_place_of_the_first_and_that_is_said(pasted: Pasted, place: Place) -> None:
    assert len(mode_dump(pasted, place, "list").files) < 10
    replaced = [line for line in pasted("examples", place).stderr.splitlines() if "is replaced" in line]
    assert "/list/ptdbg_dump_v1.0/rank0/npu_dump.pkl'" in replaced[0]
    assert "/ptdbg_dump_v1.0/rank0/npu_dump_scope.pkl'" in replaced[1]
    assert len(replaced) == 2


@everywhere
def test_tags_keep_dumps_apart(pasted: Pasted, place: Place) -> None:
    folder = pasted("examples", place).folder / "dump_resnet50"
    assert {path.name for path in folder.iterdir()} == {"all_v1.0", "conv2d_stack_v1.0"}
    everything, stacks = (read_dump(folder / f"{tag}_v1.0" / "rank0" / "dump.pkl") for tag in guide.TAGS)
    assert everything.files and not everything.stacks
    assert not stacks.lines and set(calls_of(everything)) <= set(stacks.stacks)


def kernels(folder: Path) -> dict[str, numpy.ndarray]:
    """What an acl dump holds: kernel and slot → array. Its files must lie and be named as in the guide."""
    found = {}
    for path in sorted(folder.rglob("*.npy")):
        device, model, file = path.relative_to(folder).parts
        assert len(folder.name) == 14 and folder.name.isdecimal() and (device, model) == ("0", "0")
        kind, name, task, stream, time, *slot = file.removesuffix(".npy").split(".")
        assert name.startswith(kind) and task.isdecimal() and stream.isdecimal() and len(time) == 16
        found[f"{kind}.{'.'.join(slot)}"] = numpy.load(path)
    return found


@everywhere
def test_acl_dumps_the_kernels_of_one_call(pasted: Pasted, place: Place) -> None:
    """The example of the mode list, and the two of scenario 1: forward, and backward with a given gradient."""
    ran = pasted("examples", place)
    if place.device == "npu":
        once = ["init_dump", f"set_dump {ran.folder / 'dump.json'}", "finalize_dump"]
        assert ran.stdout.splitlines()[PLAIN_STEPS + 1 :] == 3 * once
        return
    absolute, permuted, backward = map(kernels, sorted((ran.folder / "output").iterdir()))
    assert set(absolute) == {"abs.input.0", "abs.output.0"}
    numpy.testing.assert_array_equal(absolute["abs.output.0"], numpy.abs(absolute["abs.input.0"]))
    assert set(permuted) == {"permute.input.0", "permute.output.0"}
    assert permuted["permute.output.0"].size == permuted["permute.input.0"].size
    given = numpy.load(ran.folder / "xxx" / "Functional_conv2d_1_backward_input.0.npy")
    numpy.testing.assert_array_equal(backward["convolution_backward.input.0"], given)
    assert backward["convolution_backward.output.1"].shape == backward["convolution_backward.input.2"].shape


# Scenario 1, second step: a smaller range.


@everywhere
def test_a_smaller_range_is_dumped_under_its_own_name(pasted: Pasted, place: Place) -> None:
    folder = pasted("examples", place).folder
    listed, ranged = (read_dump(folder / f"scope_{name}" / "npu_dump_scope.pkl") for name in ("list", "range"))
    named = ["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_forward"]
    assert calls_of(listed) == named == list(listed.stacks)
    assert calls_of(ranged)[0] == "Tensor_abs_1_forward" and calls_of(ranged)[-1] == "Tensor_transpose_2_forward"
    assert list(ranged.stacks) == calls_of(ranged)


# Scenario 1: comparing. The guide's paths are those of its older, flat layout.

COLUMNS = (
    "NPU Name,Bench Name,NPU Tensor Dtype,Bench Tensor Dtype,NPU Tensor Shape,Bench Tensor Shape,Cosine,MaxAbsErr,"
    "NPU max,NPU min,NPU mean,Bench max,Bench min,Bench mean,Accuracy Reached or Not,Err_message"
).split(",")


class Compared(NamedTuple):
    """What a comparison has left behind."""

    header: list[str]
    rows: list[dict[str, str]]
    advice: str
    stderr: str

    def named(self, name: str) -> dict[str, str]:
        return next(row for row in self.rows if row["NPU Name"] == name)


def put_flat(rank: Path, name: str, folder: Path, to: str, time: str) -> None:
    """A dump of today's layout where the guide's script looks for it."""
    shutil.copy(rank / f"{name}.pkl", folder / f"{to}.pkl")
    shutil.copytree(rank / name, folder / f"{to}_{time}")


def compare_pasted(block: str, folder: Path) -> Compared:
    """Run a comparing script of the guide, and read its result."""
    (folder / "output").mkdir()
    done = run_on("cpu", write_program(folder, paste(block, ""), "compare.py"))
    (table,), (advice,) = folder.glob("output/compare_result_*.csv"), folder.glob("output/advisor_*.txt")
    assert re.fullmatch("compare_result_[0-9]{14}.csv", table.name)
    assert re.fullmatch("advisor_[0-9]{14}.txt", advice.name)
    with table.open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    return Compared(header, rows, advice.read_text(encoding="utf-8"), done.stderr)


def whole_rank(pasted: Pasted, name: str, place: Place) -> Path:
    return pasted(name, place).folder / "dump_conv2d_v1.0" / "rank0"


@pytest.mark.simulated
def test_compare_finds_the_planted_fault(pasted: Pasted, tmp_path: Path) -> None:
    npu = whole_rank(pasted, "faulty", Place("npu", "conv"))
    put_flat(npu, "npu_dump", tmp_path, "npu_dump", "20230104_13434")
    put_flat(whole_rank(pasted, "whole", Place("cpu", "conv")), "npu_dump", tmp_path, "gpu_dump", "20230104_132544")
    compared = compare_pasted(guide.COMPARE, tmp_path)
    assert compared.header == COLUMNS
    assert [row["NPU Name"] for row in compared.rows] == list(read_dump(npu / "npu_dump.pkl").lines)
    assert all(row["NPU Name"] == row["Bench Name"] for row in compared.rows)
    failing = [at for at, row in enumerate(compared.rows) if row["Accuracy Reached or Not"] == "No"]
    assert compared.rows[failing[0]]["NPU Name"] == "Functional_conv2d_1_forward_output"
    for row in compared.rows:
        fails = float(row["Cosine"]) < 0.99 and float(row["MaxAbsErr"]) > 0.001
        assert row["Accuracy Reached or Not"] == ("No" if fails else "Yes"), row
    line = failing[0] + 2
    assert compared.advice.startswith(
        f"Line: {line}\nSuspect Nodes: Functional_conv2d_1_forward_output\nExpert Advice: "
    )
    assert f"the first row that does not reach the accuracy is line {line}: Functional_conv2d_1_forward_output" in (
        compared.stderr
    )
    assert "[Functional_conv2d_0_forward_input.0] Cosine " in compared.stderr  # is_print_compare_log


@pytest.mark.simulated
def test_figures_of_a_row_are_those_of_its_tensors(pasted: Pasted, tmp_path: Path) -> None:
    for device, name, time in (("npu", "npu_dump", "20230104_13434"), ("cpu", "gpu_dump", "20230104_132544")):
        put_flat(whole_rank(pasted, "whole", Place(device, "gpt")), "npu_dump", tmp_path, name, time)
    compared = compare_pasted(guide.COMPARE, tmp_path)
    npu, bench = (whole_dump(pasted, Place(device, "gpt")) for device in ("npu", "cpu"))
    assert {row["Accuracy Reached or Not"] for row in compared.rows} == {"Yes"}
    assert "Line: NA\nSuspect Nodes: NA\n" in compared.advice
    for row in compared.rows:
        ours, theirs = npu.lines[row["NPU Name"]], bench.lines[row["Bench Name"]]
        assert (row["NPU Tensor Dtype"], row["NPU Tensor Shape"]) == (ours.dtype, str(ours.shape))
        assert [float(row[f"Bench {kind}"]) for kind in ("max", "min", "mean")] == theirs.statistics
        a, b = (held.array.astype(numpy.float64).ravel() for held in (ours, theirs))
        finite = numpy.isfinite(a) & numpy.isfinite(b)
        a, b = a[finite], b[finite]
        assert float(row["MaxAbsErr"]) == pytest.approx(numpy.abs(a - b).max(), rel=1e-5, abs=1e-12)
        if a.any() and b.any():
            cosine = a @ b / (numpy.linalg.norm(a) * numpy.linalg.norm(b))
            assert float(row["Cosine"]) == pytest.approx(cosine, abs=1e-9)


@pytest.mark.simulated
def test_compare_of_api_stack_dumps_shows_stacks(pasted: Pasted, tmp_path: Path) -> None:
    for device, name, time in (("npu", "npu", "20230104_13434"), ("cpu", "gpu", "20230104_132544")):
        rank = pasted("examples", Place(device, "conv")).folder / "api_stack" / "ptdbg_dump_v1.0" / "rank0"
        put_flat(rank, "api_stack_npu_dump", tmp_path, f"api_stack_{name}_dump", time)
    compared = compare_pasted(guide.COMPARE_STACKS, tmp_path)
    assert compared.header == [*COLUMNS, "NPU_Stack_Info"]
    assert {row["Accuracy Reached or Not"] for row in compared.rows} == {"Yes"}
    assert "small_nets.py" in compared.named("Functional_conv2d_1_forward_output")["NPU_Stack_Info"]


def test_compare_of_api_stack_dumps_without_stack_mode_says_what_to_do(pasted: Pasted, tmp_path: Path) -> None:
    rank = pasted("examples", Place("cpu", "conv")).folder / "api_stack" / "ptdbg_dump_v1.0" / "rank0"
    for name, time in (("npu", "20230104_13434"), ("gpu", "20230104_132544")):
        put_flat(rank, "api_stack_npu_dump", tmp_path, f"api_stack_{name}_dump", time)
    (tmp_path / "output").mkdir()
    script = tmp_path / "compare.py"
    script.write_text(paste(guide.COMPARE_STACKS, "").replace(", stack_mode=True", ""))
    with pytest.raises(
        TensorprobeError, match="The current file contains stack information, please turn on the stack_mode"
    ):
        runpy.run_path(str(script))
    assert not list((tmp_path / "output").iterdir())


# Scenario 2: one call out of a dump.


def test_parse_prints_stack_and_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The guide's name is of no API that torch has: the dump is written by hand."""
    frames = [
        ["/home/you/model.py", "88", "forward", "x = self.norm(x)"],
        ["/home/you/train.py", "7", "<module>", "f()"],
    ]
    lines = [
        ["Torch_batch_normal_0_forward_input.0", 1, [], "torch.float32", [2, 3], [9.0, -9.0, 0.5]],
        ["Torch_batch_normal_1_forward_input.0", 1, [], "torch.float16", [4, 5], [3.5, -2.5, 0.125]],
        ["Torch_batch_normal_1_forward_output", 1, [], "torch.float16", [4, 5], [1.5, -1.5, 0.0625]],
        ["Torch_batch_normal_1_forward_stack_info", frames],
    ]
    (tmp_path / "npu_dump.pkl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script = tmp_path / "show.py"
    script.write_text(guide.PARSE)
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    for shown in ("/home/you/model.py", "88", "x = self.norm(x)", "torch.float16", "[4, 5]", "3.5", "-2.5", "0.125"):
        assert shown in printed
    assert "[2, 3]" not in printed and "9" not in printed.replace("/home", "")
    assert printed.index("model.py") < printed.index("train.py") < printed.index("_input.0") < printed.index("_output")


def test_parse_reads_a_dump_of_today(pasted: Pasted, capsys: pytest.CaptureFixture[str]) -> None:
    rank = pasted("examples", Place("cpu", "conv")).folder / "list" / "ptdbg_dump_v1.0" / "rank0"
    runpy.run_path(
        str(
            write_program(
                Path("here"),
                guide.PARSE.replace("./npu", f"{rank}/npu").replace(
                    "Torch_batch_normal_1_forward", "Tensor_transpose_2_forward"
                ),
            )
        )
    )
    printed = capsys.readouterr().out
    assert "small_nets.py" in printed and "Tensor_transpose_2_forward_output" in printed and "torch.float32" in printed
    assert "permute" not in printed
    with pytest.raises(TensorprobeError, match="no call 'Torch_batch_normal_1_forward'"):
        runpy.run_path(str(write_program(Path("there"), guide.PARSE.replace("./npu", f"{rank}/npu"))))


# What the guide warns of.


def test_a_path_set_after_register_hook_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = "from ptdbg_ascend import *\nfrom tests.compat.small_nets import Trainer\ntrainer = Trainer('conv')\n"
    script += f"model = trainer.model\n{HOOK}\n{guide.MANY_RANKS_PATH}\nset_dump_switch('ON', mode='stack')\n"
    runpy.run_path(str(write_program(tmp_path, script + "trainer.step()\nset_dump_switch('OFF')\n")))
    assert (tmp_path / "ptdbg_dump_v1.0" / "rank0" / "anonymous.pkl").stat().st_size
    assert not (tmp_path / "dump_path").exists()
    assert "register_hook before set_dump_path" in caplog.text


def test_the_page_for_migrating_has_every_name_mode_and_column() -> None:
    page = (
        (Path(__file__).parents[2] / "docs" / "migrating.md")
        .read_text(encoding="utf-8")
        .partition("\n## ptdbg_ascend\n")[2]
    )
    for name in {*ptdbg_ascend.__all__} - {"__version__"}:
        assert re.search(rf"\b{name}\b", page), name
    for mode in MODES:
        assert re.search(rf"^\| `{mode}`", page, re.MULTILINE), mode
    for column in [*COLUMNS, "NPU_Stack_Info"]:
        assert column in page, column

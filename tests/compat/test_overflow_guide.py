"""Overflow detection by its old names: scenario 3 of the ptdbg_ascend guide and the overflow parser of api_accuracy_checker.

The blocks of the guides are pasted into one script, which runs once on the CPU and once on the simulated NPU, and so does
the parser's command on what it left. Files are read with json and numpy only.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F

import api_accuracy_checker.run_ut as commands
import ptdbg_ascend as ptdbg
from tensorprobe.errors import SettingsError, UnknownSetting
from tensorprobe.legacy.checker.run_overflow_check import check_overflow, main
from tensorprobe.legacy.ptdbg import dump
from tensorprobe.taps import active_probe
from tests.builders.checker import read_strictly, tensor, write_dump
from tests.compat.guide_blocks import DUMP_JSON
from tests.compat.overflow_script import FAULT, SCRIPT
from tests.taps.scripts import run_python, run_tool

pytestmark = pytest.mark.xdist_group("overflow-guide")  # one worker, so that each script runs once

RUN_OVERFLOW_CHECK = Path(commands.__file__).with_name("run_overflow_check.py")


class Overflow(NamedTuple):
    """One pkl: the call whose stack is its first line, that stack, lines as name → the rest, and the arrays beside it."""

    pkl: Path
    call: str
    stack: list[list[str]]
    lines: dict[str, list[Any]]
    arrays: dict[str, Any]


def read_overflow(pkl: Path) -> Overflow:
    """Asserts what holds for every one: the stack first, no statistics, each line has its file and each file its line."""
    (head, stack), *lines = [json.loads(line) for line in pkl.read_text(encoding="utf-8").splitlines()]
    assert head.endswith("_stack_info")
    assert all(len(frame) == 4 and all(isinstance(part, str) for part in frame) for frame in stack)
    assert all(len(line) == 5 and line[1:3] == [101, []] for line in lines)
    arrays = {file.stem: numpy.load(file, allow_pickle=False) for file in pkl.with_suffix("").iterdir()}
    assert {line[0] for line in lines} == set(arrays)
    assert all(list(arrays[name].shape) == shape for name, _, _, _, shape in lines if shape != "[]")
    return Overflow(pkl, head.removesuffix("_stack_info"), stack, {line[0]: line[3:] for line in lines}, arrays)


def read_rank(folder: Path, rank: int = 0) -> list[Overflow]:
    """The overflows of a rank in their order, by the number at the end of their names."""
    pkls = sorted(
        (folder / f"ptdbg_dump_v1.0/rank{rank}").glob("*.pkl"), key=lambda pkl: int(pkl.stem.rpartition("_")[2])
    )
    assert all(re.fullmatch(r"Overflow_info_\d{8}_\d{6}_\d+", pkl.stem) for pkl in pkls)
    return [read_overflow(pkl) for pkl in pkls]


class Ran(NamedTuple):
    folder: Path
    said: dict[str, list[list[str]]]
    stderr: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs the script in a place, once."""

    @functools.cache
    def run(device: str) -> Ran:
        folder = tmp_path_factory.mktemp(device)
        (folder / "dump.json").write_text(DUMP_JSON.replace("/home/HwHiAiUser/dump", str(folder)))
        (folder / "train.py").write_text(SCRIPT)
        if device == "cpu":
            done = run_python(["train.py", device], folder, code=1)
        else:
            sim = ["sim", "--torch-npu", "--fault", json.dumps(FAULT), "--", sys.executable, "train.py", device]
            done = run_tool(sim, folder, code=1)
        said: dict[str, list[list[str]]] = {}
        for line in done.stdout.splitlines():
            kind, *what = line.split("|")
            said.setdefault(kind, []).append(what)
        return Ran(folder, said, done.stderr)

    return run


everywhere = pytest.mark.parametrize("device", ["cpu", "npu"])
Run = Callable[[str], Ran]


@everywhere
def test_training_is_the_same_to_the_last_bit_and_masks_are_no_overflow(ran: Run, device: str) -> None:
    """Three steps with a causal mask of -inf: nothing is counted, nothing is changed."""
    assert ran(device).said["plain"] == ran(device).said["watched"]


@everywhere
def test_training_stops_with_the_error_of_the_guide_and_nothing_is_left_installed(ran: Run, device: str) -> None:
    folder, said, stderr = ran(device)
    by_api, by_kernel, backward = said["stopped"]
    for (kind, message), times, place in ((by_api, 2, "first"), (by_kernel, 1, "kernels"), (backward, 1, "gradient")):
        match = re.fullmatch(rf"\[overflow {times} times\]: dump file is saved in '(.+)'\.", message)
        assert kind == "ValueError" and match, message
        assert Path(match[1]) == read_rank(folder / place)[-1].pkl
    assert said["left"] == [["0"]] * 4
    assert re.search(
        r"^ValueError: \[overflow 1 times\]: dump file is saved in '.*/uncaught/ptdbg_dump_v1.0/rank0/Overflow_info_.*_1.pkl'\.$",
        stderr,
        re.MULTILINE,
    )
    assert "CaptureIncomplete" not in stderr


@everywhere
def test_each_overflow_is_dumped_under_the_name_of_its_call(ran: Run, device: str) -> None:
    first, second = read_rank(ran(device).folder / "first")
    assert first.call == "Functional_softmax_3_forward"
    given, made = (first.arrays[f"Functional_softmax_3_forward_{side}"] for side in ("input.0", "output"))
    assert (given[:, 0] == -numpy.inf).all() and not numpy.isnan(given).any()
    assert numpy.isnan(made[:, 0]).all() and numpy.isfinite(made[:, 1:]).all()
    assert first.lines["Functional_softmax_3_forward_output"] == ["torch.float32", [2, 4, 4]]
    at_cumsum = device == "npu"  # where the fault is
    assert second.call == ("Torch_cumsum_0_forward" if at_cumsum else "Tensor_mul_1_forward")
    assert numpy.isinf(second.arrays[f"{second.call}_output"]).any()
    assert numpy.isfinite(second.arrays[f"{second.call}_input.0"]).all()


@everywhere
def test_the_stack_leads_to_the_line_of_the_program(ran: Run, device: str) -> None:
    folder = ran(device).folder
    file, line, function, code = read_rank(folder / "first")[0].stack[0]
    assert (Path(file).name, function) == ("train.py", "attend")
    assert (folder / "train.py").read_text().splitlines()[int(line) - 1].strip() == code
    assert "F.softmax(" in code


@everywhere
def test_overflows_are_written_for_the_parser_where_the_program_runs(ran: Run, device: str) -> None:
    folder = ran(device).folder / "first"
    (forward,), (backward,) = folder.glob("forward_info_*.json"), folder.glob("backward_info_*.json")
    assert re.fullmatch(r"forward_info_\d+.json", forward.name)
    held = read_strictly(forward)
    assert list(held) == ["Functional*softmax*3", "Torch*cumsum*0" if device == "npu" else "Tensor*mul*1"]
    assert read_strictly(backward) == {}
    (entry,) = held["Functional*softmax*3"]["args"][:1]
    values = torch.load(entry["datapath"], weights_only=True)
    numpy.testing.assert_array_equal(
        values.numpy(), read_rank(folder)[0].arrays["Functional_softmax_3_forward_input.0"]
    )


@everywhere
def test_kernels_of_a_forward_overflow_are_dumped(ran: Run, device: str) -> None:
    """Only between "ON" and "OFF"; on an NPU torch_npu is told to, around the call that is run once more."""
    folder, said, _ = ran(device)
    (overflow,) = read_rank(folder / "kernels")
    if device == "npu":
        once = [["init_dump"], ["set_dump", str(folder / "dump.json")], ["finalize_dump"]]
        called = [[name, *map(os.path.realpath, paths)] for name, *paths in said["torch_npu"]]
        assert called == 2 * once  # the second time for the backward, below
        return
    (product, _) = sorted((folder / "output").iterdir())
    files = {
        path.name.split(".")[0] + "." + ".".join(path.stem.split(".")[5:]): path for path in product.rglob("*.npy")
    }
    assert set(files) == {"mul.input.0", "mul.output.0"}
    for slot, side in (("input.0", "input.0"), ("output.0", "output")):
        numpy.testing.assert_array_equal(
            numpy.load(files[f"mul.{slot}"]), overflow.arrays[f"Tensor_mul_1_forward_{side}"]
        )


@everywhere
def test_a_backward_overflow_leaves_the_gradients_for_a_second_run(ran: Run, device: str) -> None:
    """`set_backward_input` with the file that the overflow check left, as the guide has it."""
    folder = ran(device).folder
    (overflow,) = read_rank(folder / "gradient")
    assert overflow.call == "Functional_conv2d_1_backward"
    given = overflow.arrays["Functional_conv2d_1_backward_input.0"]
    assert numpy.isfinite(given).all() and given.shape == (2, 4, 3, 3)
    assert numpy.isinf(overflow.arrays["Functional_conv2d_1_backward_output.0"]).any()
    assert overflow.stack[0][2] == "forward"
    if device == "cpu":
        (_, second) = sorted((folder / "output").iterdir())
        (found,) = second.rglob("convolution_backward.*.input.0.npy")
        numpy.testing.assert_array_equal(numpy.load(found), given)


@pytest.fixture(scope="module")
def parsed(ran: Run) -> Callable[[str], tuple[int, list[str]]]:
    """Runs the parser as its guide prints it, on the forward overflows, once in each place."""

    @functools.cache
    def parse(device: str) -> tuple[int, list[str]]:
        folder = ran(device).folder / "first"
        (forward,) = folder.glob("forward_info_*.json")
        command: list[str | Path] = [RUN_OVERFLOW_CHECK, "-forward", f"./{forward.name}"]
        if device == "npu":
            fault = ["--fault", json.dumps(FAULT)]
            done = run_tool(["sim", "--torch-npu", *fault, "--", sys.executable, *command], folder, code=None)
        else:
            done = run_python(command, folder, code=None)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()

    return parse


def test_the_parser_calls_it_normal_when_the_numbers_are_that_large(parsed: Any) -> None:
    code, (softmax, product, total) = parsed("cpu")
    assert code == 0
    assert softmax.startswith("The Functional_softmax_3_forward overflow is a normal overflow. Functional*softmax*3 ")
    assert product.startswith("The Tensor_mul_1_forward overflow is a normal overflow. ") and "float32" in product
    assert total == "2 APIs on cpu: 2 normal, 0 abnormal, 0 unknown, 0 finite"


@pytest.mark.simulated
def test_the_parser_calls_it_abnormal_when_only_the_device_overflows(parsed: Any) -> None:
    code, (softmax, product, total) = parsed("npu")
    assert code == 1
    assert softmax.startswith("The Functional_softmax_3_forward overflow is a normal overflow. Functional*softmax*3 ")
    assert product.startswith("The Torch_cumsum_0_forward overflow is an abnormal overflow. ")
    assert total == "2 APIs on npu: 1 normal, 1 abnormal, 0 unknown, 0 finite"


@everywhere
def test_the_parser_takes_backward_overflows_too(ran: Run, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ran(device).folder / "gradient"
    (forward,), (backward,) = folder.glob("forward_info_*.json"), folder.glob("backward_info_*.json")
    assert list(read_strictly(forward)) == list(read_strictly(backward)) == ["Functional*conv2d*1"]
    (found,) = check_overflow(forward, backward, device="cpu")
    assert (found.call, found.direction, found.verdict) == ("Functional.conv2d.1.backward", "backward", "normal")
    assert main(["-forward", str(forward), "-backward", str(backward)]) == 0
    assert capsys.readouterr().out.startswith("The Functional_conv2d_1_backward overflow is a normal overflow. ")
    assert main(["-forward", str(forward)]) == 0
    assert "Functional*conv2d*1 forward: finite: it does not overflow on cpu" in capsys.readouterr().out


# One process, the smallest programs.


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    yield torch.nn.Linear(2, 2)
    dump._end_overflow()


def stopped_by(message: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(message))


SCORES = torch.arange(9.0).reshape(3, 3)
FUTURE = torch.ones(3, 3, dtype=torch.bool).triu(1)
MASKS: dict[str, Callable[[], torch.Tensor]] = {
    "masked_fill": lambda: SCORES.masked_fill(FUTURE, float("-inf")),
    "additive": lambda: SCORES + torch.full((3, 3), float("-inf")).triu(1),
    "where": lambda: torch.where(FUTURE, float("-inf"), SCORES),
    "lowest": lambda: SCORES.masked_fill(FUTURE, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("masked", MASKS.values(), ids=MASKS)
def test_the_infinities_of_a_mask_are_not_counted_and_the_nan_behind_it_is(
    masked: Callable[[], torch.Tensor], model: torch.nn.Module, tmp_path: Path
) -> None:
    """Defect 7 of the older tools: the mask was blamed, and hid the true NaN."""
    ptdbg.register_hook(model, ptdbg.overflow_check)
    weights = F.softmax(masked(), dim=-1)
    assert read_rank(tmp_path) == []
    with stopped_by("[overflow 1 times]: dump file is saved in "):
        torch.log(weights - 2.0)
    (overflow,) = read_rank(tmp_path)
    assert overflow.call == "Torch_log_0_forward"
    assert numpy.isnan(overflow.arrays["Torch_log_0_forward_output"]).all()


def test_the_switch_turns_the_check_off_and_on(model: torch.nn.Module, tmp_path: Path) -> None:
    ptdbg.set_overflow_check_switch("OFF")
    ptdbg.register_hook(model, ptdbg.overflow_check)
    torch.ones(2).div(0.0)
    ptdbg.set_overflow_check_switch("ON")
    ptdbg.set_overflow_check_switch("OFF")
    assert active_probe() is None
    torch.ones(2).div(0.0)
    ptdbg.set_overflow_check_switch("ON")
    with stopped_by("[overflow 1 times]"):
        torch.ones(2).div(0.0)
    torch.ones(2).div(0.0)  # the training was ended once, and whoever caught that is left alone
    ptdbg.set_overflow_check_switch("OFF")
    assert active_probe() is None
    assert [overflow.call for overflow in read_rank(tmp_path)] == ["Tensor_div_0_forward"]


def test_a_rank_counts_for_itself_from_switch_to_switch(model: torch.nn.Module, tmp_path: Path) -> None:
    ptdbg.set_dump_path("./here/any.pkl", dump_tag="run")
    ptdbg.register_hook(model, ptdbg.overflow_check, overflow_nums=2, rank=3)
    torch.ones(2).div(0.0)
    rank = tmp_path / "here" / "run_v1.0" / "rank3"
    (first,) = [read_overflow(pkl) for pkl in rank.glob("*.pkl")]  # at once, before anything has ended
    assert first.call == "Tensor_div_0_forward"
    (forward,) = tmp_path.glob(f"forward_info_{os.getpid()}.json")
    assert list(read_strictly(forward)) == ["Tensor*div*0"]
    ptdbg.set_overflow_check_switch("OFF")
    ptdbg.set_overflow_check_switch("ON")
    with stopped_by("[overflow 2 times]"):
        torch.zeros(2).log().exp().reciprocal()
    assert sorted(pkl.stem.rpartition("_")[2] for pkl in rank.glob("*.pkl")) == ["1", "2"]


def test_the_filter_keeps_scalars_and_integers_out(model: torch.nn.Module, tmp_path: Path) -> None:
    place = torch.tensor([0, 1])
    ptdbg.register_hook(model, ptdbg.overflow_check, overflow_nums=2)
    torch.index_add(torch.full((2,), 3e38), 0, place, torch.full((2,), 3e38))
    ptdbg.set_overflow_check_switch("ON", filter_switch="OFF")
    with stopped_by("[overflow 2 times]"):
        torch.index_add(torch.full((2,), 3e38), 0, place, torch.full((2,), 3e38), alpha=2)
    filtered, whole = read_rank(tmp_path)
    assert {dtype for dtype, _ in filtered.lines.values()} == {"torch.float32"}
    assert {"torch.int64", "<class 'int'>"} <= {dtype for dtype, _ in whole.lines.values()}
    assert whole.lines[f"{whole.call}_input.kwargs.alpha"] == ["<class 'int'>", "[]"]
    assert whole.arrays[f"{whole.call}_input.kwargs.alpha"] == 2


def test_bfloat16_is_widened_and_its_line_says_so(model: torch.nn.Module, tmp_path: Path) -> None:
    ptdbg.register_hook(model, ptdbg.overflow_check)
    with stopped_by("[overflow 1 times]"):
        torch.ones(2, dtype=torch.bfloat16).div(0.0)
    (overflow,) = read_rank(tmp_path)
    assert overflow.lines["Tensor_div_0_forward_output"] == ["torch.bfloat16", [2]]
    assert overflow.arrays["Tensor_div_0_forward_output"].dtype == numpy.float32


def test_a_dump_that_cannot_be_written_is_not_called_saved(model: torch.nn.Module, tmp_path: Path) -> None:
    ptdbg.register_hook(model, ptdbg.overflow_check)
    rank = tmp_path / "ptdbg_dump_v1.0" / "rank0"
    rank.rmdir()
    rank.write_text("in the way")
    with stopped_by("[overflow 1 times]: Tensor_div_0_forward overflowed; its dump file could not be saved: "):
        torch.ones(2).div(0.0)


def test_a_dump_and_a_check_do_not_run_at_the_same_time(model: torch.nn.Module) -> None:
    ptdbg.register_hook(model, ptdbg.overflow_check)
    with pytest.raises(SettingsError, match=r"the overflow check is on\. Call set_overflow_check_switch\(\"OFF\"\)"):
        dump._begin(dump.Target(model, Path("x.pkl"), 0, 1, None), dump.Order("all", (), (), False, ("forward",)))
    ptdbg.register_hook(model, ptdbg.acc_cmp_dump)  # ends the check
    ptdbg.set_dump_switch("ON")
    torch.ones(2).div(0.0)
    ptdbg.set_dump_switch("OFF")
    assert not list(Path().rglob("Overflow_info*"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overflow_nums": 0}, SettingsError, "overflow_nums is 0; it must be a whole number from 1"),
        ({"overflow_nums": "2"}, SettingsError, "overflow_nums is '2'"),
        ({"overflow_num": 2}, UnknownSetting, "Did you mean 'overflow_nums'?"),
        ({"dump_mode": "acl"}, SettingsError, "dump_mode='acl' needs dump_config="),
        ({"dump_mode": "acl", "dump_config": "none.json"}, SettingsError, "none.json' cannot be read"),
    ],
)
def test_wrong_options_are_refused_before_training(
    options: dict[str, Any], error: type[Exception], message: str, model: torch.nn.Module
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ptdbg.register_hook(model, ptdbg.overflow_check, **options)
    assert active_probe() is None


def test_wrong_switches_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"switch of set_overflow_check_switch is 'on'; it must be \"ON\" or \"OFF\""
    ):
        ptdbg.set_overflow_check_switch("on")
    with pytest.raises(SettingsError, match="filter_switch of set_overflow_check_switch is 1"):
        ptdbg.set_overflow_check_switch("ON", filter_switch=1)  # type: ignore[arg-type]


def test_the_parser_draws_values_that_were_not_recorded_and_says_so(tmp_path: Path) -> None:
    """Files of the older tool: names with underscores, statistics instead of values."""
    large = tensor(Max=3e38, Min=2e38)
    forward = write_dump(tmp_path, {"Torch_add_4_forward": {"args": [large, large], "kwargs": {}}})
    (found,) = check_overflow(forward, device="cpu")
    assert (found.call, found.verdict) == ("Torch.add.4.forward", "normal")
    assert found.reason.endswith("(with random values of the recorded range: its own were not recorded)")


def test_the_parser_says_what_it_cannot_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward = write_dump(
        tmp_path,
        {"Torch*nothing*0": {"args": [tensor()], "kwargs": {}}, "Torch*add*0": {"args": 7}},
        {"Torch*add*1": [tensor()]},
    )
    assert main(["-forward", str(forward), "-backward", str(tmp_path / "backward_info_7.json")]) == 2
    out = capsys.readouterr().out
    assert "Torch*nothing*0 forward: unknown: " in out
    assert "Torch*add*1 backward: unknown: its forward, with its arguments, is not in the forward file" in out
    assert re.search(r"^unknown: .*forward_info_7.json, entry 2: .*args must be a list", out, re.MULTILINE)
    assert "3 APIs on cpu: 0 normal, 0 abnormal, 3 unknown, 0 finite" in out
    assert main(["-forward", str(tmp_path / "absent.json")]) == 2
    assert "no file" in capsys.readouterr().err

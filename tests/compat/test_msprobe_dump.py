"""PrecisionDebugger as msprobe's scripts use it: what stands on disk for each task and level, and every wrong setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import msprobe.pytorch as msprobe
from tensorprobe import open_run
from tensorprobe.errors import CaptureIncomplete
from tensorprobe.model.sink import CallRules, Needs
from tensorprobe.record.run import Run
from tensorprobe.record.run_sink import RunSink
from tensorprobe.taps.probe import Probe
from tests.compat.msprobe_net import (
    HERE,
    dump,
    files_of,
    forget_debugger,
    index,
    make_net,
    names,
    train,
)


@pytest.fixture
def end_debugger() -> Iterator[None]:
    yield
    forget_debugger()


pytestmark = pytest.mark.usefixtures("end_debugger")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Everything of two steps, with values."""
    folder = tmp_path_factory.mktemp("mix")
    run = dump(folder, task="tensor", level="mix", steps=2)
    return folder, run


def test_the_files_are_those_of_the_older_tool(whole: tuple[Path, Run]) -> None:
    folder, _ = whole
    head = index(folder)
    data = head.pop("data")
    values = folder / "dump" / "step0" / HERE / "dump_tensor_data"
    assert head.pop("tool") == "tensorprobe"
    assert head == {"task": "tensor", "level": "mix", "framework": "pytorch", "dump_data_dir": str(values)}
    forward = data["Functional.linear.0.forward"]
    assert list(forward) == ["input_args", "input_kwargs", "output"]
    assert list(forward["input_args"][0]) == [
        *("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad", "data_name"),
    ]
    assert forward["output"][0]["data_name"] == "Functional.linear.0.forward.output.0.pt"
    assert [len(data["Functional.linear.0.backward"][side]) for side in ("input", "output")] == [1, 3]
    module = data["Module.block.up.Linear.forward.0"]
    assert list(module["parameters"]) == ["weight", "bias"]
    assert module["parameters"]["bias"]["data_name"] == "Module.block.up.Linear.forward.0.parameters.bias.pt"
    gradients = data["Module.block.up.Linear.parameters_grad.0"]
    assert gradients["weight"][0]["data_name"] == "Module.block.up.Linear.parameters_grad.0.weight.pt"
    block = data["Module.block.Block.forward.0"]
    assert block["input_kwargs"] == {"scale": {"type": "float", "value": 0.5}}
    assert block["output"][0]["y"]["shape"] == [2, 6]
    parents = index(folder, file="construct.json")
    assert parents["Functional.linear.0.forward"] == "Module.block.up.Linear.forward.0"
    assert parents["Module.block.Block.forward.0"] is None
    assert "Module.Net.forward.0" not in parents, "the modules in the model are dumped, not the model"
    stacks = {name: lines for held, lines in index(folder, file="stack.json").values() for name in held}
    assert stacks["Functional.gelu.0.forward"][0].endswith(', in forward, \n return {"y": F.gelu(self.up(x)) * scale}')
    assert {str(path.name) for path in values.iterdir()} == set(files_of(data))


def test_operators_have_the_names_that_python_gives_them(whole: tuple[Path, Run]) -> None:
    found = [name for name in index(whole[0])["data"] if name.startswith("Tensor.") and name.endswith(".forward")]
    assert found == [
        "Tensor.__add__.0.forward",
        "Tensor.__mul__.0.forward",
        "Tensor.add.0.forward",
        "Tensor.__rmul__.0.forward",
        "Tensor.__add__.1.forward",
        "Tensor.__gt__.0.forward",
    ]


def test_values_statistics_and_gradients_are_those_of_a_run(whole: tuple[Path, Run], tmp_path: Path) -> None:
    """Both steps, call by call, against what tensorprobe records itself."""
    net = make_net()
    sink = RunSink(tmp_path / "run", needs=Needs(rules=CallRules(operators=True)))
    with Probe(tmp_path / "run", model=net, level="mix", sink=sink) as probe:
        for _ in range(2):
            train(net)
            probe.step()
    native = open_run(tmp_path / "run")
    compared = 0
    for step in (0, 1):
        for call in whole[1].calls(step, 0):
            own = native.call(call.name, step=step, rank=0)
            theirs = {slot.name.replace("input.kwargs.", "input."): slot for slot in own.slots}
            theirs |= {name.replace("put.y", "put.0.y"): slot for name, slot in theirs.items()}
            for slot in call.slots:
                other = theirs[slot.name.replace("input.kwargs.", "input.")]
                assert torch.equal(slot.tensor(), other.tensor()), slot
                assert slot.grad == other.grad
                compared += 1
        assert {*names(whole[1])} < {*names(native)}
    assert compared > 100


def test_infinities_and_nan_are_json_and_are_read_back(whole: tuple[Path, Run]) -> None:
    text = (whole[0] / "dump" / "step0" / HERE / "dump.json").read_text()
    assert '"Min":-1e999' in text
    (minus_infinity,) = [slot for slot in whole[1].call("Torch.where.0.forward", step=0).inputs if slot.shape == ()]
    summary = minus_infinity.summary
    assert summary is not None and summary.max == float("-inf") and summary.inf


def test_training_is_the_same_to_the_last_bit(whole: tuple[Path, Run], tmp_path: Path) -> None:
    net, plain = make_net(), make_net()
    loss = train(plain)
    debugger = msprobe.PrecisionDebugger(dump_path=str(tmp_path / "dump"), level="mix", task="tensor")
    debugger.start(net)
    assert torch.equal(train(net), loss)
    debugger.stop()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


LEVELS: dict[str, Callable[[str], bool]] = {
    "L0": lambda name: name.startswith("Module."),
    "L1": lambda name: not name.startswith(("Module.", "Aten.")),
    "L2": lambda name: name.startswith("Aten."),
}


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_has_its_calls(level: str, tmp_path: Path) -> None:
    run = dump(tmp_path, {"file_format": "npy"} if level == "L0" else None, task="tensor", level=level)
    found = names(run)
    assert len(found) > 5 and all(map(LEVELS[level], found))
    assert all(slot.has_data or slot.skipped for call in run.calls() for slot in call.slots)
    assert (index(tmp_path, file="construct.json") == {}) == (level == "L1")
    suffixes = {Path(name).suffix for name in files_of(index(tmp_path)["data"])}
    assert suffixes == {".npy" if level == "L0" else ".pt"}


def test_level_l2_has_the_aten_calls_of_the_api_calls_that_list_names(tmp_path: Path) -> None:
    run = dump(
        tmp_path, {"list": ["Functional.linear.1.forward", "Functional.gelu.0.backward"]}, task="tensor", level="L2"
    )
    ops = {name.split(".")[1] for name in names(run)}
    assert "mm" in ops and "gelu_backward" in ops and "_softmax" not in ops
    parents = index(tmp_path, file="construct.json")
    assert "Functional.linear.1.forward" in parents.values()


def test_statistics_keep_no_values_but_of_the_calls_in_tensor_list(tmp_path: Path) -> None:
    run = dump(tmp_path, {"summary_mode": "md5", "tensor_list": ["gelu"]})
    held = {call.name for call in run.calls() for slot in call.slots if slot.has_data}
    assert held == {"Functional.gelu.0.forward", "Functional.gelu.0.backward"}
    assert all(slot.digest for call in run.calls() for slot in call.slots if not slot.skipped)


def test_structure_has_names_parents_and_stacks(tmp_path: Path) -> None:
    run = dump(tmp_path, task="structure", level="L1")
    assert index(tmp_path)["level"] == "mix"
    call = run.call("Functional.gelu.0.forward")
    assert call.module == "block" and call.stack is not None
    assert all(slot.summary is None for slot in call.slots)


@pytest.mark.process
def test_run_ut_data_can_be_checked(tmp_path: Path) -> None:
    from tensorprobe import precheck

    dump(tmp_path, {"white_list": [], "black_list": [], "list": ["gelu"]}, task="run_ut")
    result = precheck(tmp_path / "dump", jobs=1)
    assert result.exit_code == 0
    assert [check.call for check in result.checks] == ["Functional.gelu.0.forward"]


MODES = {
    ("forward",): {"forward.input", "forward.output"},
    ("input",): {"forward.input", "backward.input"},
    ("backward", "input"): {"forward.input", "backward.input", "backward.output"},
}


@pytest.mark.parametrize("modes", MODES)
def test_data_mode_adds_up(modes: tuple[str, ...], tmp_path: Path) -> None:
    dump(tmp_path, {"data_mode": list(modes), "list": ["linear"]})
    found = {
        f"{name.rpartition('.')[2]}.{side.removesuffix('_args').removesuffix('_kwargs')}"
        for name, entry in index(tmp_path)["data"].items()
        for side in entry
    }
    assert found == MODES[modes]


def test_list_takes_texts_and_modules_with_what_is_in_them(tmp_path: Path) -> None:
    run = dump(tmp_path, {"list": ["Module.block.up.Linear", "softmax.0"]}, level="mix")
    assert set(names(run)) == {
        *("Module.block.up.Linear.forward.0", "Module.block.up.Linear.backward.0"),
        *("Functional.linear.0.forward", "Functional.linear.0.backward"),
        *("Torch.softmax.0.forward", "Torch.softmax.0.backward"),
    }


def test_what_support_wrap_ops_leaves_out_is_not_dumped(tmp_path: Path) -> None:
    (tmp_path / "ops.yaml").write_text("functional:\n  # - gelu\n  - linear\ntensor:\n  # - __add__\n")
    found = names(dump(tmp_path, support_wrap_ops=str(tmp_path / "ops.yaml")))
    assert "Functional.linear.1.forward" in found and "Tensor.__mul__.0.forward" not in found
    assert not [name for name in found if "gelu" in name or "add" in name]


def test_scope_goes_from_the_first_call_to_the_end_of_the_last(tmp_path: Path) -> None:
    run = dump(tmp_path, {"scope": ["Tensor.__add__.0.forward", "Module.block.Block.forward.0"]}, level="mix")
    assert names(run) == [
        "Tensor.__add__.0.forward",
        "Functional.linear.0.forward",
        "Module.block.up.Linear.forward.0",
        "Functional.gelu.0.forward",
        "Tensor.__mul__.0.forward",
        "Module.block.Block.forward.0",
    ]


def test_names_that_match_nothing_are_told(tmp_path: Path) -> None:
    with pytest.warns(CaptureIncomplete, match="nothing matched 'lineal'"):
        dump(tmp_path, {"list": ["lineal", "gelu"]})

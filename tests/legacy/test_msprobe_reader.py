"""Dumps of msprobe give the same `Run` as our own format does, and what is wrong with them is told."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorprobe
from tensorprobe.errors import RunDamaged, RunNotFound
from tensorprobe.legacy.layouts.msprobe_entries import quote_bare
from tensorprobe.legacy.layouts.msprobe_reader import open_msprobe
from tensorprobe.model import Frame, Summary
from tensorprobe.record import open_run
from tests.builders.msprobe import conv_net, described, read_one, write_conv_net, write_dump

NAMES = [
    "Functional.conv2d.0.forward",
    "Module.conv.Conv2d.forward.0",
    "Tensor.__gt__.0.forward",
    "Tensor.masked_fill.0.forward",
    "Torch.max.0.forward",
    "Torch.max.0.backward",
    "Tensor.masked_fill.0.backward",
    "Functional.conv2d.0.backward",
    "Module.conv.Conv2d.backward.0",
]


# The calls


def test_calls_come_in_the_order_of_the_dump(tmp_path: Path) -> None:
    run = open_run(write_conv_net(tmp_path, steps=2))
    assert (run.steps, run.ranks, run.closed) == ([0, 1], [0], True)
    assert run.names(1, 0) == [call.name for call in run.calls(0)] == NAMES
    assert {call.name: call.level for call in run.calls(0)}["Module.conv.Conv2d.forward.0"] == "module"
    assert run.manifest.settings == {"mode": "tensor", "task": "tensor", "level": "mix", "framework": "pytorch"}


def test_slots_of_a_call_have_our_names_and_their_values(tmp_path: Path) -> None:
    call = open_run(write_conv_net(tmp_path)).call("Module.conv.Conv2d.forward.0")
    assert [slot.name for slot in call.slots] == ["input.0", "parameters.weight", "parameters.bias", "output.0"]
    assert [(slot.dtype, slot.shape, slot.grad) for slot in call.parameters] == [
        ("float32", (1, 1, 1, 1), True),
        ("float32", (1,), True),
    ]
    assert call.outputs[0].tensor().tolist() == [[[[5.0, 7.0], [9.0, 11.0]]]]
    assert call.outputs[0].numpy().tolist() == [[[[5.0, 7.0], [9.0, 11.0]]]]
    assert bytes(call.parameters[1].buffer()) == bytes.fromhex("0000a040")


def test_gradients_that_are_absent_leave_their_place_free(tmp_path: Path) -> None:
    call = open_run(write_conv_net(tmp_path)).call("Functional.conv2d.0.backward")
    assert [slot.name for slot in call.slots] == ["input.0", "output.1", "output.2"]
    assert (call.args, call.kwargs, call.direction) == (None, None, "backward")


def test_arguments_are_a_tree(tmp_path: Path) -> None:
    run = open_run(write_conv_net(tmp_path))
    conv, mask, most = (run.call(f"{op}.0.forward") for op in ("Functional.conv2d", "Tensor.masked_fill", "Torch.max"))
    assert conv.args == [*({"slot": f"input.{at}"} for at in range(3)), [1, 1], [0, 0], [1, 1], 1]
    assert conv.kwargs is None
    assert mask.args[2] == {"type": "float", "value": "-Infinity"}
    assert most.kwargs == {"dim": 1, "keepdim": True}


@pytest.mark.parametrize(
    ("written", "tree"),
    [
        ({"type": "str", "value": "NaN"}, "NaN"),
        ({"type": "bool", "value": False}, False),
        ({"type": "float", "value": math.nan}, {"type": "float", "value": "NaN"}),
        ({"type": "int", "value": 2**70}, {"type": "int", "value": str(2**70)}),
        ({"type": "float64", "value": 1.5}, 1.5),
        ({"type": "slice", "value": [None, 2, None]}, {"type": "slice", "value": [None, 2, None]}),
        ({"type": "ellipsis", "value": "..."}, {"type": "ellipsis", "value": None}),
        ({"type": "torch.Size", "value": [2, 3]}, {"type": "torch.Size", "value": [2, 3]}),
        ({"type": "torch.dtype", "value": "torch.float16"}, {"type": "torch.dtype", "value": "float16"}),
        ({"type": "torch.device", "value": "npu:0"}, {"type": "torch.device", "value": "npu:0"}),
        (
            {"type": "torch.memory_format", "format": "channels_last"},
            {"type": "torch.memory_format", "value": "channels_last"},
        ),
        ({"type": "torch.ProcessGroup", "group_ranks": [0, 1]}, {"type": "object", "value": "torch.ProcessGroup"}),
        ({"type": "numpy.ndarray", "dtype": "f4", "shape": [1]}, {"type": "object", "value": "numpy.ndarray"}),
        (None, None),
        ([1, [2.5, None]], [1, [2.5, None]]),
        ({"a": 1}, {"type": "dict", "value": {"a": 1}}),
        ({}, {"type": "object", "value": ""}),
    ],
)
def test_every_kind_of_argument_is_as_our_own_capture_writes_it(tmp_path: Path, written: Any, tree: Any) -> None:
    call = read_one(tmp_path, input_args=[written], input_kwargs={"key": written}, output=[])
    assert (call.args, call.kwargs) == ([tree], {"key": tree})


def test_tensors_in_lists_and_dicts_have_a_path(tmp_path: Path) -> None:
    one = torch.ones(1)
    operation = {"class_type": "torch.distributed.P2POp", "tensor": one, "peer": 1}
    call = read_one(
        tmp_path, input_args=[[one, [one]], [operation]], input_kwargs={"mask": one}, output={"logits": one}
    )
    names = ["input.0.0", "input.0.1.0", "input.1.0.tensor", "input.kwargs.mask", "output.logits"]
    assert [slot.name for slot in call.slots] == names
    assert call.args[0] == [{"slot": "input.0.0"}, [{"slot": "input.0.1.0"}]]


# Modules, gradients of parameters, stacks


def test_parents_and_modules_come_from_the_construct_file(tmp_path: Path) -> None:
    run = open_run(write_conv_net(tmp_path))
    places = {call.name: (call.parent, call.module) for call in run.calls()}
    assert places["Functional.conv2d.0.forward"] == ("Module.conv.Conv2d.forward.0", "conv")
    assert places["Module.conv.Conv2d.forward.0"] == (None, "conv")
    # The backward of the module had ended by then: its forward knows where the call belongs.
    assert places["Functional.conv2d.0.backward"] == (None, "conv")
    assert places["Torch.max.0.forward"] == (None, "")


def test_calls_in_calls_are_in_the_innermost_module(tmp_path: Path) -> None:
    construct = {
        "Torch.mm.0.forward": "Functional.linear.0.forward",
        "Functional.linear.0.forward": "Module.layers.0.mlp.Linear.forward.3",
        "Tensor.add_.0.forward": "optimizer",
        "Torch.mm.1.forward": "Torch.mm.1.forward",
        "Torch.mm.2.forward": "Module.Net.forward.0",
    }
    data = {name: {"input_args": [], "output": []} for name in construct}
    write_dump(tmp_path / "step0/rank0", data, construct=construct)
    places = {call.name: (call.parent, call.module) for call in open_run(tmp_path).calls()}
    assert places["Torch.mm.0.forward"] == ("Functional.linear.0.forward", "layers.0.mlp")
    assert places["Tensor.add_.0.forward"] == (None, "")  # an optimizer is no call
    assert places["Torch.mm.1.forward"] == ("Torch.mm.1.forward", "")  # a circle has an end
    assert places["Torch.mm.2.forward"] == ("Module.Net.forward.0", "")


def test_gradients_of_parameters_are_slots_of_the_backward_call(tmp_path: Path) -> None:
    run = open_run(write_conv_net(tmp_path))
    call = run.call("Module.conv.Conv2d.backward.0")
    assert [slot.name for slot in call.slots] == ["input.0", "parameters.weight", "parameters.bias"]
    assert call.parameters[0].tensor().item() == 3.0
    assert call.index == 8  # where the later of the two entries stands


def test_gradients_of_a_module_that_was_called_twice_are_a_call_of_their_own(tmp_path: Path) -> None:
    one = torch.ones(1)
    backward = {"input": [one], "output": [one]}
    data = {
        "Module.a.fc.Linear.backward.0": backward,
        "Module.a.fc.Linear.backward.1": backward,
        "Module.a.fc.Linear.parameters_grad.0": {"weight": [one]},
        "Module.b.Linear.parameters_grad": {"bias": [one]},
    }
    write_dump(tmp_path / "step0/rank0", data)
    calls = list(open_run(tmp_path).calls())
    assert [(call.name, call.module, [slot.name for slot in call.slots]) for call in calls[2:]] == [
        ("Module.a.fc.Linear.parameters_grad.backward.0", "a.fc", ["parameters.weight"]),
        ("Module.b.Linear.parameters_grad.backward.0", "b", ["parameters.bias"]),
    ]
    assert {call.direction for call in calls} == {"backward"}
    assert tensorprobe.compare(tmp_path, tmp_path).exit_code == 0


def test_stack_of_a_call_has_only_the_users_frames(tmp_path: Path) -> None:
    run = open_run(write_conv_net(tmp_path))
    stack = run.stack(run.call("Functional.conv2d.0.forward"))
    assert stack is not None
    assert stack.frames == (
        Frame("/home/you/net.py", 9, "forward", "x = self.conv(x)"),
        Frame("/home/you/net.py", 17, "<module>", "y, i = net(x)"),
    )
    shared = [run.call(f"Tensor.{op}.0.forward").stack for op in ("__gt__", "masked_fill")]
    assert shared == [2, 2]
    assert run.call("Torch.max.0.backward").stack is None


def test_stacks_under_the_name_of_each_call_are_read_too(tmp_path: Path) -> None:
    data, shared, construct = conv_net()
    old = {name: lines for names, lines in shared.values() for name in names}
    write_dump(tmp_path / "step0/rank0", data, stacks=old, construct=construct)
    run = open_run(tmp_path)
    stack = run.stack(run.call("Tensor.masked_fill.0.forward"))
    assert stack is not None
    assert stack.frames[0].line == 10


def test_stack_in_torch_alone_is_kept(tmp_path: Path) -> None:
    lines = ["File /x/site-packages/torch/optim/sgd.py, line 3, in step, \n p.add_(g)", "Without call stack"]
    write_dump(tmp_path / "step0/rank0", {"Torch.mm.0.forward": {}}, stacks={"Torch.mm.0.forward": lines})
    run = open_run(tmp_path)
    stack = run.stack(run.call("Torch.mm.0"))
    assert stack is not None
    assert [frame.function for frame in stack.frames] == ["step"]


# Where a dump is


@pytest.mark.parametrize("chosen", ["", "step3", "step3/rank2", "step3/rank2/dump.json"])
def test_dump_step_rank_and_file_open_the_same_calls(tmp_path: Path, chosen: str) -> None:
    data, stacks, construct = conv_net()
    write_dump(tmp_path / "step3/rank2", data, stacks=stacks, construct=construct)
    run = open_run(tmp_path / chosen)
    assert run.segments() == [(3, 2)]
    assert run.names(3, 2) == NAMES
    assert run.call("Torch.max.0.forward").outputs[0].tensor().shape == (1, 1, 2, 2)
    assert run.one_rank is (chosen.count("/") > 0)


def test_processes_without_a_rank_are_numbered_in_order(tmp_path: Path) -> None:
    for at, process in enumerate((9, 10, 200)):
        write_dump(tmp_path / f"step0/proc{process}", {f"Torch.mm.{at}.forward": {}})
    run = open_run(tmp_path)
    assert run.segments() == [(0, 0), (0, 1), (0, 2)]
    assert [run.names(0, rank) for rank in range(3)] == [[f"Torch.mm.{at}.forward"] for at in range(3)]


def test_folder_names_that_say_nothing_are_step_and_rank_0(tmp_path: Path) -> None:
    write_dump(tmp_path / "mine", {"Torch.mm.0.forward": {}})
    write_dump(tmp_path / "step7/rank", {"Torch.mm.0.forward": {}})
    assert open_run(tmp_path / "mine").segments() == [(0, 0)]
    assert open_run(tmp_path).segments() == open_run(tmp_path / "step7/rank").segments() == [(7, 0)]


def test_two_folders_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("rank", "rank0"):
        write_dump(tmp_path / "step0" / name, {"Torch.mm.0.forward": {}})
    with pytest.raises(RunDamaged, match="holds both 'rank' and 'rank0'; both are rank 0"):
        open_run(tmp_path)


def test_other_folders_are_no_dump_of_msprobe(tmp_path: Path) -> None:
    (tmp_path / "step0/rank0").mkdir(parents=True)
    (tmp_path / "dump.json").write_text('{\n "dump": {"dump_list": [], "dump_path": "/x", "dump_mode": "all"}}')
    assert open_msprobe(tmp_path) is None
    assert open_msprobe(tmp_path / "step0") is None
    assert open_msprobe(tmp_path / "absent") is None
    with pytest.raises(RunNotFound):
        open_run(tmp_path / "step0")


# Statistics and digests


def summary_of(tmp_path: Path, **entry: Any) -> Summary | None:
    return read_one(tmp_path, input_args=[], output=[described(**entry)]).outputs[0].summary


def test_statistics_are_the_summary(tmp_path: Path) -> None:
    assert summary_of(tmp_path, Mean=1.5, Norm=2.25) == Summary(2.0, 1.0, 1.5, 2.25, 0, 0)


def test_norm_of_a_single_number_is_its_size(tmp_path: Path) -> None:
    assert summary_of(tmp_path, shape=[], Max=-3, Min=-3, Mean=-3, Norm=-3) == Summary(-3.0, -3.0, -3.0, 3.0, 0, 0)


def test_bool_and_integer_tensors_have_no_mean_and_norm(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, dtype="torch.bool", Max=True, Min=False, Mean=None, Norm=None)
    assert summary is not None
    assert (summary.max, summary.min, summary.nan, summary.inf) == (1.0, 0.0, 0, 0)
    assert math.isnan(float(summary.mean))
    assert math.isnan(float(summary.norm))


@pytest.mark.parametrize(
    ("ends", "counts"),
    [((math.inf, 1.0), (0, -1)), ((1.0, -math.inf), (0, -1)), ((math.nan, math.nan), (-1, -1))],
)
def test_infinities_and_nan_that_were_not_counted_are_some(
    tmp_path: Path, ends: tuple[float, float], counts: tuple[int, int]
) -> None:
    summary = summary_of(tmp_path, Max=ends[0], Min=ends[1], Mean=math.nan, Norm=math.inf)
    assert summary is not None
    assert (summary.nan, summary.inf) == counts
    assert math.isnan(float(summary.norm))


def test_tensor_without_elements_needs_no_file(tmp_path: Path) -> None:
    call = read_one(tmp_path, input_args=[], output=[described(shape=[0, 3], Max=None, Min=None, data_name="never.pt")])
    assert call.outputs[0].tensor().shape == (0, 3)
    assert call.outputs[0].summary.nan == 0


def test_tensor_of_which_nothing_was_recorded_says_so(tmp_path: Path) -> None:
    call = read_one(tmp_path, input_args=[], output=[described(Max=None, Min=None, md5=12345)])
    assert call.outputs[0].skipped == "msprobe recorded neither its values nor their statistics"


@pytest.mark.parametrize(
    ("md5", "digest"),
    [("d667cbf7", "crc32:d667cbf7"), ("0" * 32, "md5:" + "0" * 32), (None, None), (77, None), ("no digest", None)],
)
def test_digest_says_its_kind(tmp_path: Path, md5: Any, digest: str | None) -> None:
    assert read_one(tmp_path, input_args=[], output=[described(md5=md5)]).outputs[0].digest == digest


# Text


@pytest.mark.parametrize("indent", [1, None])
def test_bare_nan_and_infinity_are_read_and_texts_left_alone(tmp_path: Path, indent: int | None) -> None:
    texts = ["NaN", 'x", NaN, "', "\\", '\\" NaN, -Infinity ', "a\n: Infinity,"]
    entry = {"input_args": [*texts, math.nan, math.inf, -math.inf], "output": [described(Max=math.nan)] * 40}
    write_dump(tmp_path / "step0/rank0", {"Torch.mm.0.forward": entry}, indent=indent)
    named = [{"type": "float", "value": value} for value in ("NaN", "Infinity", "-Infinity")]
    assert open_run(tmp_path).call("Torch.mm.0").args == [*texts, *named]


def test_strict_json_is_left_as_it_is() -> None:
    raw = json.dumps({"NaN": ["Infinity", '\\"NaN'], "b": 1}, indent=1).encode()
    assert quote_bare(raw) == raw
    assert quote_bare(b"[NaN,-Infinity , Infinity]") == b'["NaN","-Infinity" , "Infinity"]'


# Comparing


def test_dump_agrees_with_itself(tmp_path: Path) -> None:
    result = tensorprobe.compare(write_conv_net(tmp_path / "a", steps=2), write_conv_net(tmp_path / "b", steps=2))
    assert result.exit_code == 0
    assert (result.summary.buckets.paired, result.summary.findings_total) == (2 * len(NAMES), 0)
    assert result.summary.bases["values"] == result.summary.rows > 0


@pytest.mark.parametrize(
    ("settings_of_both", "basis"),
    [({}, "values"), ({"task": "statistics"}, "statistics"), ({"task": "statistics", "md5": True}, "statistics")],
)
def test_planted_difference_is_named(tmp_path: Path, settings_of_both: dict[str, Any], basis: str) -> None:
    one = write_conv_net(tmp_path / "a", **settings_of_both)
    other = write_conv_net(tmp_path / "b", error=0.25, **settings_of_both)
    result = tensorprobe.compare(one, other)
    assert result.exit_code == 1
    first = result.divergence
    assert first is not None
    assert (first.call, first.status, first.module) == ("Functional.conv2d.0.forward", "introduced", "conv")
    assert first.source == Frame("/home/you/net.py", 9, "forward", "x = self.conv(x)")
    assert first.row is not None
    assert (first.row.slot, first.row.basis) == ("output.0", basis)


def test_parameter_that_differs_is_named(tmp_path: Path) -> None:
    result = tensorprobe.compare(write_conv_net(tmp_path / "a"), write_conv_net(tmp_path / "b", weight=2.5))
    assert [(external.kind, external.name) for external in result.summary.externals] == [("parameter", "conv.weight")]


def test_equal_digests_need_no_values(tmp_path: Path) -> None:
    one, other = (write_conv_net(tmp_path / name, task="statistics", md5=True) for name in "ab")
    result = tensorprobe.compare(one, other)
    assert (result.exit_code, result.summary.bases["digest"]) == (0, result.summary.rows)


def test_values_meet_statistics_where_one_side_has_no_more(tmp_path: Path) -> None:
    one, other = write_conv_net(tmp_path / "a"), write_conv_net(tmp_path / "b", task="statistics")
    result = tensorprobe.compare(one, other)
    assert (result.exit_code, result.summary.bases["statistics"]) == (0, result.summary.rows)


def test_file_that_is_lost_is_told_and_the_rest_compared(tmp_path: Path) -> None:
    one, other = write_conv_net(tmp_path / "a"), write_conv_net(tmp_path / "b")
    (other / "step0/proc77/dump_tensor_data/Torch.max.0.forward.output.0.pt").unlink()
    result = tensorprobe.compare(one, other)
    notes = {row.call: row.note for row in result.rows if row.note}
    assert notes == {"Torch.max.0.forward": "damaged: its file 'Torch.max.0.forward.output.0.pt' is missing"}
    assert result.summary.bases["statistics"] == 1


def test_npy_files_hold_values_too(tmp_path: Path) -> None:
    data, _, _ = conv_net()
    write_dump(tmp_path / "a/step0/rank0", {name: data[name] for name in list(data)[:2]}, form=".npy")
    write_dump(tmp_path / "b/step0/rank0", {name: data[name] for name in list(data)[:2]})
    assert open_run(tmp_path / "a").call("Functional.conv2d.0").outputs[0].tensor().flatten().tolist() == [5, 7, 9, 11]
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert (result.exit_code, result.summary.bases["values"]) == (0, result.summary.rows)


def test_reading_and_comparing_plain_tensors_does_not_import_torch(tmp_path: Path) -> None:
    write_conv_net(tmp_path)
    program = (
        "import sys, tensorprobe; run = tensorprobe.open_run(sys.argv[1]); calls = list(run.calls(0, 0));"
        "listed = {'torch', 'numpy'} & set(sys.modules); result = tensorprobe.compare(sys.argv[1], sys.argv[1]);"
        "print(listed, result.exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "set() 0 False\n"


def test_only_two_segments_keep_their_files(tmp_path: Path) -> None:
    run = open_run(write_conv_net(tmp_path, steps=4))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    slots = [call.outputs[0] for call in run.calls() if call.outputs]
    held = [slot.tensor() for slot in slots] + [slot.tensor() for slot in reversed(slots)]
    assert len(held) == 2 * len(slots) > 20
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208
    kept = [run.segment(step, 0)._dump is not None for step in range(4)]  # type: ignore[attr-defined]
    assert kept == [True, True, False, False]

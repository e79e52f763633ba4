"""Dumps of ptdbg_ascend, written by hand: what they say is what a Run gives, and comparing two of them finds the call."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli.main import app
from tensorprobe.errors import NoData, RunDamaged, RunError, RunNotFound, SettingsError, TensorDamaged
from tensorprobe.legacy.layouts.ptdbg_lines import TensorLine
from tensorprobe.legacy.layouts.ptdbg_reader import PtdbgSegment
from tensorprobe.legacy.layouts.ptdbg_reader import open_run as open_dump
from tensorprobe.record import Damage, Run, export_run, open_run
from tests.builders import runs as made_runs
from tests.builders.ptdbg import Line, bare, number, stack, tensor, write_dump, write_rank

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
FRAMES = (["model.py", "12", "forward", "y = x * w"], ["train.py", "3", "<module>", "model(x)"])


def net(*, fault: float = 0.0, stacks: bool = False) -> list[Line]:
    """x * w, relu, sum, and a backward; with a fault in the relu."""
    y = X * W
    z = np.maximum(y, 0)
    z[2, 3] += fault
    lines = [
        tensor("Tensor_mul_0_forward_input.0", X),
        tensor("Tensor_mul_0_forward_input.1", W),
        tensor("Tensor_mul_0_forward_output", y),
        tensor("Functional_relu_0_forward_input.0", y),
        tensor("Functional_relu_0_forward_output", z),
        tensor("Tensor_sum_0_forward_input.0", z),
        tensor("Tensor_sum_0_forward_output", z.sum()),
        tensor("Functional_relu_0_backward_input.0", np.ones_like(z)),
        tensor("Functional_relu_0_backward_output.0", (z > 0).astype(np.float32)),
    ]
    if stacks:
        lines.insert(3, stack("Tensor_mul_0_forward", *FRAMES))
        lines.insert(4, stack("Functional_relu_0_forward", *FRAMES))
    return lines


def test_dump_is_a_run_of_one_step(tmp_path: Path) -> None:
    run = open_run(write_dump(tmp_path / "npu_v1.0", {10: net(), 2: net(), 0: net()}))
    assert run.steps == [0]
    assert run.ranks == [0, 2, 10]
    assert list(run.parts) == [0, 2, 10]
    assert run.closed
    assert run.manifest.tool == "ptdbg_ascend"
    assert run.manifest.settings == {"mode": "tensor"}
    assert run.names(0, 2) == [
        "Tensor.mul.0.forward",
        "Functional.relu.0.forward",
        "Tensor.sum.0.forward",
        "Functional.relu.0.backward",
    ]
    mul = run.call("Tensor.mul.0", rank=10)
    assert [(slot.name, slot.dtype, slot.shape, slot.nbytes) for slot in mul.slots] == [
        ("input.0", "float32", (4, 6), 96),
        ("input.1", "float32", (4, 6), 96),
        ("output.0", "float32", (4, 6), 96),
    ]
    np.testing.assert_array_equal(mul.outputs[0].numpy(), X * W)
    assert mul.outputs[0].summary.max == float((X * W).max())
    assert [call.name for call in run.find("Functional.relu.0", rank=0)] == [
        "Functional.relu.0.forward",
        "Functional.relu.0.backward",
    ]
    assert run.segment(0, 0).size_bytes() == sum(file.stat().st_size for file in tmp_path.rglob("rank0/*/*.npy"))


def test_rank_folder_and_pkl_are_opened_too(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "npu_v1.0", {3: net()})
    for path in (dump / "rank3", dump / "rank3" / "npu_dump.pkl"):
        run = open_run(path)
        assert (run.ranks, run.one_rank) == ([3], True)
        np.testing.assert_array_equal(run.call("Tensor.mul.0").inputs[0].numpy(), X)
    flat = write_rank(tmp_path / "flat", net(), data="npu_dump_20230104_13434")
    for path in (flat, flat.parent):
        run = open_run(path)
        assert run.ranks == [0]
        np.testing.assert_array_equal(run.call("Tensor.mul.0").inputs[0].numpy(), X)
    link = tmp_path / "chosen.pkl"
    link.symlink_to(flat)
    np.testing.assert_array_equal(open_run(link).call("Tensor.mul.0").inputs[1].numpy(), W)


def test_values_in_a_folder_elsewhere(tmp_path: Path) -> None:
    pkl = write_rank(tmp_path / "rank1", net())
    (tmp_path / "rank1" / "npu_dump").rename(tmp_path / "values")
    assert not open_run(pkl).call("Tensor.mul.0").inputs[0].has_data
    run = open_run(pkl, data=tmp_path / "values")
    np.testing.assert_array_equal(run.call("Tensor.mul.0").inputs[0].numpy(), X)
    with pytest.raises(RunNotFound, match=r"no folder '.*nowhere'"):
        open_run(pkl, data=tmp_path / "nowhere")
    dump = write_dump(tmp_path / "npu_v1.0", {0: net(), 1: net()})
    with pytest.raises(SettingsError, match="holds 2 ranks"):
        open_run(dump, data=tmp_path / "values")


def test_several_folders_of_values_are_not_guessed_at(tmp_path: Path) -> None:
    pkl = write_rank(tmp_path, net(), data="npu_dump_20230104_13434")
    (tmp_path / "npu_dump_20230105_10000").mkdir()
    with pytest.raises(RunError, match=r"2 folders: npu_dump_20230104_13434, npu_dump_20230105_10000"):
        open_run(pkl)
    assert open_run(pkl, data=tmp_path / "npu_dump_20230104_13434").call("Tensor.mul.0").inputs[0].has_data
    (tmp_path / "npu_dump").mkdir()  # the newer layout's own folder goes before
    with pytest.raises(TensorDamaged, match="is missing"):
        open_run(pkl).call("Tensor.mul.0").inputs[0].numpy()


def test_several_pkls_of_a_rank_are_listed(tmp_path: Path) -> None:
    write_rank(tmp_path / "d_v1.0" / "rank0", net())
    write_rank(tmp_path / "d_v1.0" / "rank0", net(), name="again")
    for path in (tmp_path / "d_v1.0", tmp_path / "d_v1.0" / "rank0"):
        with pytest.raises(RunError, match=r"2 dumps: again\.pkl, npu_dump\.pkl\.\n  Pass one of them: .*again\.pkl"):
            open_run(path)
    write_rank(tmp_path / "e_v1.0" / "rank0", net())
    (tmp_path / "e_v1.0" / "rank1").mkdir()
    with pytest.raises(RunNotFound, match=r"no \.pkl in '.*rank1'"):
        open_run(tmp_path / "e_v1.0")


def test_what_is_no_dump_is_said(tmp_path: Path) -> None:
    write_dump(tmp_path / "above" / "npu_v1.0", net())
    with pytest.raises(RunNotFound, match=r"looks like a dump of ptdbg_ascend \(.*\)\. Pass its folder with rank0"):
        open_run(tmp_path / "above")
    with pytest.raises(RunNotFound, match="no file"):
        open_run(tmp_path / "nothing.pkl")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "optimizer.pkl").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(RunNotFound, match=r"no run in .*\n  It holds optimizer\.pkl"):
        open_run(tmp_path / "other")
    with pytest.raises(RunNotFound, match="no dump of ptdbg_ascend"):
        open_dump(tmp_path / "other")


def test_nested_inputs_keywords_numbers_and_true_dtypes(tmp_path: Path) -> None:
    half = (X.view(np.uint32) & 0xFFFF0000).view(np.float32)
    lines = [
        tensor("VF_lstm_9_forward_input.0", X),
        tensor("VF_lstm_9_forward_input.1.0", W),
        tensor("VF_lstm_9_forward_input.1.1", X.astype(np.int64)),
        number("VF_lstm_9_forward_input.2", 3),
        number("VF_lstm_9_forward_input.3", 0.5),
        number("VF_lstm_9_forward_input.4", True),
        tensor("VF_lstm_9_forward_input.kwargs.mask", X > 0),
        tensor("VF_lstm_9_forward_output.0", half, dtype="bfloat16"),
        tensor("VF_lstm_9_forward_output.1", np.zeros((0, 4), np.float32)),
    ]
    (call,) = open_run(write_dump(tmp_path / "d_v1.0", lines)).calls()
    assert call.name == "VF.lstm.9.forward"
    assert [(slot.name, slot.dtype, slot.shape) for slot in call.slots] == [
        ("input.0", "float32", (4, 6)),
        ("input.1.0", "float32", (4, 6)),
        ("input.1.1", "int64", (4, 6)),
        ("input.2", "int64", ()),
        ("input.3", "float64", ()),
        ("input.4", "bool", ()),
        ("input.kwargs.mask", "bool", (4, 6)),
        ("output.0", "bfloat16", (4, 6)),
        ("output.1", "float32", (0, 4)),
    ]
    assert [slot.numpy().item() for slot in call.slots[3:6]] == [3, 0.5, True]
    np.testing.assert_array_equal(call.slots[6].numpy(), X > 0)
    np.testing.assert_array_equal(call.slots[7].numpy(), half)
    assert call.slots[7].nbytes == 48
    assert call.slots[8].numpy().shape == (0, 4)
    assert call.slots[6].summary is None


def test_stack_lines_stand_before_or_behind_their_call(tmp_path: Path) -> None:
    lines = [
        stack("Torch_mm_0_forward", *FRAMES),
        tensor("Torch_mm_0_forward_output", X),
        tensor("Torch_mm_1_forward_output", X),
        stack("Torch_mm_1_forward", *FRAMES),
        stack("Torch_mm_2_forward", ["other.py", "7", "f", ""]),
    ]
    run = open_run(write_dump(tmp_path / "d_v1.0", lines))
    stacks = [run.stack(call) for call in run.calls()]
    assert [len(call.slots) for call in run.calls()] == [1, 1, 0]
    assert [str(held.frames[0]) for held in stacks if held] == [
        "model.py:12 in forward: y = x * w",
        "model.py:12 in forward: y = x * w",
        "other.py:7 in f: ",
    ]
    assert stacks[0] is not None and stacks[0].frames[1].function == "<module>"
    assert open_run(tmp_path / "d_v1.0").segment(0, 0).stack(3) is not None
    assert run.segment(0, 0).stack(1) is None


def test_blank_lines_bare_nan_and_lines_without_statistics(tmp_path: Path) -> None:
    broken = X.copy()
    broken[0, 0] = np.nan
    endless = X.copy()
    endless[0, 0] = np.inf
    lines = [
        Line(b""),
        bare("Torch_mm_0_forward_input.0", X),
        Line(b"  "),
        tensor("Torch_mm_0_forward_input.1", broken),
        tensor("Torch_mm_0_forward_input.2", endless),
        tensor("Torch_mm_0_forward_output", W, step=500),
    ]
    dump = write_dump(tmp_path / "d_v1.0", lines)
    assert b"NaN" in (dump / "rank0" / "npu_dump.pkl").read_bytes()
    run = open_run(dump)
    (call,) = run.calls()
    assert [slot.summary is None for slot in call.slots] == [True, True, True, False]
    np.testing.assert_array_equal(call.slots[1].numpy(), broken)
    assert run.damage(0, 0) == []
    lines = _lines_of(run)["Torch.mm.0.forward"]
    third = lines[2]
    assert (third.name, third.dtype, third.shape_text) == ("Torch_mm_0_forward_input.2", "torch.float32", "[4, 6]")
    assert third.statistics is not None and third.statistics[0] == math.inf
    assert lines[0].statistics is None


def _lines_of(run: Run) -> dict[str, tuple[TensorLine, ...]]:
    segment = run.segment(0, 0)
    assert isinstance(segment, PtdbgSegment)
    calls = [item[1] for item in segment.calls() if not isinstance(item, Damage)]
    assert [segment.call_at(entry) for entry in segment.index().entries] == calls
    return {call.name: call.lines for call in calls}


def test_what_the_pkl_itself_says(tmp_path: Path) -> None:
    lines = [number("Torch_add_0_forward_input.0", 2), *net(), number("Torch_add_1_forward_input.0", 3)]
    held = _lines_of(open_run(write_dump(tmp_path / "d_v1.0", lines)))
    (only,) = held["Torch.add.1.forward"]
    assert (only.name, only.dtype, only.shape_text) == ("Torch_add_1_forward_input.0", "<class 'int'>", "[]")
    assert only.statistics == (3.0, 3.0, 3.0)
    output = held["Tensor.mul.0.forward"][-1]
    assert (output.name, output.dtype, output.shape_text) == ("Tensor_mul_0_forward_output", "torch.float32", "[4, 6]")
    for call, said in held.items():
        assert said and all(line.name.startswith(call.replace(".", "_")) for line in said)


def test_call_that_is_met_again_has_the_next_repeat(tmp_path: Path) -> None:
    one = [tensor("Torch_mm_0_forward_input.0", X), tensor("Torch_mm_0_forward_output", W)]
    run = open_run(write_dump(tmp_path / "d_v1.0", one + one + net() + one))
    assert [(call.name, call.repeat, call.index) for call in run.calls() if "mm" in call.name] == [
        ("Torch.mm.0.forward", 0, 0),
        ("Torch.mm.0.forward", 1, 2),
        ("Torch.mm.0.forward", 2, 13),
    ]
    assert [len(call.slots) for call in run.find("Torch.mm.0.forward")] == [2, 2, 2]
    assert run.call("Torch.mm.0.forward", repeat=2).index == 13


DAMAGE: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"hello", "not JSON"),
    "object": (b'{"name": 1}', "not a list that begins with a name"),
    "empty list": (b"[]", "not a list that begins with a name"),
    "name is a number": (b"[1, 2]", "not a list that begins with a name"),
    "unknown name": (b'["conv2d", 1, [], "torch.float32", [1], [1, 1, 1]]', "'conv2d' is not the name of a line"),
    "three fields": (b'["Torch_mm_0_forward_input.0", 1, []]', "3 fields"),
    "five fields with statistics missing": (
        b'["Torch_mm_0_forward_input.0", 1, [], "torch.float32", [1]]',
        "its second field must be above 100",
    ),
    "stack as tensor": (
        b'["Torch_mm_0_forward_stack_info", 1, [], "torch.float32", [1], [1, 1, 1]]',
        "is not the name of such a line",
    ),
    "tensor as stack": (b'["Torch_mm_0_forward_input.0", []]', "is not the name of such a line"),
    "step is a text": (b'["Torch_mm_0_forward_input.0", "1", [], "torch.float32", [1], [1, 1, 1]]', "its fields are"),
    "dtype is null": (b'["Torch_mm_0_forward_input.0", 1, [], null, [1], [1, 1, 1]]', "its fields are"),
    "shape of floats": (b'["Torch_mm_0_forward_input.0", 1, [], "torch.float32", [1.0], [1, 1, 1]]', "its shape"),
    "shape is a text": (b'["Torch_mm_0_forward_input.0", 1, [], "torch.float32", "[4, 6]", [1, 1, 1]]', "its shape"),
    "negative shape": (b'["Torch_mm_0_forward_input.0", 1, [], "torch.float32", [-1], [1, 1, 1]]', "impossible"),
    "two statistics": (b'["Torch_mm_0_forward_input.0", 1, [], "torch.float32", [1], [1, 1]]', "three numbers"),
    "statistics of words": (
        b'["Torch_mm_0_forward_input.0", 1, [], "torch.float32", [1], ["x", 1, 1]]',
        "three numbers",
    ),
    "frame of three": (b'["Torch_mm_0_forward_stack_info", [["a", "1", "f"]]]', "a frame of its stack"),
    "line of the frame": (b'["Torch_mm_0_forward_stack_info", [["a", "one", "f", ""]]]', "a frame of its stack"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_damaged_line_is_named_and_the_others_are_read(kind: str, place: str, tmp_path: Path) -> None:
    raw, told = DAMAGE[kind]
    lines = net(stacks=True)
    at = {"first": 0, "middle": 3, "last": len(lines)}[place]
    lines.insert(at, Line(raw))
    run = open_run(write_dump(tmp_path / "d_v1.0", lines))
    assert len(list(run.calls(on_damage="skip"))) == 4
    assert [damage.line for damage in run.damage(0, 0)] == [at + 1]
    assert told in run.damage(0, 0)[0].reason
    assert run.damage(0, 0)[0].file == "rank0/npu_dump.pkl"
    with pytest.raises(RunDamaged, match=rf"rank0/npu_dump\.pkl, line {at + 1}: "):
        list(run.calls())
    for entry in run.segment(0, 0).index().entries:
        assert run.segment(0, 0).call_at(entry).name == entry.name


def test_last_line_may_lack_its_end_but_not_its_half(tmp_path: Path) -> None:
    pkl = write_rank(tmp_path, net())
    pkl.write_bytes(pkl.read_bytes().rstrip(b"\n"))
    assert len(open_run(pkl).names(0, 0)) == 4
    pkl.write_bytes(pkl.read_bytes()[:-10])
    (damage,) = open_run(pkl).damage(0, 0)
    assert damage.line == 9
    assert "unfinished" in damage.reason


def test_empty_dump_holds_no_calls(tmp_path: Path) -> None:
    run = open_run(write_dump(tmp_path / "d_v1.0", []))
    assert list(run.calls()) == []
    assert run.ranks == [0]


def test_comparing_a_dump_with_itself_is_clean(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d_v1.0", net(stacks=True))
    result = tensorprobe.compare(dump, dump)
    assert (result.summary.answer, result.summary.exit_code) == ("agrees", 0)
    assert result.summary.bases["values"] == 9
    assert result.summary.buckets.paired == 4
    assert result.summary.findings == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_changed_tensor_is_named_on_its_rank(jobs: int, tmp_path: Path) -> None:
    baseline = write_dump(tmp_path / "gpu_v1.0", {rank: net(stacks=True) for rank in range(3)})
    candidate = write_dump(
        tmp_path / "npu_v1.0", {rank: net(stacks=True, fault=0.5 * (rank == 2)) for rank in range(3)}
    )
    found = tensorprobe.compare(baseline, candidate, jobs=jobs).summary.divergence
    assert found is not None
    assert (found.call, found.rank, found.status) == ("Functional.relu.0.forward", 2, "introduced")
    assert found.row is not None and found.row.slot == "output.0"
    assert found.source is not None and (found.source.file, found.source.line) == ("model.py", 12)


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_with_values_elsewhere_are_compared_in_processes(jobs: int, tmp_path: Path) -> None:
    runs = []
    for name, fault in (("gpu", 0.0), ("npu", 0.5)):
        pkl = write_rank(tmp_path / name / "rank0", net(fault=fault))
        (tmp_path / name / "rank0" / "npu_dump").rename(tmp_path / f"{name}_values")
        runs.append(open_run(pkl, data=tmp_path / f"{name}_values"))
    summary = tensorprobe.compare(*runs, jobs=jobs).summary
    assert summary.bases["values"] == 9
    assert summary.divergence is not None and summary.divergence.call == "Functional.relu.0.forward"


def test_two_chosen_ranks_meet_whatever_their_numbers(tmp_path: Path) -> None:
    baseline = write_rank(tmp_path / "gpu", net())
    candidate = write_dump(tmp_path / "npu_v1.0", {3: net(fault=0.5)}) / "rank3"
    result = tensorprobe.compare(baseline, candidate, out=tmp_path / "out")
    assert result.summary.divergence is not None
    assert (result.summary.divergence.call, result.summary.divergence.rank) == ("Functional.relu.0.forward", 0)
    assert "rank 3 of the candidate is compared with rank 0 of the baseline" in result.summary.notes
    nothing = write_rank(tmp_path / "other" / "rank7", [tensor("Torch_mm_0_forward_output", X)])
    with pytest.raises(tensorprobe.errors.NothingPaired):
        tensorprobe.compare(baseline, nothing)


def test_dump_in_shards_gives_the_same(tmp_path: Path) -> None:
    from tensorprobe.engine import compare_shard, merge_shards

    baseline = write_dump(tmp_path / "gpu_v1.0", {rank: net() for rank in range(2)})
    candidate = write_dump(tmp_path / "npu_v1.0", {rank: net(fault=0.5 * rank) for rank in range(2)})
    for shard in ("1/2", "2/2"):
        compare_shard(baseline, candidate, shard=shard, out=tmp_path / "out")
    merged = merge_shards(tmp_path / "out").summary
    assert merged.divergence == tensorprobe.compare(baseline, candidate).summary.divergence


def remove_data(dump: Path) -> Path:
    for folder in dump.glob("rank*/npu_dump"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return dump


def test_statistics_alone_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    baseline = remove_data(write_dump(tmp_path / "gpu_v1.0", net()))
    run = open_run(baseline)
    assert run.manifest.settings == {"mode": "summary"}
    held = run.call("Tensor.mul.0").inputs[0]
    assert (held.has_data, held.nbytes) == (False, 0)
    assert held.summary is not None
    assert (held.summary.max, held.summary.min) == (float(X.max()), float(X.min()))
    assert math.isnan(float(held.summary.norm))
    with pytest.raises(NoData):
        held.numpy()
    same = tensorprobe.compare(baseline, baseline).summary
    assert (same.answer, same.bases["statistics"]) == ("agrees", 9)
    candidate = remove_data(write_dump(tmp_path / "npu_v1.0", net(fault=50.0)))
    other = tensorprobe.compare(baseline, candidate).summary
    assert other.divergence is not None and other.divergence.call == "Functional.relu.0.forward"


def test_nan_among_statistics_is_never_agreement(tmp_path: Path) -> None:
    lost = [tensor("Torch_mm_0_forward_input.0", X), tensor("Torch_mm_0_forward_output", X * np.nan)]
    dump = remove_data(write_dump(tmp_path / "gpu_v1.0", lost))
    (call,) = open_run(dump).calls()
    assert call.outputs[0].summary is None
    result = tensorprobe.compare(dump, dump)
    assert (result.summary.answer, result.summary.bases["none"]) == ("unmeasured", 1)


def test_infinity_on_one_side_of_the_statistics_diverges(tmp_path: Path) -> None:
    endless = X.copy()
    endless[1, 1] = np.inf
    dumps = [
        remove_data(
            write_dump(
                tmp_path / name, [tensor("Torch_mm_0_forward_input.0", W), tensor("Torch_mm_0_forward_output", y)]
            )
        )
        for name, y in (("gpu_v1.0", X), ("npu_v1.0", endless))
    ]
    assert tensorprobe.compare(*dumps).summary.answer == "diverged"
    assert tensorprobe.compare(dumps[1], dumps[1]).summary.answer == "agrees"


def test_dump_meets_a_native_run(tmp_path: Path) -> None:
    z = np.maximum(X * W, 0)
    native = made_runs.write(
        tmp_path / "native",
        [
            made_runs.call("Tensor.mul.0.forward", inputs=[X, W], outputs=[X * W]),
            made_runs.call("Functional.relu.0.forward", inputs=[X * W], outputs=[z]),
            made_runs.call("Tensor.sum.0.forward", inputs=[z], outputs=[z.sum()]),
            made_runs.call(
                "Functional.relu.0.backward", inputs=[np.ones_like(z)], outputs=[(z > 0).astype(np.float32)]
            ),
        ],
    )
    assert tensorprobe.compare(native, write_dump(tmp_path / "a_v1.0", net())).summary.answer == "agrees"
    found = tensorprobe.compare(native, write_dump(tmp_path / "b_v1.0", net(fault=0.5))).summary.divergence
    assert found is not None and found.call == "Functional.relu.0.forward"


def test_command_line_takes_dumps(tmp_path: Path) -> None:
    baseline = write_dump(tmp_path / "gpu_v1.0", net())
    candidate = write_dump(tmp_path / "npu_v1.0", net(fault=0.5))

    def run(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*map(str, arguments)])
        return done.exit_code, done.stdout

    code, said = run("compare", baseline, candidate, "--json")
    assert (code, json.loads(said)["divergence"]["call"]) == (1, "Functional.relu.0.forward")
    code, said = run("inspect", baseline / "rank0" / "npu_dump.pkl", "Tensor.mul.0")
    assert (code, said[:43]) == (0, "Tensor.mul.0.forward   step 0, rank 0, call")
    code, said = run("export", candidate, tmp_path / "out", "--to", "npy")
    assert (code, said[:9]) == (0, "9 tensors")
    done = export_run(open_run(candidate), tmp_path / "safe", to="safetensors")
    assert (done.tensors, sum(done.left_out.values())) == (9, 0)

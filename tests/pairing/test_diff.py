"""One call of two runs, tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import tensorprobe
from tensorprobe.errors import NotFound
from tensorprobe.model.diff import CallDiff
from tensorprobe.sim.kinds import KINDS, OpCall
from tests.builders.runs import Tensor, call, write

NAME = "Functional.softmax.0.forward"


def values(seed: int = 0, shape: tuple[int, ...] = (2, 4, 16, 32)) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def two_runs(folder: Path, wrong: Any, **more: Any) -> tuple[Path, Path]:
    """A softmax whose output is wrong in the candidate, and an add that both make."""
    right = values()
    for name, output in (("a", right), ("b", wrong)):
        calls = [
            call("Torch.add.0.forward", inputs=[values(1)], outputs=[values(2)], module="net"),
            call(NAME, inputs=[values(3)], outputs=[output], module="net.attention", **more),
        ]
        write(folder / name, calls)
    return folder / "a", folder / "b"


def diff_of(runs: tuple[Path, Path], name: str = NAME, **more: Any) -> CallDiff:
    (found,) = tensorprobe.diff(*runs, name, **more)
    return found


def test_the_output_that_differs_is_shown_in_detail(tmp_path: Path) -> None:
    wrong = values()
    wrong[..., -4:] = 0
    found = diff_of(two_runs(tmp_path, wrong))
    assert [(line.slot, line.equal) for line in found.slots] == [("input.0", True), ("output.0", False)]
    tensor = found.tensor
    assert tensor is not None and tensor.slot == "output.0" and tensor.pattern is not None
    (tail,) = [part for part in tensor.pattern.axes if part.extent != "all"]
    assert (tail.name, tail.extent, tail.first, tail.last) == ("columns", "tail", 28, 31)
    assert tensor.figures["different"] == 2 * 4 * 16 * 4
    columns = next(profile for profile in tensor.profiles if profile.axis == 3)
    assert [at for at, count in enumerate(columns.different) if count] == [28, 29, 30, 31]


def test_the_worst_elements_come_first_with_both_values_and_their_distance(tmp_path: Path) -> None:
    wrong = values()
    wrong[1, 2, 3, 4] += 5
    wrong[0, 0, 0, 0] -= 2
    tensor = diff_of(two_runs(tmp_path, wrong)).tensor
    assert tensor is not None
    assert [each.index for each in tensor.worst] == [[1, 2, 3, 4], [0, 0, 0, 0]]
    assert tensor.worst[0].difference == pytest.approx(5, rel=1e-6)
    assert tensor.worst[0].ulp == pytest.approx(tensor.figures["ulp_max"]) or tensor.worst[1].ulp == pytest.approx(
        tensor.figures["ulp_max"]
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_distances_in_ulp_are_those_of_the_pair_kernel(tmp_path: Path, dtype: str) -> None:
    source = torch.Generator().manual_seed(4)
    right = torch.randn(64, generator=source).mul(torch.tensor(10.0) ** torch.arange(-40, 24)).to(getattr(torch, dtype))
    wrong = right.float().mul(1.5).to(right.dtype)
    for name, held in (("a", right), ("b", wrong)):
        stored = Tensor(held.view(torch.uint8).numpy(), dtype=dtype)
        stored.array = np.frombuffer(stored.array.tobytes(), f"V{held.element_size()}")
        write(tmp_path / name, [call(NAME, outputs=[stored])])
    tensor = diff_of((tmp_path / "a", tmp_path / "b")).tensor
    assert tensor is not None and tensor.ulps is not None
    finite = [each.ulp for each in tensor.worst if math.isfinite(each.difference)]
    assert max(finite) <= tensor.figures["ulp_max"] * (1 + 1e-9)
    assert sum(tensor.ulps.counts["ulp"]) == tensor.figures["count"]


def test_nan_on_one_side_only_is_the_worst_difference(tmp_path: Path) -> None:
    wrong = values()
    wrong[0, 1, 2, 3] = np.nan
    tensor = diff_of(two_runs(tmp_path, wrong)).tensor
    assert tensor is not None and tensor.pattern is not None
    assert tensor.worst[0].index == [0, 1, 2, 3] and math.isnan(tensor.worst[0].candidate)
    assert tensor.pattern.effect == "nan" and tensor.pattern.elements == [[0, 1, 2, 3]]


def test_histograms_count_every_element(tmp_path: Path) -> None:
    tensor = diff_of(two_runs(tmp_path, values() * np.float32(1.01))).tensor
    assert tensor is not None and tensor.values and tensor.differences
    size = values().size
    assert [sum(counts) for counts in tensor.values.counts.values()] == [size, size]
    assert sum(tensor.differences.counts["difference"]) == size


def test_a_slot_that_was_asked_for_is_shown(tmp_path: Path) -> None:
    runs = two_runs(tmp_path, values() + 1)
    tensor = diff_of(runs, slot="input.0").tensor
    assert tensor is not None and tensor.slot == "input.0" and not tensor.worst
    with pytest.raises(NotFound, match=r"no slot 'output\.7'.*It has input\.0, output\.0"):
        diff_of(runs, slot="output.7")


def test_another_shape_and_missing_values_are_said(tmp_path: Path) -> None:
    tensor = diff_of(two_runs(tmp_path, values(shape=(2, 4, 16, 31)))).tensor
    assert tensor is not None
    assert tensor.problem == "shape [2, 4, 16, 32] in the baseline, [2, 4, 16, 31] in the candidate"
    for name in ("c", "d"):
        write(tmp_path / name, [call(NAME, outputs=[values(name == "d")])], mode="summary")
    tensor = diff_of((tmp_path / "c", tmp_path / "d")).tensor
    assert tensor is not None and tensor.problem.startswith("no values in the baseline")


def test_strided_tensors_are_compared_by_their_own_indices(tmp_path: Path) -> None:
    right = values(shape=(8, 16))
    wrong = right.copy()
    wrong[:, 3] = 0
    write(tmp_path / "a", [call(NAME, outputs=[right])])
    transposed = Tensor(np.ascontiguousarray(wrong.T).reshape(8, 16), stride=(1, 8))
    write(tmp_path / "b", [call(NAME, outputs=[transposed])])
    tensor = diff_of((tmp_path / "a", tmp_path / "b")).tensor
    assert tensor is not None and tensor.pattern is not None
    (column,) = [part for part in tensor.pattern.axes if part.extent != "all"]
    assert (column.axis, column.extent, column.first) == (1, "one", 3)


def test_calls_are_found_by_glob_and_by_module(tmp_path: Path) -> None:
    runs = two_runs(tmp_path, values() + 1)
    assert [each.call for each in tensorprobe.diff(*runs, "*.0.forward")] == ["Torch.add.0.forward", NAME]
    assert [each.call for each in tensorprobe.diff(*runs, "net.attention")] == [NAME]
    assert [each.call for each in tensorprobe.diff(*runs, "module:net")] == ["Torch.add.0.forward", NAME]
    with pytest.raises(NotFound, match="no call 'module:nets'"):
        tensorprobe.diff(*runs, "module:nets")


def test_a_call_whose_number_has_shifted_meets_its_partner(tmp_path: Path) -> None:
    write(tmp_path / "a", [call(f"Torch.add.{n}.forward", outputs=[values(n)], module=f"m{n}") for n in range(4)])
    shifted = [call("Torch.add.0.forward", outputs=[values(9)], module="extra")]
    shifted += [call(f"Torch.add.{n + 1}.forward", outputs=[values(n)], module=f"m{n}") for n in range(4)]
    write(tmp_path / "b", shifted)
    found = diff_of((tmp_path / "a", tmp_path / "b"), "Torch.add.2.forward")
    assert found.candidate_call == "Torch.add.3.forward" and all(line.equal for line in found.slots)


def test_the_divergence_of_a_result_gives_the_same_object(tmp_path: Path) -> None:
    runs = two_runs(tmp_path, values() * 2)
    result = tensorprobe.compare(*runs)
    assert result.divergence is not None
    assert msgspec.to_builtins(result.divergence.diff()) == msgspec.to_builtins(diff_of(runs))
    assert result.summary.divergence is result.divergence


def test_a_stale_rank_is_named(tmp_path: Path) -> None:
    """A fault `stale` on rank 2 of four: its second softmax still holds the result of the first."""

    def run(name: str, fault: bool) -> Path:
        segments = {}
        for rank in range(4):
            softmax = OpCall("aten::_softmax", torch.softmax, (), {})
            calls = []
            for number in range(2):
                given = torch.from_numpy(values(10 * rank + number, (16, 32)))
                softmax.args = (given, -1)
                made = KINDS["stale"](softmax) if fault and rank == 2 else softmax.run()
                name_of = f"Functional.softmax.{number}.forward"
                calls.append(call(name_of, inputs=[given.numpy()], outputs=[made.numpy()], module="net"))
            segments[0, rank] = calls
        return write(tmp_path / name, segments)

    result = tensorprobe.compare(run("a", False), run("b", True))
    assert result.divergence is not None and result.divergence.rank == 2
    assert "pattern: on rank 2 only, of 4" in str(result)

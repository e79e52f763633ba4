"""Two programs that differ in one thing: that thing is what the comparison names, at every level of capture."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorprobe
from tests.e2e.programs import (
    Net,
    Program,
    compare_programs,
    drop_out,
    narrow_third_layer,
    other_epsilon,
    recompute,
    tokens_of,
)

LEVELS = ("api", "module", "mix", "aten")


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_program_twice_agrees_in_every_bit(level: str, tmp_path: Path) -> None:
    program = Program(steps=2, settings={"level": level})
    result = compare_programs(tmp_path, program, program, policy="bitwise")
    assert result.agrees and not result.findings and result.summary.first_difference is None
    buckets = result.summary.buckets
    assert buckets.paired == result.summary.baseline.recorded == result.summary.candidate.recorded > 0
    assert "Calls with identical inputs have bit-identical outputs" in str(result)


@pytest.mark.parametrize(
    ("level", "named"),
    [
        ("api", "Tensor.bfloat16.0.forward"),
        ("module", "Module.blocks.2.layer.Layer.forward.0"),
        ("aten", "Aten._to_copy.default.0.forward"),
    ],
)
def test_a_layer_in_lower_precision_is_named(level: str, named: str, tmp_path: Path) -> None:
    settings = {"level": level}
    result = compare_programs(
        tmp_path, Program(settings=settings), Program(change=narrow_third_layer, settings=settings)
    )
    found = result.divergence
    assert found is not None
    first = found.call or found.candidate_call if found.region is None else found.region.candidate[0]
    assert first == named and found.module == "blocks.2.layer"
    assert found.status == ("introduced" if level == "module" else "structural")


def test_a_layer_in_lower_precision_is_inside_the_module_that_is_named_at_level_mix(tmp_path: Path) -> None:
    settings = {"level": "mix"}
    result = compare_programs(
        tmp_path, Program(settings=settings), Program(change=narrow_third_layer, settings=settings)
    )
    found = result.divergence
    assert found is not None and found.module == "blocks.2.layer", f"{found} is around the layer, not in it"


@pytest.mark.parametrize(
    ("level", "named"),
    [
        ("api", "Functional.layer_norm.1.forward"),
        ("module", "Module.blocks.1.norm.LayerNorm.forward.0"),
        ("mix", "Functional.layer_norm.1.forward"),
        ("aten", "Aten.native_layer_norm.default.1.forward"),
    ],
)
def test_another_epsilon_is_named_and_seen_in_the_arguments(level: str, named: str, tmp_path: Path) -> None:
    settings = {"level": level}
    result = compare_programs(tmp_path, Program(settings=settings), Program(change=other_epsilon, settings=settings))
    found = result.divergence
    assert found is not None and (found.call, found.status, found.inputs) == (named, "introduced", "identical")
    if level != "module":  # a module has it in itself, not in its arguments
        (finding,) = result.findings
        assert (finding.kind, finding.call) == ("arguments", named)
        assert "1e-05 → 0.001" in finding.detail
        assert found.finding == finding or "→ 0.001" in str(found.finding)


def insert(after: Callable[[Tensor], Tensor]) -> Callable[[Net], None]:
    """Lets the first block do something more."""

    def change(model: Net) -> None:
        model.blocks[0].after = after

    return change


def test_an_inserted_call_shifts_nothing(tmp_path: Path) -> None:
    """One tanh more in the first block: the numbers of all later ones are others, and all stay paired."""
    result = compare_programs(tmp_path, Program(), Program(change=insert(torch.tanh)))
    buckets = result.summary.buckets
    assert (buckets.in_regions, buckets.only_baseline, buckets.only_candidate) == (2, 0, 0)
    assert [(finding.kind, finding.call) for finding in result.findings] == [
        ("only_candidate", "Torch.tanh.1.forward"),
        ("only_candidate", "Torch.tanh.1.backward"),
    ]
    pairs = {(row.call, row.candidate_call) for row in result.rows}
    for number, shifted in ((0, 0), (1, 2), (2, 3)):
        for direction in ("forward", "backward"):
            assert (f"Torch.tanh.{number}.{direction}", f"Torch.tanh.{shifted}.{direction}") in pairs
    found = result.divergence
    assert found is not None and (found.candidate_call, found.call) == ("Torch.tanh.1.forward", "")
    assert "no call in baseline ↔ 2 calls in candidate (tanh) do not give the same" in str(result)


def test_what_an_inserted_call_made_is_not_called_a_parameter(tmp_path: Path) -> None:
    """A recorded call has made it: nothing differs before the first call."""
    result = compare_programs(tmp_path, Program(), Program(change=insert(lambda made: made * 1.01)))
    found = result.divergence
    assert found is not None and found.candidate_call == "Tensor.mul.0.forward"
    assert result.summary.externals == []
    assert "before step 0" not in str(result)


def test_a_call_that_changes_nothing_may_be_inserted_and_is_told(tmp_path: Path) -> None:
    result = compare_programs(tmp_path, Program(), Program(change=insert(torch.clone)))
    assert result.exit_code == 0
    assert result.summary.statuses["agrees"] == result.summary.buckets.paired
    assert [region.candidate for region in result.summary.regions] == [
        ["Torch.clone.0.forward", "Torch.clone.0.backward"]
    ]
    assert "no call in baseline ↔ 2 calls in candidate (clone)" in str(result)


@pytest.mark.parametrize("level", LEVELS[:3])
def test_dropout_with_other_draws_is_named(level: str, tmp_path: Path) -> None:
    named = {"module": "Module.blocks.0.Block.forward.0"}.get(level, "Functional.dropout.0.forward")
    one, other = (Program(change=drop_out, draw_seed=seed, settings={"level": level}) for seed in (1, 2))
    found = compare_programs(tmp_path, one, other).divergence
    assert found is not None and (found.call, found.inputs) == (named, "identical")
    assert compare_programs(tmp_path / "same", one, one).agrees


@pytest.mark.parametrize("level", LEVELS)
def test_another_batch_is_said_to_be_other_data(level: str, tmp_path: Path) -> None:
    settings = {"level": level}
    result = compare_programs(
        tmp_path, Program(settings=settings), Program(data=lambda _: tokens_of(9), settings=settings)
    )
    assert result.exit_code == 1
    assert {external.kind for external in result.summary.externals} == {"data"}
    assert "data differ before step 0" in str(result)
    assert result.summary.statuses["introduced"] == 0
    assert result.divergence is not None and "embedding" in result.divergence.call.lower()


def one_token_more(step: int) -> Tensor:
    batch = tokens_of(step).clone()
    if step == 1:
        batch[0, 0] = (batch[0, 0] + 1) % 50
    return batch


@pytest.mark.parametrize("level", ["api", "module"])
def test_another_batch_in_a_later_step_is_no_fault_of_a_call(level: str, tmp_path: Path) -> None:
    one, other = (Program(steps=2, data=data, settings={"level": level}) for data in (tokens_of, one_token_more))
    result = compare_programs(tmp_path, one, other)
    found = result.divergence
    assert found is not None and found.step == 1
    assert found.inputs == "diverge" and found.status != "introduced", f"{found.call} is blamed for other data"


@pytest.mark.parametrize("level", LEVELS)
def test_another_start_is_said_to_be_other_parameters(level: str, tmp_path: Path) -> None:
    result = compare_programs(tmp_path, *(Program(seed=seed, settings={"level": level}) for seed in (0, 1)))
    assert result.exit_code == 1
    assert {external.kind for external in result.summary.externals} == {"parameter"}
    assert "parameters differ before step 0" in str(result)
    if level != "aten":  # an ATen op does not say what its operands are
        assert "embedding.weight" in {external.name for external in result.summary.externals}
    assert result.summary.statuses["introduced"] == 0, f"{result.divergence} is blamed for what the weights have done"


@pytest.mark.parametrize("level", ["api", "mix", "aten"])
def test_another_learning_rate_is_found_in_the_optimizer(level: str, tmp_path: Path) -> None:
    result = compare_programs(tmp_path, *(Program(rate=rate, settings={"level": level}) for rate in (1e-3, 2e-3)))
    found = result.divergence
    assert found is not None and found.status == "introduced"
    assert found.module == "" and found.direction == "forward"
    assert any(name in found.call for name in ("_foreach", "addcdiv", "mul_", "add_", "AdamW", "adamw"))


def test_another_learning_rate_is_not_blamed_on_a_module(tmp_path: Path) -> None:
    """At level module the optimizer is not seen; the modules of the next step compute what their weights say."""
    result = compare_programs(
        tmp_path, *(Program(rate=rate, steps=2, settings={"level": "module"}) for rate in (1e-3, 0.1))
    )
    found = result.divergence
    assert found is not None and found.step == 1
    assert result.summary.statuses["introduced"] == 0, f"{found.call} is blamed for what the weights have done"


@pytest.mark.parametrize("level", ["api", "mix"])
def test_recomputed_calls_are_no_other_calls(level: str, tmp_path: Path) -> None:
    """Activation checkpointing against none: what is computed again has no partner and shifts no number."""
    settings = {"level": level}
    result = compare_programs(tmp_path, Program(settings=settings), Program(change=recompute, settings=settings))
    buckets = result.summary.buckets
    assert buckets.only_baseline == buckets.only_candidate == 0
    assert buckets.skipped["computed again in the candidate only"] > 0
    assert result.summary.statuses["agrees"] == buckets.paired
    assert all(row.call == row.candidate_call and row.bit_identical for row in result.rows)
    assert result.agrees
    again = compare_programs(tmp_path / "both", *(Program(change=recompute, settings=settings),) * 2)
    assert again.agrees and not again.findings


def test_moved_runs_give_the_same_answer(tmp_path: Path) -> None:
    result = compare_programs(tmp_path, Program(), Program(change=other_epsilon))
    for name in ("a", "b"):
        shutil.copytree(tmp_path / name, tmp_path / "elsewhere" / "deep down" / name)
        shutil.rmtree(tmp_path / name)
    moved = tensorprobe.compare(*(tmp_path / "elsewhere" / "deep down" / name for name in "ab"))
    assert repr(moved.divergence) == repr(result.divergence)
    assert repr(list(moved.rows)) == repr(list(result.rows))


@pytest.mark.parametrize("levels", [("module", "api"), ("aten", "module")])
def test_runs_of_other_levels_cannot_be_compared_and_the_message_says_why(
    levels: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(tensorprobe.errors.NothingPaired, match="Capture both with the same --level"):
        compare_programs(tmp_path, *(Program(settings={"level": level}) for level in levels))


def test_a_selection_is_compared_with_what_it_selects(tmp_path: Path) -> None:
    some: dict[str, Any] = {"ops": ["linear"]}
    whole, part = Program().record(tmp_path / "a"), tmp_path / "b"
    Program(settings=some).record(part)
    result = tensorprobe.compare(whole, part)
    assert result.summary.buckets.paired == result.summary.candidate.recorded > 0
    alone = result.summary.buckets.only_baseline + result.summary.buckets.in_regions
    assert alone == result.summary.baseline.recorded - result.summary.buckets.paired
    assert result.summary.statuses["agrees"] == result.summary.buckets.paired


@pytest.mark.parametrize("turned", [False, True])
def test_a_copy_that_had_nothing_to_do_on_one_side_is_no_difference(turned: bool, tmp_path: Path) -> None:
    """Another device returns another layout: `contiguous` copies there, and only there it has a backward."""
    layouts = [torch.contiguous_format, torch.channels_last]
    for name, layout in zip("ab", reversed(layouts) if turned else layouts, strict=True):
        images = torch.arange(32.0).reshape(1, 2, 4, 4).requires_grad_()
        with tensorprobe.capture(tmp_path / name):
            (images * 2).clone(memory_format=layout).contiguous().square().sum().backward()
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    skipped = result.summary.buckets.skipped
    assert skipped == {"backward of a copy or cast that had nothing to do on the other side": 1}
    assert result.summary.buckets.only_baseline == result.summary.buckets.only_candidate == 0
    assert not [finding for finding in result.findings if finding.kind != "arguments"]


def test_a_backward_that_is_missing_beside_its_forward_is_still_named(tmp_path: Path) -> None:
    for name, detached in (("a", False), ("b", True)):
        values = torch.arange(4.0).requires_grad_()
        with tensorprobe.capture(tmp_path / name):
            rooted = values.detach().sqrt() if detached else values.sqrt()
            (rooted.contiguous() * values).sum().backward()
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert not result.agrees
    assert "Tensor.sqrt.0.backward" in [finding.call for finding in result.findings]


def test_a_foreach_optimizer_on_one_side_is_explained_without_values(tmp_path: Path) -> None:
    for name, foreach in (("a", False), ("b", True)):
        tensorprobe.seed_all(1)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=foreach)
        with tensorprobe.capture(tmp_path / name, model=model, mode="structure"):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    said = str(tensorprobe.compare(tmp_path / "a", tmp_path / "b"))
    assert "The optimizer of the candidate updates lists of tensors (foreach)" in said
    assert "foreach=False" in said and "foreach=False" not in str(tensorprobe.compare(tmp_path / "a", tmp_path / "a"))


def test_a_parameter_that_differs_otherwise_than_by_a_factor_is_not_called_scaled(tmp_path: Path) -> None:
    for name, error in (("a", 0.0), ("b", 1e-6)):
        tensorprobe.seed_all(1)
        model = torch.nn.Linear(64, 64, bias=False)
        model.weight.data += error * torch.randn(64, 64)
        with tensorprobe.capture(tmp_path / name, model=model):
            model(torch.ones(1, 64))
    (external,) = tensorprobe.compare(tmp_path / "a", tmp_path / "b").summary.externals
    assert external.name == "weight" and external.detail.startswith("max |Δ|")

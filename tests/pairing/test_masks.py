"""A mask does not swamp the figures of a pair: huge constants that both sides share are set apart and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe.numerics.masks import blank_masks

LEAST = float(np.finfo(np.float32).min)


def record(folder: Path, value: float, scores: torch.Tensor, **settings: Any) -> Path:
    mask = torch.full(scores.shape, value, dtype=scores.dtype).triu(1)
    with tensorprobe.capture(folder, level="api", in_process=True, stacks=False, **settings):
        F.softmax(scores + mask, -1)
    return folder


def rows(one: Path, other: Path) -> dict[tuple[str, str], dict[str, Any]]:
    table = tensorprobe.compare(one, other, prove="off").rows.table().to_pylist()
    return {(row["call"], row["slot"]): row for row in table}


@pytest.mark.parametrize("value", [LEAST, -1e9, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_measured_over_the_elements_that_matter(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    scores = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    value = max(value, float(torch.finfo(dtype).min)) if value > float("-inf") else value
    found = rows(record(tmp_path / "a", value, scores), record(tmp_path / "b", value, scores * 1.01))
    row = found["Functional.softmax.0.forward", "input.0"]
    assert row["relative_l2"] == pytest.approx(0.01, rel=0.2)
    hidden = 4 * 16 * 15 // 2
    assert row["set_apart"] == (0 if value == float("-inf") else hidden)
    assert row["count"] == 4 * 16 * 16 - hidden
    assert (row["baseline_norm"] < 100 and abs(row["baseline_min"]) < 10) or value == float("-inf")
    assert row["max_abs_index"] >= 0


def test_the_index_of_the_greatest_error_is_that_of_the_whole_tensor(tmp_path: Path) -> None:
    scores = torch.zeros(8, 8)
    other = scores.clone()
    other[6, 2] = 0.5
    found = rows(record(tmp_path / "a", LEAST, scores + 1), record(tmp_path / "b", LEAST, other + 1))
    assert found["Functional.softmax.0.forward", "input.0"]["max_abs_index"] == 6 * 8 + 2


def test_large_numbers_that_are_no_mask_stay(tmp_path: Path) -> None:
    values = torch.linspace(-2e4, 2e4, 256)
    for name, scale in (("a", 1.0), ("b", 1.001)):
        with tensorprobe.capture(tmp_path / name, level="api", in_process=True, stacks=False):
            torch.tanh(values * scale)
    row = rows(tmp_path / "a", tmp_path / "b")["Torch.tanh.0.forward", "input.0"]
    assert row["set_apart"] == 0 and row["relative_l2"] == pytest.approx(1e-3, rel=1e-3)


def test_a_mask_does_not_hide_a_wrong_sum(tmp_path: Path) -> None:
    """The noise model allows what the sizes of the operands allow; a mask is none of them."""
    scores = torch.randn(4, 16, 16)
    for name, factor in (("a", 1.0), ("b", 1.01)):
        mask = torch.full((16, 16), LEAST).triu(1)
        with tensorprobe.capture(tmp_path / name, level="api", in_process=True, stacks=False):
            held = torch.add(scores, mask)
            with torch._C.DisableTorchFunction():
                held.copy_(torch.where(mask == 0, held * factor, held))
            torch.softmax(held, -1)
    found = tensorprobe.compare(tmp_path / "a", tmp_path / "b", prove="off")
    assert found.divergence is not None and found.divergence.call == "Torch.softmax.0.forward"
    assert found.divergence.status == "entered" and "which made it, agrees" in str(found)


def test_statistics_with_a_mask_prove_no_equality(tmp_path: Path) -> None:
    """Without values a mask hides all other elements: the call behind it is not blamed for what came in."""
    scores = torch.randn(4, 16, 16)
    one = record(tmp_path / "a", LEAST, scores, mode="summary")
    other = record(tmp_path / "b", LEAST, scores * (1 + 1e-6), mode="summary")
    found = tensorprobe.compare(one, other)
    assert found.divergence is None or found.divergence.status != "introduced"


def test_only_what_is_equal_on_both_sides_is_blanked() -> None:
    one = np.array([1.0, LEAST, LEAST, 2.0], np.float32)
    other = np.array([1.0, LEAST, -5.0, 2.0], np.float32)
    count, (left, right) = blank_masks((one.view("V4"), other.view("V4")), ("float32", "float32"), (LEAST,))
    assert count == 1
    assert left.view(np.float32).tolist() == [1.0, 0.0, LEAST, 2.0]
    assert right.view(np.float32).tolist() == [1.0, 0.0, -5.0, 2.0]


MASKS = [(LEAST, -1e9), (-1e9, float("-inf")), (float("-inf"), LEAST)]


def attend(folder: Path, value: float, whole: bool = False) -> Path:
    """Attention with a mask; `whole` masks all of a row."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(0 if whole else 1)
    hidden[-1] |= whole
    scores = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1))
    with tensorprobe.capture(folder, in_process=True, stacks=False):
        torch.sin(F.softmax(scores.masked_fill(hidden, value), -1))
    return folder


@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_two_programs_may_mask_by_different_numbers(tmp_path: Path, masks: tuple[float, float]) -> None:
    one, other = (attend(tmp_path / name, value) for name, value in zip("ab", masks, strict=True))
    result = tensorprobe.compare(one, other)
    assert result.exit_code == 0, str(result)
    assert [finding.kind for finding in result.findings] == ["arguments"]
    row = rows(one, other)["Tensor.masked_fill.0.forward", "output.0"]
    assert row["set_apart"] == 30 and not row["bit_identical"] and row["note"].startswith("masked by ")


def test_a_mask_that_changes_what_follows_is_blamed(tmp_path: Path) -> None:
    """All of a row is masked: the softmax of equal numbers is no softmax of -inf."""
    result = tensorprobe.compare(
        attend(tmp_path / "a", -1e9, whole=True), attend(tmp_path / "b", float("-inf"), whole=True)
    )
    assert result.exit_code == 1 and result.divergence is not None
    assert result.divergence.call == "Tensor.masked_fill.0.forward", str(result)


def test_another_number_where_only_one_side_is_masked_is_a_difference(tmp_path: Path) -> None:
    def fill(name: str, value: float, start: int) -> Path:
        with tensorprobe.capture(tmp_path / name, in_process=True, stacks=False):
            torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(start), value)
        return tmp_path / name

    result = tensorprobe.compare(fill("a", -1e9, 1), fill("b", LEAST, 2))
    assert result.exit_code == 1

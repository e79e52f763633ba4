"""Rows: what is measured of a pair of slots, and from what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorprobe
from tensorprobe.model.comparison import COLUMNS, Row
from tensorprobe.pairing import tensor_pairs
from tests.builders.runs import Tensor, call, write

NAME = "Functional.gelu.0.forward"


def measure(
    folder: Path, baseline: Any, candidate: Any, *, modes: tuple[str, str] = ("tensor", "tensor"), **options: Any
) -> Row:
    """The row of one output."""
    for name, value, mode in (("a", baseline, modes[0]), ("b", candidate, modes[1])):
        write(folder / name, [call(NAME, outputs=[value])], mode=mode)
    return tensorprobe.compare(folder / "a", folder / "b", **options).rows[0]


def test_columns_are_the_fields_of_a_row() -> None:
    assert tuple(COLUMNS) == Row.__struct_fields__


def test_figures_of_a_plain_pair(tmp_path: Path) -> None:
    a = np.array([1.0, -2.0, 4.0, 0.0], dtype=np.float32)
    b = np.array([1.0, -2.5, 4.0, 0.25], dtype=np.float32)
    row = measure(tmp_path, a, b)
    assert (row.basis, row.bit_identical, row.count, row.different) == ("values", False, 4, 2)
    assert (row.max_abs, row.max_abs_index, row.max_rel, row.mean_abs) == (0.5, 1, 0.25, 0.1875)
    wide, other = a.astype(float), b.astype(float)
    assert row.relative_l2 == pytest.approx(np.linalg.norm(other - wide) / np.linalg.norm(wide), rel=1e-12)
    cosine = wide @ other / np.linalg.norm(wide) / np.linalg.norm(other)
    assert row.one_minus_cosine == pytest.approx(1 - cosine, rel=1e-9)
    assert (row.bias, row.within_1e2) == (-0.0625, 0.5)
    assert (row.baseline_max, row.candidate_min) == (4.0, -2.5)


def test_equal_infinities_and_nan_in_equal_places_are_equal(tmp_path: Path) -> None:
    a = np.array([np.inf, -np.inf, np.nan, 1.0], dtype=np.float32)
    assert measure(tmp_path, a, a.copy()).bit_identical
    row = measure(tmp_path, a, np.array([np.inf, np.inf, np.nan, 1.5], dtype=np.float32))
    assert (row.nonfinite_different, row.nonfinite_index, row.max_abs, row.count) == (1, 1, 0.5, 1)
    assert row.verdict == "diverges" and row.judged_by == "nonfinite_different"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "float16", "complex128"])
def test_dtypes_that_numpy_lacks_are_measured(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 7, dtype=torch.complex64) if "complex" in dtype else torch.randn(5, 7)
    a = a.to(getattr(torch, dtype))
    b = a.clone()
    b.view(torch.uint8 if "float8" in dtype else a.dtype).view(-1)[9] = 0x30 if "float8" in dtype else 0.5
    sides = [Tensor(one.contiguous().view(torch.uint8).numpy().reshape(-1), dtype=dtype) for one in (a, b)]
    for side in sides:
        side.array = _shaped(side.array, (5, 7))
    row = measure(tmp_path, *sides)
    assert row.different >= 1 and row.max_abs_index == 9
    expected = complex((b.to(torch.complex128) - a.to(torch.complex128)).flatten()[9])
    assert row.max_abs == pytest.approx(max(abs(expected.real), abs(expected.imag)), rel=1e-12)


def _shaped(flat: Any, shape: tuple[int, ...]) -> Any:
    """Bytes that show themselves in the shape of the tensor."""
    return flat.reshape(*shape, -1).view(f"V{flat.size // int(np.prod(shape))}").reshape(shape)


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    row = measure(tmp_path, np.array([2**60, 3]), np.array([2**60 + 1, 3]))
    assert (row.max_abs, row.different, row.verdict, row.judged_by) == (1.0, 1, "diverges", "different")


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    assert measure(tmp_path, np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).verdict == "agrees"
    row = measure(tmp_path, np.float32(2.0), np.float32(3.0))
    assert (row.max_abs, row.baseline_shape) == (1.0, "[]")


def test_different_dtypes_are_compared_in_the_wider_one_and_say_so(tmp_path: Path) -> None:
    a = np.linspace(-1, 1, 64, dtype=np.float32)
    row = measure(tmp_path, a, a.astype(np.float16))
    assert row.note == "float32 against float16, in the wider of both"
    assert 0 < row.relative_l2 < 2**-10 and row.verdict == "agrees"


def test_a_permuted_tensor_is_compared_element_by_element(tmp_path: Path) -> None:
    """The same tensor, stored row by row on one side and column by column on the other."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    changed = values.copy()
    changed[1, 2] = 100
    block = np.ascontiguousarray(changed.T)
    candidate = Tensor(block.reshape(3, 4), stride=(1, 3))
    row = measure(tmp_path, values, candidate)
    assert (row.different, row.max_abs, row.max_abs_index) == (1, 94.0, 6)
    both = [Tensor(np.ascontiguousarray(one.T).reshape(3, 4), stride=(1, 3)) for one in (values, changed)]
    assert measure(tmp_path, *both).max_abs_index == 6


def test_equal_digests_of_tensors_stored_in_other_orders_are_not_believed(tmp_path: Path) -> None:
    block = np.arange(6, dtype=np.float32)
    row = measure(tmp_path, block.reshape(2, 3), Tensor(block.reshape(2, 3), stride=(1, 2)))
    assert (row.basis, row.different) == ("values", 4)


def test_a_tensor_larger_than_a_piece_is_measured_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = np.random.default_rng(0).normal(size=(64, 33)).astype(np.float32)
    b = a.copy()
    b[40, 7] += 1
    whole = measure(tmp_path, a, b)
    turned = Tensor(np.ascontiguousarray(b.T).reshape(64, 33), stride=(1, 64))
    whole_turned = measure(tmp_path, a, turned)
    monkeypatch.setattr(tensor_pairs, "PIECE", 1000)
    for one, other in ((measure(tmp_path, a, b), whole), (measure(tmp_path, a, turned), whole_turned)):
        assert (one.max_abs_index, one.different, one.max_abs) == (40 * 33 + 7, 1, other.max_abs)
        assert one.relative_l2 == pytest.approx(other.relative_l2, rel=1e-12)


def test_statistics_stand_in_for_values_and_the_result_says_that_this_is_weaker(tmp_path: Path) -> None:
    a = np.arange(8, dtype=np.float32)
    write(tmp_path / "a", [call(NAME, outputs=[a])], mode="summary")
    write(tmp_path / "b", [call(NAME, outputs=[1.5 * a])], mode="summary")
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    row = result.rows[0]
    assert (row.basis, row.norm_ratio, row.verdict) == ("statistics", 1.5, "diverges")
    assert np.isnan(row.max_abs)
    assert any("weaker" in note for note in result.summary.notes)


def test_a_run_with_values_and_one_without_are_compared_by_statistics(tmp_path: Path) -> None:
    a = np.arange(8, dtype=np.float32)
    assert measure(tmp_path, a, a + 1, modes=("tensor", "summary")).basis == "statistics"
    assert measure(tmp_path, a, a, modes=("tensor", "summary")).basis == "digest"


def test_what_was_skipped_is_not_compared(tmp_path: Path) -> None:
    a = np.arange(8, dtype=np.float32)
    row = measure(tmp_path, Tensor(a, skipped="memory not yet initialised"), a)
    assert (row.basis, row.verdict, row.note) == ("none", "unmeasured", "memory not yet initialised")


def test_damaged_tensors_are_said_and_known_by_their_statistics(tmp_path: Path) -> None:
    a = np.arange(8, dtype=np.float32)
    for name, value in (("a", a), ("b", a + 1)):
        write(tmp_path / name, [call(NAME, outputs=[value]), call("Functional.gelu.1.forward", outputs=[value * 2])])
    blob = tmp_path / "b" / "step0" / "rank0" / "tensors.bin"
    blob.write_bytes(blob.read_bytes()[:40])
    rows = tensorprobe.compare(tmp_path / "a", tmp_path / "b").rows
    assert [row.basis for row in rows] == ["values", "statistics"]
    assert rows[1].note.startswith("damaged: it ends at byte")


def test_a_pair_that_shows_up_twice_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    real = tensor_pairs.measure_pairs
    monkeypatch.setattr(tensor_pairs, "measure_pairs", lambda rows: (measured.append(len(rows)), real(rows))[1])
    monkeypatch.setattr("tensorprobe.engine.rank_task.evidence_of", lambda *_, **__: [])  # looks at a few again
    a = np.arange(8, dtype=np.float32)
    for name, value in (("a", a), ("b", a + 1)):
        calls = [call(NAME, outputs=[value]), call("Tensor.view.0.forward", inputs=[value], outputs=[value])]
        write(tmp_path / name, calls)
    rows = tensorprobe.compare(tmp_path / "a", tmp_path / "b").rows
    assert sum(measured) == 1 and [row.max_abs for row in rows] == [1.0, 1.0, 1.0]


def test_tensors_before_the_first_difference_of_the_calls_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are read in step until they differ; aligning them afterwards measures only what is new."""
    measured = []
    real = tensor_pairs.measure_pairs
    monkeypatch.setattr(tensor_pairs, "measure_pairs", lambda rows: (measured.append(len(rows)), real(rows))[1])
    monkeypatch.setattr("tensorprobe.engine.rank_task.evidence_of", lambda *_, **__: [])  # looks at a few again
    monkeypatch.setattr("tensorprobe.pairing.call_pairs.CHUNK", 2)
    a = np.arange(8, dtype=np.float32)
    for name, more, extra in (("a", 0, []), ("b", 1, [call("Tensor.neg.0.forward", outputs=[a])])):
        calls = [call(f"Tensor.add.{number}.forward", outputs=[a * number + more]) for number in range(5)]
        write(tmp_path / name, [*calls[:4], *extra, *calls[4:]])
    result = tensorprobe.compare(tmp_path / "a", tmp_path / "b")
    assert sum(measured) == 5 and [row.max_abs for row in result.rows] == [1.0] * 5
    assert result.summary.buckets.only_candidate == 1

"""What holds of every comparison, whatever the two runs are: tried on random runs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensorprobe
from tensorprobe.errors import NothingPaired
from tensorprobe.judge import POLICIES
from tests.builders.runs import Call, call, write

OPS = (
    "Functional.linear",
    "Functional.softmax",
    "Tensor.add",
    "Torch.matmul",
    "Functional.gelu",
    "Tensor.view",
    "Torch.topk",
)
DTYPES = ("float32", "float16", "float64", "int64", "bool")
QUIET = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = np.random.default_rng(draw(st.integers(0, 5)))
    values = generator.normal(size=shape) * draw(st.sampled_from([1.0, 1e-3, 300.0]))
    if dtype.startswith("float"):
        special = draw(st.sampled_from([None, np.nan, np.inf, -np.inf, 0.0]))
        if special is not None and values.size:
            values.reshape(-1)[-1] = special
    return np.nan_to_num(values).astype(dtype) if dtype in ("int64", "bool") else values.astype(dtype)


@st.composite
def runs(draw: st.DrawFn) -> list[Call]:
    ops = draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=8))
    numbers: dict[str, int] = {}
    calls = []
    for op in ops:
        number = numbers[op] = numbers.get(op, -1) + 1
        inputs = draw(st.lists(arrays(), max_size=2))
        outputs = draw(st.lists(arrays(), min_size=1, max_size=2))
        calls.append(call(f"{op}.{number}.forward", inputs=inputs, outputs=outputs))
        if draw(st.booleans()):
            calls.append(call(f"{op}.{number}.backward", inputs=outputs[:1], outputs=inputs[:1]))
    return calls


def compare(left: list[Call], right: list[Call], **options: Any) -> tensorprobe.Result:
    with tempfile.TemporaryDirectory() as folder:
        a, b = (
            write(Path(folder) / name, calls, **options.pop(name, {})) for name, calls in (("a", left), ("b", right))
        )
        return tensorprobe.compare(a, b, **options)


@QUIET
@given(runs(), st.sampled_from(list(POLICIES)), st.sampled_from(["tensor", "summary", "bare summary"]))
def test_a_run_agrees_with_itself(calls: list[Call], policy: str, mode: str) -> None:
    result = compare(calls, calls, policy=policy, a={"mode": mode}, b={"mode": mode})
    assert not any(row.verdict == "diverges" for row in result.rows)
    # The older rules need values or digests: without both they can say nothing.
    silent = policy.startswith("seed") and mode == "bare summary"
    assert result.exit_code in ((0, 2) if silent else (0,)) and result.agrees == (result.exit_code == 0)
    assert result.divergence is None and result.summary.first_difference is None
    assert not result.findings


@QUIET
@given(runs(), runs())
def test_swapping_the_sides_swaps_the_only_lists_and_keeps_every_difference(
    left: list[Call], right: list[Call]
) -> None:
    try:
        one, other = compare(left, right), compare(right, left)
    except NothingPaired:
        with pytest.raises(NothingPaired):
            compare(right, left)
        return
    assert one.summary.buckets.only_baseline == other.summary.buckets.only_candidate
    assert one.summary.buckets.only_candidate == other.summary.buckets.only_baseline
    assert one.summary.buckets.paired == other.summary.buckets.paired
    ours = {(row.call, row.slot): row for row in one.rows}
    theirs = {(row.candidate_call, row.slot): row for row in other.rows}
    assert ours.keys() == theirs.keys()
    for key, row in ours.items():
        for name in ("max_abs", "mean_abs", "different", "nonfinite_different", "bit_identical", "ulp_max", "count"):
            assert getattr(row, name) == getattr(theirs[key], name) or np.isnan(row.max_abs), (key, name)
        assert np.isclose(row.bias, -theirs[key].bias, rtol=1e-9, atol=1e-300) or np.isnan(row.bias)


@QUIET
@given(runs(), runs())
def test_every_call_is_in_one_bucket_and_every_pair_has_a_status(left: list[Call], right: list[Call]) -> None:
    try:
        summary = compare(left, right).summary
    except NothingPaired:
        assert not {each["name"] for each in left} & {each["name"] for each in right}
        return
    buckets = summary.buckets
    alone = buckets.in_regions + buckets.only_baseline + buckets.only_candidate
    assert 2 * buckets.paired + alone == len(left) + len(right)
    assert sum(summary.statuses.values()) == buckets.paired
    assert sum(summary.bases.values()) == summary.rows
    assert (summary.answer == "diverged") == (summary.divergence is not None) == (summary.exit_code == 1)


@QUIET
@given(runs(), runs(), st.integers(1, 3))
def test_the_answer_does_not_depend_on_threads_or_the_order_of_files(
    left: list[Call], right: list[Call], threads: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        a = write(root / "a", {(0, 0): left, (1, 0): right, (0, 1): right})
        b = write(root / "b", {(0, 1): right, (1, 0): left, (0, 0): left})
        shutil.copytree(b, root / "c", copy_function=shutil.copy)
        first = tensorprobe.compare(a, b, threads=1)
        again = tensorprobe.compare(a, root / "c", threads=threads)
        assert repr(list(first.rows)) == repr(list(again.rows))  # repr: NaN is not equal to itself
        same = {"output": None, "elapsed_s": 0.0, "candidate": first.summary.candidate}
        ours, theirs = (msgspec.structs.replace(each.summary, **same) for each in (first, again))
        assert msgspec.json.encode(ours) == msgspec.json.encode(theirs)

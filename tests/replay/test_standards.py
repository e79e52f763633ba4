"""Each planted error is flagged, each kind of healthy noise is not; every standard says what its table says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorprobe.checks.check import CheckSettings
from tensorprobe.errors import SettingsError
from tensorprobe.judge.standards import STANDARDS, Evidence, judge
from tensorprobe.model.dtypes import TINY
from tensorprobe.replay.evidence import gather, size_of, within_range
from tests.checks.planting import DEVICE, Spoiler, assert_passes, check, planted, record, record_one


def element(tensor: torch.Tensor) -> torch.Tensor:
    wrong = tensor.detach().clone().contiguous()
    wrong.view(-1)[wrong.numel() // 3] += 0.5
    return wrong


def tail(tensor: torch.Tensor) -> torch.Tensor:
    wrong = tensor.detach().clone()
    wrong[..., -1] = 0
    return wrong


def broken(tensor: torch.Tensor) -> torch.Tensor:
    wrong = tensor.detach().clone().contiguous()
    wrong.view(-1)[7] = float("nan")
    return wrong


ERRORS: dict[str, Spoiler] = {
    "scale 1.01": lambda tensor: tensor * 1.01,
    "scale 1.0001": lambda tensor: tensor * 1.0001,
    "bias": lambda tensor: tensor + 1e-2,
    "one element": element,
    "tail": tail,
    "nan": broken,
    "rounded to ten bits": lambda tensor: tensor.to(torch.float16).to(tensor.dtype),
    "rows swapped": lambda tensor: tensor.flip(0),
}


def linear(dtype: torch.dtype) -> Callable[[], Any]:
    x, w = torch.randn(24, 32).to(dtype), torch.randn(16, 32).to(dtype)
    return lambda: F.linear(x.requires_grad_(), w.requires_grad_())


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    call = record_one(tmp_path / "run", linear(torch.float32), "linear")
    assert_passes(call)
    with planted(monkeypatch, outputs=ERRORS[error]):
        found = check(call)
    assert found.forward == "fail" and "forward output.0: " in found.message
    assert all(one.measured > one.allowed for one in found.details if one.result == "fail")


@pytest.mark.parametrize("error", ["scale 1.01", "one element", "tail", "nan", "rows swapped"])
def test_a_planted_error_is_flagged_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    call = record_one(tmp_path / "run", linear(torch.bfloat16), "linear")
    assert_passes(call)
    with planted(monkeypatch, outputs=ERRORS[error]):
        assert check(call).forward == "fail"


@pytest.mark.parametrize("error", ERRORS)
def test_a_wrong_gradient_is_flagged_though_the_result_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    call = record_one(tmp_path / "run", linear(torch.float32), "linear")
    with planted(monkeypatch, gradients=ERRORS[error]):
        found = check(call)
    assert (found.forward, found.backward) == ("pass", "fail")


def test_sums_in_half_precision_are_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Already for eight terms, where no element is off by more than its last place."""
    a, b = torch.randn(64, 8).bfloat16(), torch.randn(8, 32).bfloat16()
    call = record_one(tmp_path / "run", lambda: torch.matmul(a, b), "matmul")

    def narrow(_: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(64, 32, dtype=torch.bfloat16)
        for at in range(8):
            total = (total.float() + a[:, at : at + 1].float() @ b[at : at + 1].float()).bfloat16()
        return total

    assert_passes(call, data="real", backward="skip")
    with planted(monkeypatch, outputs=narrow):
        assert check(call, data="real").forward == "fail"


def test_another_order_of_summation_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(32, 512), torch.randn(512, 32)
    call = record_one(tmp_path / "run", lambda: torch.matmul(a, b), "matmul")

    def in_blocks(_: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(32, 32)
        for at in range(0, 512, 16):
            total += a[:, at : at + 16] @ b[at : at + 16]
        return total

    with planted(monkeypatch, outputs=in_blocks):
        assert_passes(call, data="real", backward="skip")


def test_a_gradient_that_is_mathematically_zero_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 1) * 4
    call = record_one(tmp_path / "run", lambda: F.normalize(x.requires_grad_(), dim=1), "normalize")
    with planted(monkeypatch, gradients=lambda gradient: gradient + 3e-8 * torch.randn_like(gradient)):
        assert_passes(call)
    assert_passes(call, device="cpu")


def test_the_cpu_alone_is_blamed_for_what_is_wrong_and_not_for_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 64)
    call = record_one(tmp_path / "run", lambda: torch.cumsum(x.requires_grad_(), 0), "cumsum")
    assert_passes(call, device="cpu")
    right = torch.cumsum

    def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = right(tensor, *args, **kwargs)
        return found * 1.001 if tensor.dtype is torch.float32 else found

    from tensorprobe.replay import functions

    functions.find_op.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cumsum", wrong)
        assert check(call, device="cpu").forward == "fail"
    functions.find_op.cache_clear()
    assert_passes(call, device="cpu")


def test_other_choices_among_equal_values_pass_and_wrong_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 1.0, 0.0]])
    call = record_one(tmp_path / "run", lambda: torch.argmax(x, dim=1), "argmax")
    with planted(monkeypatch, outputs=lambda _: torch.tensor([2, 1])):
        found = assert_passes(call, data="real", backward="skip")
        assert found.details[0].judged_by == "different choices of equal values"
    for wrong in (torch.tensor([0, 0]), torch.tensor([99, 0])):
        with planted(monkeypatch, outputs=lambda _, wrong=wrong: wrong):
            assert check(call, data="real").forward == "fail"


def test_integers_and_bools_are_exact_under_every_standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(0, 9, (5, 5))
    *calls, _ = [*record(tmp_path / "run", lambda: (torch.add(x, 1), torch.eq(x, 3))), None]
    assert len(calls) == 2
    for call in calls:
        for standard in STANDARDS:
            assert_passes(call, standard=standard, backward="skip")
            with planted(monkeypatch, outputs=lambda t: torch.where(torch.arange(25).view(5, 5) == 7, ~t, t)):
                assert check(call, standard=standard).forward == "fail"


def test_the_standard_of_the_older_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but a thousandth within a thousandth in half precision, all but a ten-thousandth within one for float32.

    The share counts only when the greatest absolute error reaches 0.001.
    """
    x = torch.rand(200, 100) * 20 + 20
    call = record_one(tmp_path / "run", lambda: torch.mul(x, 2.0), "mul")
    with planted(monkeypatch, outputs=lambda tensor: tensor * (1 + 0.9e-4)):
        assert_passes(call, standard="seed", backward="skip")
        assert check(call).forward == "fail"
    with planted(monkeypatch, outputs=lambda tensor: tensor * (1 + 1.1e-4)):
        found = check(call, standard="seed")
    assert found.forward == "fail" and found.details[0].judged_by == "share_over_1e4"
    with planted(monkeypatch, outputs=lambda tensor: tensor + 0.0009 * (tensor > 50)):
        assert_passes(call, standard="seed", backward="skip")


def figures(**changes: float) -> dict[str, float]:
    usual = {
        "relative_l2": 0.0, "max_abs": 0.0, "one_minus_cosine": 0.0, "within_1e2": 1.0, "within_1e3": 1.0,
        "within_1e4": 1.0, "slope": 1.0, "slope_z": 0.0, "bias": 0.0, "bias_z": 0.0, "count": 1000.0, "different": 0.0,
        "nonfinite_different": 0.0, "bit_identical": 1.0, "ulp_max": 0.0,
    }  # fmt: skip
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("standard", "changes", "passes"),
    [
        ("seed", {"one_minus_cosine": 0.009}, True),
        ("seed", {"one_minus_cosine": 0.02, "relative_l2": 0.2, "different": 900.0}, False),
        ("seed", {"max_abs": 0.0009, "within_1e4": 0.5, "relative_l2": 0.01}, True),
        ("seed", {"max_abs": 0.0011, "within_1e4": 0.5, "relative_l2": 0.01}, False),
        ("binary", {"bit_identical": 0.0}, False),
        ("absolute", {"max_abs": 0.9e-6}, True),
        ("absolute", {"max_abs": 1.1e-6}, False),
        ("ulp", {"ulp_max": 32.0}, True),
        ("ulp", {"ulp_max": 33.0}, False),
        ("noise-aware", {"relative_l2": 2e-7, "different": 5.0}, True),
        ("noise-aware", {"relative_l2": 3e-7, "different": 5.0}, False),
        ("noise-aware", {"nonfinite_different": 1.0, "different": 1.0}, False),
        ("noise-aware", {"relative_l2": float("nan"), "different": 5.0}, False),
    ],
)
def test_limits_of_the_standards(standard: str, changes: dict[str, float], passes: bool) -> None:
    device = figures(**changes)
    own = figures(relative_l2=5e-8, max_abs=1e-7, different=9.0)
    evidence = Evidence("Functional.gelu", "forward", "float32", device, own, device, 1.0, 1.0)
    assert judge(STANDARDS[standard], evidence).passes is passes


@pytest.mark.parametrize(("standard", "passes"), [("seed", True), ("noise-aware", False)])
def test_the_older_standard_takes_a_device_that_rounds_after_each_step(standard: str, passes: bool) -> None:
    """The figures of the gradient of mish in bfloat16, on a device that has no kernel for it."""
    device = figures(
        relative_l2=0.0031, max_abs=0.0133, within_1e2=0.83, within_1e3=0.2, different=1600.0, count=2048.0
    )
    own = figures(relative_l2=0.0017, max_abs=0.0077, within_1e3=0.39, different=0.0, count=2048.0)
    sizes = {"scale": 0.6, "largest": 3.7, "beyond": (0.0035, 0.0)}
    evidence = Evidence("Functional.mish", "backward", "bfloat16", device, own, device, **sizes)  # type: ignore[arg-type]
    assert judge(STANDARDS[standard], evidence).passes is passes


@pytest.mark.parametrize(
    ("dtype", "cpu_is_tested", "passes"),
    [("bfloat16", True, True), ("bfloat16", False, False), ("float16", True, False), ("float32", True, False)],
)
def test_only_the_cpu_in_bfloat16_may_flush_subnormals(dtype: str, cpu_is_tested: bool, passes: bool) -> None:
    """bfloat16 is computed in float32, which has the same subnormals; float16's are normal numbers of float32."""
    half = TINY[dtype] / 2
    flushed = figures(relative_l2=1.0, max_abs=half, within_1e2=0.0, within_1e3=0.0, different=1000.0)
    own = None if cpu_is_tested else figures()
    evidence = Evidence("Functional.gelu", "forward", dtype, flushed, own, flushed, half / 2, half, strict=True)
    assert judge(STANDARDS["noise-aware"], evidence).passes is passes


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"no standard 'noise-awear'.*Did you mean 'noise-aware'"):
        CheckSettings(standard="noise-awear")
    with pytest.raises(SettingsError, match="data is 'none'"):
        CheckSettings(data="none")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="device 'nodevice' cannot be used"):
        CheckSettings(device="nodevice")
    assert CheckSettings(device=DEVICE).standard == "noise-aware"


@pytest.mark.parametrize(("op", "direction"), [("Functional.gelu", "backward"), ("Functional.silu", "forward")])
def test_one_small_element_of_a_half_precision_result_is_held_to_its_own_size(op: str, direction: str) -> None:
    wide = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right = wide.to(torch.bfloat16)
    wrong = right.clone()
    wrong[int((wide.abs() - 0.05).abs().argmin())] *= 1.1  # a hundredth of the largest element
    own = {"output.0": right}
    for result, passes in ((right, True), (wrong, False)):
        evidence = gather(op, direction, {"output.0": (wide, result)}, own)["output.0"]
        opinion = judge(STANDARDS["noise-aware"], evidence)
        assert opinion.passes is passes
    assert opinion.judged_by == "beyond_rounding"


@pytest.mark.parametrize(
    "values", [[3.0, -4.0], [1.0, float("nan"), -3.0], [float("inf"), -2.0], [float("nan")], [], [0.0, 1e-40]]
)
def test_sizes_leave_out_what_is_not_finite(values: list[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    rms = math.sqrt(sum(value**2 for value in finite) / len(finite)) if finite else 0.0
    expected = rms, max((abs(value) for value in finite), default=0.0)
    assert size_of(torch.tensor(values, dtype=torch.float64)) == pytest.approx(expected)


def test_zeros_beside_large_numbers_are_within_the_range_of_a_dtype() -> None:
    wide = torch.tensor([0.0, 1.0, 1e-9], dtype=torch.float64)
    assert torch.equal(within_range(wide[:2], torch.float16), wide[:2])
    assert within_range(wide, torch.float16)[2] == 0.0
    assert within_range(torch.tensor([0.0, 1e6], dtype=torch.float64), torch.float16)[1] == math.inf

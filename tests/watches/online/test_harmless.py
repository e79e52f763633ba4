"""What a program computes is the same to the last bit under the watch; a right program raises no alarm; every call is accounted for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tensorprobe
from tensorprobe import torch_names
from tensorprobe.errors import CaptureIncomplete
from tensorprobe.model.online import OnlineResult
from tensorprobe.watches.online.checker import Checker
from tests.watches.online.programs import PROGRAMS, Program, leaves, perceptron, train

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
ATTENTION = (
    "Aten._scaled_dot_product_flash_attention" + ("_for_cpu" * (torch_names.torch_version() >= (2, 2))) + ".default"
)
NEEDS = {
    "fused_adam_under_autocast": [pytest.mark.needs_torch("2.4", "fused Adam on the CPU")],
    "subclasses": [pytest.mark.needs_torch("2.2", "nested tensors with the layout torch.jagged")],
}
MUST_COMPARE = {
    "attention": {ATTENTION, "Aten.native_layer_norm.default"},
    "fused_adam_under_autocast": {"Aten._fused_adam_.default", "Aten.addmm.default", "Aten._to_copy.default"},
    "adam_over_lists_of_tensors": {"Aten._foreach_addcdiv_.ScalarList", "Aten._foreach_lerp_.Scalar"},
    "running_statistics_of_batch_norm": {"Aten.native_batch_norm.default", "Aten.native_batch_norm_backward.default"},
    "recurrent": {"Aten.addmm.default"},
    "transforms": {"Aten.mm.default", "Aten.exp.default"},
    "threads": {"Aten.mm.default"},
    "inference": {"Aten.add_.Tensor", "Aten.mul.out"},
    "compiled_region": {"Aten.mul.Tensor"},
}
"""Program → ops of it that the watch may not pass by."""


def run(program: Program) -> list[Any]:
    """Everything that comes of a program, with the random state it leaves behind."""
    torch.manual_seed(7)
    return [*leaves(program()), torch.get_rng_state()]


def watched(program: Program, **settings: Any) -> tuple[list[Any], OnlineResult]:
    with tensorprobe.online(on_fail="report", **settings) as watch:
        found = run(program)
    return found, watch.result


def assert_same_bits(expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found)
    for at, (one, other) in enumerate(zip(expected, found, strict=True)):
        if not isinstance(one, torch.Tensor):
            assert one == other, at
            continue
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), at
        one, other = (each.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for each in (one, other))
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), at


def assert_accounted_for(result: OnlineResult) -> None:
    skipped = sum(sum(ops.values()) for ops in result.skipped.values())
    assert result.seen == result.compared + skipped + result.unsampled + result.filtered + result.broken
    assert result.compared == sum(count.compared for count in result.ops.values())
    assert result.failed == sum(count.failed for count in result.ops.values())


def assert_no_alarm(result: OnlineResult) -> None:
    assert [(row.call, row.judged_by, row.measured, row.allowed) for row in result.failures] == []
    assert (result.failed, result.broken, result.first_error) == (0, 0, None)
    assert_accounted_for(result)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=NEEDS.get(name, ())) for name in PROGRAMS], ids=str)
def plain(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    """The name of a program, and what comes of it when nobody looks."""
    return request.param, run(PROGRAMS[request.param])


@pytest.mark.parametrize("reference", ["cpu-fp64", "cpu"])
def test_the_program_is_not_changed_and_raises_no_alarm(plain: tuple[str, list[Any]], reference: str) -> None:
    name, expected = plain
    found, result = watched(PROGRAMS[name], reference=reference)
    assert_same_bits(expected, found)
    assert_no_alarm(result)
    assert set(result.ops) >= MUST_COMPARE.get(name, set())


def test_nor_with_a_chain_nor_with_a_worker(plain: tuple[str, list[Any]]) -> None:
    name, expected = plain
    for settings in ({"chain": True}, {"workers": 2, "budget": "1M"}):
        found, result = watched(PROGRAMS[name], **settings)
        assert_same_bits(expected, found)
        assert_no_alarm(result)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outside", [True, False])
def test_modes_of_the_user_see_no_second_execution(outside: bool) -> None:
    def count(settings: dict[str, Any] | None) -> tuple[int, int]:
        torch.manual_seed(7)
        mine, flops = _Counting(), FlopCounterMode(display=False)
        watch = None if settings is None else tensorprobe.online(on_fail="report", **settings)
        x = torch.randn(5, 6)
        model = perceptron()
        if watch is not None and not outside:
            watch.start()
        with mine, flops:
            if watch is not None and outside:
                watch.start()
            model(x).sum().backward()
            if watch is not None:
                assert watch.stop().compared > 10
        return mine.calls, flops.get_total_flops()

    assert count({"reference": "cpu-fp64", "chain": True}) == count(None)


def _double_the_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


CORNERS: dict[str, Callable[[], None]] = {
    "an exception": lambda: (_ for _ in ()).throw(KeyError("theirs")),
    "an exception in backward": lambda: _raise_in_backward(),
    "a call that torch refuses": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
}


def _raise_in_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: (_ for _ in ()).throw(KeyError("theirs")))
    y.sum().backward()


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_program_raises_is_raised_and_nothing_stays_installed(corner: str, workers: int) -> None:
    watch = tensorprobe.online(on_fail="report", workers=workers)
    with pytest.raises((KeyError, RuntimeError), match=r"theirs|mat1 and mat2"), watch:
        torch.ones(3) * 2
        CORNERS[corner]()
    assert_no_alarm(watch.result)  # conftest proves after each test that nothing is left


def test_a_call_that_raises_is_counted_as_such() -> None:
    with tensorprobe.online(on_fail="report") as watch, pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert watch.result.skipped["raised RuntimeError"] == {"Aten.mm.default": 1}


def test_a_model_can_be_used_as_before_after_the_watch() -> None:
    model = perceptron()
    with tensorprobe.online(model, on_fail="report") as watch:
        model(torch.randn(2, 6)).sum().backward()
    _double_the_weights(model)
    seen = watch.result.seen
    model(torch.randn(2, 6)).sum().backward()
    assert watch.stop().seen == seen  # stopping twice is allowed, and nothing was counted meanwhile


def test_silence_on_a_right_program(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tensorprobe"):
        watched(PROGRAMS["adam_in_float32"])
    assert caplog.records == []


@pytest.fixture(scope="module")
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded() -> list[Any]:
    """FSDP2: parameters are DTensors, and every call of theirs becomes one on what this process holds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), mesh=init_device_mesh("cpu", (1,)))
    out = train(model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(3, 6))
    return [one.to_local() if hasattr(one, "to_local") else one for one in leaves(out)]


@pytest.mark.needs_torch("2.8", "fully_shard on the CPU")
def test_sharded_training_is_watched_on_what_each_process_holds(one_process_group: None) -> None:
    expected = run(sharded)
    found, result = watched(sharded, chain=True)
    assert_same_bits(expected, found)
    assert_no_alarm(result)
    assert {"Aten.addmm.default", "Aten.tanh_backward.default"} <= set(result.ops)


def test_a_failure_of_ours_does_not_hide_the_exception_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("ours")

    monkeypatch.setattr(Checker, "raised", fails)
    with (
        pytest.warns(CaptureIncomplete, match="OSError: ours"),
        tensorprobe.online(on_fail="report"),
        pytest.raises(RuntimeError, match="cannot be multiplied"),
    ):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))

"""The proof of backward capture: each recorded call, run again alone with the gradients recorded for its outputs, gives the
gradients recorded for its inputs. Nothing but the record on disk is used."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorprobe
from tensorprobe.ops.names import parse_call_name
from tensorprobe.record import Run
from tensorprobe.record.stored import StoredCall
from tests.taps.rebuild import Replay
from tests.taps.tiny import Residual, TiedGPT, images, names, record, the_call, tokens, value


class Proof(NamedTuple):
    compared: int
    mismatches: list[str]
    missing: list[str]
    without_backward: list[str]


def prove(run: Run) -> Proof:
    calls = list(run.calls())
    backwards = {call.name: call for call in calls if call.direction == "backward"}
    compared, mismatches, missing, without = 0, [], [], []
    for call in calls:
        if call.direction == "backward" or not any(slot.grad for slot in call.outputs):
            continue
        backward = backwards.get(call.name.replace(".forward", ".backward"))
        if backward is None:
            without.append(call.name)
            continue
        expected, recorded = expected_and_recorded(call, backward)
        missing += [f"{call.name} {slot}" for slot in expected.keys() - recorded.keys()]
        for slot in expected.keys() & recorded.keys():
            compared += 1
            if not torch.allclose(expected[slot], recorded[slot], rtol=1e-4, atol=1e-6):
                mismatches.append(f"{call.name} {slot}")
    return Proof(compared, mismatches, missing, without)


def expected_and_recorded(call: StoredCall, backward: StoredCall) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the inputs by slot: from running the call alone, and from the record."""
    coming = {f"output{slot.name[5:]}": slot.tensor().clone() for slot in backward.inputs}
    expected = Replay(call).gradients(coming)
    recorded = {f"input{slot.name[6:]}": slot.tensor().clone() for slot in backward.outputs}
    places = {slot.name: slot.offset for slot in call.inputs}
    for name in [name for name in expected if name not in recorded]:
        # A tensor that comes in twice has its whole gradient at its first place.
        first = next(other for other in places if places[other] == places[name])
        if first != name:
            expected[first] = expected[first] + expected.pop(name)
    return expected, recorded


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.lstm(sequence)[0].pow(2).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.attention(sequence, sequence.flip(0), sequence * 2)[0].pow(2).sum()


class Linear3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch).sigmoid().sum()


class Doubled(nn.Module):
    """One tensor at two places of a call, and calls within one expression."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = batch * self.weight
        return torch.cat([hidden * hidden, hidden + hidden, hidden]).pow(3).sum()


def random_sequence(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


MODELS: list[tuple[str, type[nn.Module], Callable[[], Tensor], int, list[str]]] = [
    ("cnn with in-place relu and sum", Residual, images, 15, []),
    (
        "gpt with tied embedding, views and setitem",
        TiedGPT,
        tokens,
        45,
        ["Functional.dropout", "Functional.dropout"],
    ),  # p=0 is no node
    ("lstm", Lstm, lambda: random_sequence(3, 2, 4), 10, []),
    (
        "multi-head attention",
        Attention,
        lambda: random_sequence(3, 2, 8).requires_grad_(),
        15,
        ["Tensor.view", "Tensor.mean"],
    ),
    ("3-d linear without bias", Linear3d, lambda: random_sequence(2, 3, 4).requires_grad_(), 4, []),
    ("one tensor at two places", Doubled, lambda: random_sequence(3, 4), 6, []),
]


@pytest.mark.parametrize(
    ("model", "batch", "at_least", "unused"), [row[1:] for row in MODELS], ids=[m[0] for m in MODELS]
)
def test_each_call_run_alone_gives_the_recorded_gradients(
    model: type[nn.Module], batch: Any, at_least: int, unused: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network, data = model(), batch()
    run = record(tmp_path / "run", lambda: network(data).backward(), model=network)
    proof = prove(run)
    assert proof.mismatches == []
    assert proof.missing == []
    assert proof.compared >= at_least
    assert [parse_call_name(name).op for name in proof.without_backward] == unused


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_true_under_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    data = random_sequence(3, 4).requires_grad_()

    def action() -> None:
        hidden = checkpoint(lambda x: torch.tanh(second(F.gelu(first(x)))), torch.sin(data), use_reentrant=reentrant)
        hidden.pow(2).sum().backward()

    run = record(tmp_path / "run", action)
    by_name = {call.name: call for call in run.calls() if call.repeat == 0}
    checked = 0
    for name in ("Functional.linear.0", "Functional.linear.1", "Functional.gelu.0", "Torch.tanh.0"):
        call = by_name[f"{name}.forward"]
        backward = by_name[f"{name}.backward"]
        if reentrant:  # its first forward is run without gradients; the one that is differentiated is the second
            call = next(again for again in run.calls() if again.name == call.name and again.repeat == 1)
        expected, recorded = expected_and_recorded(call, backward)
        assert expected.keys() == recorded.keys()
        for slot, gradient in expected.items():
            checked += 1
            torch.testing.assert_close(recorded[slot], gradient, rtol=1e-5, atol=1e-6)
    assert checked >= 8


def test_gradient_of_a_change_through_a_view_is_the_gradient_of_what_was_changed(tmp_path: Path) -> None:
    data = random_sequence(3, 4).requires_grad_()

    def action() -> None:
        hidden = torch.sin(data)
        hidden[0].mul_(5)
        (hidden * torch.arange(12.0).view(3, 4)).sum().backward()

    run = record(tmp_path / "run", action)
    backward = the_call(run, "Tensor.mul_.0.backward")
    assert [slot.name for slot in backward.inputs] == ["input.0.base"]
    incoming = torch.arange(12.0).view(3, 4)
    assert torch.equal(value(backward, "input.0.base"), incoming)


def test_only_the_asked_gradients_flow_in_a_partial_backward(tmp_path: Path) -> None:
    data, weight = random_sequence(3, 4).requires_grad_(), random_sequence(4, 4).requires_grad_()

    def action() -> None:
        torch.autograd.grad(F.linear(torch.sin(data), weight).sum(), weight)

    run = record(tmp_path / "run", action)
    assert "Torch.sin.0.backward" not in names(run)
    linear = the_call(run, "Functional.linear.0.backward")
    assert [slot.name for slot in linear.outputs] == ["output.1"]


def test_calls_inside_a_custom_backward_are_recorded(tmp_path: Path) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return torch.hypot(gradient, x) * 0 + gradient * 2 * x

    data = random_sequence(3).requires_grad_()
    run = record(tmp_path / "run", lambda: Square.apply(torch.sin(data)).sum().backward())
    assert "Torch.hypot.0.forward" in names(run)
    assert "Torch.sin.0.backward" in names(run)


def test_gradients_of_autocast_calls_reach_the_float32_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def action() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = network(random_sequence(2, 4)).sum() + network(random_sequence(3, 4)).sum()
        loss.backward()

    run = record(tmp_path / "run", action, model=network)
    for number in range(4):
        backward = the_call(run, f"Functional.linear.{number}.backward")
        assert {"output.1", "output.2"} <= {slot.name for slot in backward.outputs}


def test_a_tensor_that_a_call_casts_several_times_has_the_sum_of_its_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 8, dtype=torch.bfloat16, requires_grad=True)

    def action() -> None:
        F.scaled_dot_product_attention(q, q, q).sum().backward()

    backward = the_call(record(tmp_path / "run", action), "Functional.scaled_dot_product_attention.0.backward")
    assert q.grad is not None
    assert torch.allclose(value(backward, "output.0").float(), q.grad.float(), rtol=0.02, atol=0.02)


def test_gradient_that_a_custom_backward_changes_is_recorded_as_it_came_in(tmp_path: Path) -> None:
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient.mul_(2)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Doubling.apply(x)

    data = random_sequence(3).requires_grad_()
    run = record(tmp_path / "run", lambda: (Module()(data) * torch.arange(3.0)).sum().backward(), level="module")
    backward = the_call(run, "Module.Module.backward.0")
    assert value(backward, "input.0").tolist() == [0, 1, 2]
    assert value(backward, "output.0").tolist() == [0, 2, 4]


def test_backward_that_never_reaches_the_result_of_a_module_is_recorded(tmp_path: Path) -> None:
    """An auxiliary loss is computed from the middle of it."""

    class Module(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            middle = torch.relu(a)
            self.loss = middle.sum()
            return middle * torch.sigmoid(b)

    module, (a, b) = Module(), (random_sequence(4).requires_grad_() for _ in range(2))

    def action() -> None:
        module(a, b)
        module.loss.backward()

    run = record(tmp_path / "run", action, level="module")
    assert value(the_call(run, "Module.Module.backward.0"), "output.0").shape == (4,)


def test_calls_that_wait_for_their_backward_hardly_count_for_the_garbage_collector(tmp_path: Path) -> None:
    """Each object that it tracks brings its next run nearer, and it looks through all objects of the program."""
    calls = 200

    def tracked_for_each_call() -> float:
        result = torch.ones(3, requires_grad=True)
        gc.collect()
        gc.disable()
        before = gc.get_count()[0]
        for _ in range(calls):
            result = result.tanh()
        after = gc.get_count()[0]
        gc.enable()
        result.sum().backward()
        return (after - before) / calls

    with tensorprobe.Probe(str(tmp_path)):
        tracked_for_each_call()
        assert tracked_for_each_call() < 12

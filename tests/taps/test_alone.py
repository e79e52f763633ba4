"""One call run once more, back with given gradients: its ATen calls are those of the true backward, and training does
not notice.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorprobe
from tensorprobe.errors import CaptureIncomplete
from tensorprobe.model import Coverage
from tensorprobe.model.sink import Alone, Needs
from tensorprobe.record import Run
from tensorprobe.record.run_sink import RunSink
from tensorprobe.taps import Probe
from tests.taps.tiny import Stack, features, names, the_call, value


class Everything(nn.Module):
    """What a second run could disturb: dropout, running statistics, in-place calls, autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.conv(images)), inplace=True)
        hidden = F.dropout(hidden, 0.4)
        hidden = self.conv2(hidden)
        hidden *= images
        hidden[:, 0] = hidden[:, 0] * 0.5
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.head(hidden.mean((2, 3)))
        values, _ = hidden.float().max(1)
        return values.square().sum()


def images() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3))


def train(steps: int = 2, probe: Probe | None = None) -> list[Tensor]:
    """Everything that training leaves behind, gradients, buffers and the random state included."""
    torch.manual_seed(7)
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    left = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(images())
        loss.backward()
        left += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        if probe is not None:
            probe.step()
    return [*left, *(t.detach() for t in model.state_dict().values()), torch.get_rng_state(), torch.rand(3)]


def alone_into(out: Path, alone: Alone) -> RunSink:
    return RunSink(out, needs=Needs(alone=alone))


def run_alone(
    out: Path, name: str, gradients: list[Any] | None, action: Callable[[], Any], **callbacks: Any
) -> tuple[Run, Coverage]:
    arrays = None if gradients is None else [numpy.asarray(gradient) for gradient in gradients]
    alone = Alone(name, gradients=lambda: arrays, **callbacks)
    with Probe(out, level="aten", inside=(name,), sink=alone_into(out, alone)) as probe:
        action()
    assert probe.coverage is not None
    return tensorprobe.open_run(out), probe.coverage


@pytest.fixture(scope="module")
def true_backward(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same step at API level and at ATen level."""
    out = tmp_path_factory.mktemp("true")
    train(1)  # in torch 2.6 and 2.8 the first optimizer imports the compiler, which makes 71 calls
    runs = []
    for level in ("api", "aten"):
        with tensorprobe.capture(out / level, level=level):
            train(1)
        runs.append(tensorprobe.open_run(out / level))
    return runs[0], runs[1]


CALLS = [
    "Functional.conv2d.0", "Functional.conv2d.1", "Functional.batch_norm.0", "Functional.relu.0", "Functional.dropout.0",
    "Functional.linear.0", "Tensor.mul_.0", "Tensor.mul.0", "Tensor.mean.0", "Tensor.max.0", "Tensor.__setitem__.0",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_training_does_not_notice(call: str, true_backward: tuple[Run, Run], tmp_path: Path) -> None:
    given = the_call(true_backward[0], f"{call}.backward").inputs[0].tensor().float()
    alone = Alone(f"{call}.backward", gradients=lambda: [given.numpy()], warn=lambda _: None)
    probe = Probe(
        tmp_path / "run",
        level="aten",
        inside=(alone.name,),
        sink=alone_into(tmp_path / "run", alone),
        steps=[0],
    )
    plain = train()
    with probe:
        watched = train(probe=probe)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))
    assert probe.coverage is not None
    assert (probe.coverage.failed, probe.coverage.first_error) == (0, None)
    assert probe.coverage.recorded > 0


@pytest.mark.parametrize("call", CALLS[:-1])
def test_with_the_true_gradient_the_same_is_computed_as_in_the_true_backward(
    call: str, true_backward: tuple[Run, Run], tmp_path: Path
) -> None:
    api, aten = true_backward
    name = f"{call}.backward"
    given = the_call(api, name).inputs[0].tensor()
    run, _ = run_alone(tmp_path / "run", name, [given.float().numpy()], lambda: train(1))
    # whether what is saved is detached depends on the version of torch
    expected = [found for found in aten.calls() if found.origin == name and found.op != "Aten.detach.default"]
    actual = [found for found in run.calls() if found.op != "Aten.detach.default"]
    assert [found.op for found in actual] == [found.op for found in expected]
    assert expected
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.origin, ours.module) == (theirs.origin, theirs.module)
        for our_slot, their_slot in zip(ours.slots, theirs.slots, strict=True):
            assert our_slot.digest == their_slot.digest, (ours.name, our_slot.name)


def test_other_gradients_give_another_backward(tmp_path: Path) -> None:
    data = torch.tensor([1.0, 2.0], requires_grad=True)
    name = "Tensor.mul.0.backward"
    run, _ = run_alone(tmp_path / "run", name, [[10.0, 100.0]], lambda: (data * 3).sum().backward())
    (call,) = run.calls()
    assert value(call, "input.0").tolist() == [10.0, 100.0]
    assert value(call, "output.0").tolist() == [30.0, 300.0]
    assert data.grad.tolist() == [3.0, 3.0]


def test_without_gradients_the_true_backward_is_recorded(tmp_path: Path) -> None:
    data = torch.tensor([1.0, 2.0], requires_grad=True)
    run, _ = run_alone(tmp_path / "run", "Tensor.mul.0.backward", None, lambda: (data * 3).sum().backward())
    (call,) = run.calls()
    assert value(call, "output.0").tolist() == [3.0, 3.0]


def test_call_that_gives_several_tensors_takes_a_gradient_for_each(tmp_path: Path) -> None:
    data = torch.arange(4.0, requires_grad=True)
    name = "Torch.split.0.backward"
    run, _ = run_alone(tmp_path / "run", name, [[1.0, 2.0], [3.0, 4.0]], lambda: torch.split(data, 2))
    joined = the_call(run, "Aten.cat.default.0.backward")
    assert value(joined, "output.0").tolist() == [1.0, 2.0, 3.0, 4.0]


WRONG = {
    "too few for a tuple": (
        "Torch.split.0.backward",
        [[1.0, 2.0]],
        lambda x: torch.split(x, 2),
        r"\(tuple\) is not of tensor type and cannot be automatically derived; it takes 2 gradients, given: 1",
    ),
    "too many": ("Torch.sin.0.backward", [[1.0] * 4] * 2, torch.sin, r"its output takes 1 gradient, given: 2"),
    "another shape": ("Torch.sin.0.backward", [[1.0]], torch.sin, r"gradient 0 has shape \(1,\), its output \(4,\)"),
    "complex": ("Torch.sin.0.backward", [[1j] * 4], torch.sin, r"gradient 0 is complex128, its output torch.float32"),
    "no gradient": (
        "Torch.sin.0.backward",
        [[1.0] * 4],
        lambda x: torch.sin(x.detach()),
        "none of its outputs requires a gradient, so it has no backward",
    ),
    "a function": (
        "Functional.triplet_margin_with_distance_loss.0.backward",
        [1.0],
        lambda x: F.triplet_margin_with_distance_loss(x, x, x, distance_function=lambda a, b: (a - b).sum(-1)),
        "one of its arguments is a function, which may hold more than values",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_told_and_nothing_else_happens(case: str, tmp_path: Path) -> None:
    name, gradients, function, message = WRONG[case]
    data = torch.ones(4, requires_grad=True)
    told: list[str] = []
    with pytest.warns(CaptureIncomplete, match=f"nothing matched '{name}'"):
        run, coverage = run_alone(tmp_path / "run", name, gradients, lambda: function(data), warn=told.append)
    assert len(told) == 1
    assert told[0].startswith(f"{name} cannot be run alone: ")
    assert re.search(message, told[0])
    assert [note.removesuffix(" (1 times)") for note in coverage.notes] == told
    assert (names(run), coverage.failed) == ([], 0)


def test_warning_by_default(tmp_path: Path) -> None:
    with pytest.warns(CaptureIncomplete) as caught:
        run_alone(
            tmp_path / "run", "Torch.sin.0.backward", [[1.0]], lambda: torch.sin(torch.ones(4, requires_grad=True))
        )
    assert any("gradient 0 has shape (1,)" in str(warning.message) for warning in caught)


def test_failure_of_the_second_run_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    def gradients() -> Any:
        raise OSError("disk on fire")

    data = torch.ones(4, requires_grad=True)
    probe = Probe(
        tmp_path / "run",
        level="aten",
        sink=alone_into(tmp_path / "run", Alone("Torch.sin.0.backward", gradients=gradients)),
    )
    with pytest.warns(CaptureIncomplete, match=r"Torch\.sin\.0\.backward, step 0: OSError: disk on fire"), probe:
        torch.sin(data).sum().backward()
    assert torch.equal(data.grad, torch.cos(data))
    assert probe.coverage is not None and probe.coverage.failed == 1


def test_exception_of_the_true_call_is_the_users(tmp_path: Path) -> None:
    around: list[str] = []
    alone = Alone("Torch.matmul.0.forward", enter=lambda: around.append("enter"), leave=lambda: around.append("leave"))
    with (
        Probe(tmp_path / "run", sink=alone_into(tmp_path / "run", alone)),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
    assert around == ["enter", "leave"]


def test_forward_is_bracketed_once_where_it_happens(tmp_path: Path) -> None:
    seen: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, data: Tensor) -> Tensor:
            return data.clone()

    norm = nn.BatchNorm1d(3)
    alone = Alone(
        "Functional.batch_norm.1.forward", enter=lambda: seen.append("enter"), leave=lambda: seen.append("leave")
    )
    norm.register_forward_pre_hook(lambda *_: seen.append("call"))
    norm.register_forward_hook(lambda *_: seen.append("called"))
    with Probe(
        tmp_path / "run",
        level="api",
        mode="structure",
        names=[alone.name],
        sink=alone_into(tmp_path / "run", alone),
    ):
        for _ in range(3):
            norm(torch.randn(4, 3))
    assert seen == ["call", "called", "call", "enter", "leave", "called", "call", "called"]
    assert names(tensorprobe.open_run(tmp_path / "run")) == ["Functional.batch_norm.1.forward"]


def test_backward_of_the_second_run_is_bracketed(tmp_path: Path) -> None:
    seen: list[str] = []
    data = torch.ones(2, requires_grad=True)
    (hidden := torch.sin(data)).register_hook(lambda _: seen.append("true backward"))
    run_alone(
        tmp_path / "run",
        "Torch.cos.0.backward",
        [[1.0, 1.0]],
        lambda: torch.cos(hidden).sum().backward(),
        enter=lambda: seen.append("enter"),
        leave=lambda: seen.append("leave"),
    )
    assert seen == ["enter", "leave", "true backward"]


def test_failing_callbacks_are_counted(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no device")

    probe = Probe(
        tmp_path / "run",
        sink=alone_into(tmp_path / "run", Alone("Torch.sin.0.forward", enter=fail, leave=fail)),
    )
    with pytest.warns(CaptureIncomplete, match="OSError: no device"), probe:
        result = torch.sin(torch.ones(2))
    assert probe.coverage is not None and probe.coverage.failed == 2
    assert torch.equal(result, torch.ones(2).sin())


@pytest.mark.parametrize("reentrant", [True, False])
def test_call_inside_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    def action() -> list[Tensor]:
        torch.manual_seed(2)
        model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=reentrant), dropout=0.3)
        model(features()).sum().backward()
        return [*(parameter.grad for parameter in model.parameters()), torch.get_rng_state()]

    plain, watched = action(), []
    gradient = numpy.ones((3, 8), dtype=numpy.float32)
    run, coverage = run_alone(tmp_path / "run", "Torch.tanh.1.backward", [gradient], lambda: watched.extend(action()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))
    assert coverage.failed == 0
    (call,) = [call for call in run.calls() if call.op == "Aten.tanh_backward.default"]
    assert value(call, "input.0").tolist() == gradient.tolist()


def test_versions_graphs_and_memory_of_the_user_are_left_alone(tmp_path: Path) -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    data = torch.randn(2, 3)
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    def action() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = F.linear(data, weight)
        action.gone = weakref.ref(result)  # type: ignore[attr-defined]

    action()
    without, packed[:] = list(packed), []
    run, _ = run_alone(tmp_path / "run", "Functional.linear.0.backward", [numpy.ones((2, 3))], action)
    assert packed == without
    assert weight.grad is None and weight._version == data._version == 0
    gc.collect()
    assert action.gone() is None  # type: ignore[attr-defined]
    assert "Aten.mm.default.0.backward" in names(run)


def test_generator_of_the_user_is_not_advanced(tmp_path: Path) -> None:
    def action(out: list[Tensor]) -> None:
        generator = torch.Generator().manual_seed(5)
        data = torch.zeros(4, requires_grad=True) * 1
        out += [data.normal_(generator=generator).detach(), torch.rand(2, generator=generator)]

    plain: list[Tensor] = []
    watched: list[Tensor] = []
    action(plain)
    _, coverage = run_alone(tmp_path / "run", "Tensor.normal_.0.backward", [[1.0] * 4], lambda: action(watched))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))
    assert coverage.failed == 0


def test_modes_of_the_user_do_not_see_the_second_run(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def action() -> int:
        with Counting() as counting:
            torch.sin(torch.ones(2, requires_grad=True)).sum().backward()
        return counting.calls

    counts = [action()]
    run, _ = run_alone(tmp_path / "run", "Torch.sin.0.backward", [[1.0, 1.0]], lambda: counts.append(action()))
    assert counts[0] == counts[1]
    assert [call.op for call in run.calls()] == ["Aten.cos.default", "Aten.mul.Tensor"]

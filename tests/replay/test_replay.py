"""A recorded call is run again as it was: every way to pass arguments, every kind of result, and the reason where it cannot be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
import torch.nn.functional as F

import tensorprobe
from tensorprobe.checks.check import CheckSettings, check_call
from tensorprobe.replay.functions import CannotReplay, find_function
from tensorprobe.replay.inputs import make_inputs
from tensorprobe.replay.once import Replay
from tensorprobe.replay.runs import prepare
from tests.builders.runs import call as made_call
from tests.builders.runs import write
from tests.checks.planting import DEVICE, HALF, assert_passes, assert_skipped, check, planted, record, record_one

Program = Callable[[], Any]
torch.manual_seed(0)
X, Y = torch.randn(6, 8), torch.randn(6, 8)
W = torch.randn(8, 8)
IDS = torch.tensor([3, 0, 5, 1])
LONG = torch.randint(0, 7, (6, 8))


def needing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def calling(name: str, *arguments: Any, **keywords: Any) -> Program:
    """`torch.<name>` of these arguments; tensors of floats require a gradient."""

    def run() -> Any:
        given = [needing(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
        return getattr(torch, name)(*given, **keywords)

    return run


WAYS: dict[str, Program] = {
    "positional": calling("matmul", X, W),
    "keywords": lambda: torch.sum(input=needing(X), dim=1, keepdim=True),
    "list": lambda: torch.cat([needing(X), needing(Y)], 1),
    "tuple": lambda: torch.stack((needing(X), needing(Y))),
    "named tuple": calling("sort", X, dim=-1),
    "values and indices": calling("topk", X, 3, dim=-1),
    "nested results": lambda: torch.split(needing(X), [2, 4]),
    "slices": lambda: needing(X)[1:5:2, ..., None],
    "index tensor": lambda: needing(X)[IDS],
    "mask": lambda: needing(X)[X > 0],
    "einsum": lambda: torch.einsum("ij,jk->ik", needing(X), needing(W)),
    "a function of functional": lambda: F.linear(needing(X), needing(W), bias=needing(W[0])),
    "infinite argument": lambda: needing(X).masked_fill(X > 0, float("-inf")),
    "strided input": lambda: torch.exp(needing(torch.randn(4, 4, 12))[..., ::3].transpose(0, 1)),
    "expanded input": lambda: torch.mul(needing(X[:1]).expand(6, 8), 2.0),
    "eigenvectors": lambda: torch.linalg.eigh(needing(W @ W.T)),
    "singular vectors": lambda: torch.linalg.svd(needing(X)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_replays_forward_and_backward(tmp_path: Path, way: str) -> None:
    *_, call = record(tmp_path / "run", WAYS[way])
    for data in ("random", "real"):
        found = assert_passes(call, data=data)
        assert {one.direction for one in found.details} == {"forward", "backward"}


NO_GRADIENT: dict[str, Program] = {
    "integers": lambda: torch.add(LONG, 3),
    "bools": lambda: torch.logical_and(X > 0, Y > 0),
    "comparison": lambda: X > Y,
    "factory": lambda: torch.arange(0, 12, 2, dtype=torch.float32, device="cpu"),
    "like": lambda: torch.zeros_like(X, dtype=torch.float16),
    "to dtype": lambda: X.to(torch.bfloat16),
    "to device, as text": lambda: X.to("cpu", torch.float64, copy=True),
    "type_as": lambda: X.type_as(X.half()),
    "half": lambda: X.half(),
    "nonzero": lambda: torch.nonzero(X > 0),
    "unique": lambda: torch.unique(LONG, return_counts=True),
    "argmax": lambda: torch.argmax(X, dim=1),
    "complex": lambda: torch.mul(torch.view_as_complex(X.view(6, 4, 2)), 2j),
    "empty": lambda: torch.exp(torch.zeros(0, 3)),
    "scalar": lambda: torch.exp(torch.tensor(0.5)),
    "out": lambda: torch.add(X, Y, out=torch.empty(6, 8)),
    "lists changed in place": lambda: torch._foreach_add_([X.clone(), Y.clone()], [Y, X], alpha=0.5),
    "split at places on the host": lambda: torch.tensor_split(X, torch.tensor([2, 4])),
}


@pytest.mark.parametrize("way", NO_GRADIENT)
def test_what_has_no_gradient_replays(tmp_path: Path, way: str) -> None:
    *_, call = record(tmp_path / "run", NO_GRADIENT[way])
    for data in ("random", "real"):
        assert_passes(call, data=data, backward="skip")
        assert_passes(call, data=data, backward="skip", device="cpu")


IN_PLACE: dict[str, Program] = {
    "method": lambda: needing(X).clone().add_(Y),
    "operator": lambda: needing(X).clone().__imul__(Y),
    "keyword": lambda: F.relu(needing(X).clone(), inplace=True),
    "position": lambda: F.relu(needing(X).clone(), True),
    "item": lambda: needing(X).clone().__setitem__((slice(1, 3), 0), 5.0),
    "part of a tensor": lambda: needing(torch.randn(6, 8)).clone()[:, 2:5].mul_(3.0),
}


@pytest.mark.parametrize("way", IN_PLACE)
def test_what_changes_its_argument_replays(tmp_path: Path, way: str) -> None:
    *_, call = record(tmp_path / "run", IN_PLACE[way])
    runs, _ = prepare(call, CheckSettings(device=DEVICE, data="real"))
    kept = {name: tensor.clone() for name, tensor in runs.inputs.items()}
    found = assert_passes(call, data="real")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in runs.inputs.items())
    recorded = [slot for slot in call.outputs if slot.has_data]
    assert recorded and {one.slot for one in found.details if one.direction == "forward"} == {s.name for s in recorded}
    for slot in recorded:
        assert torch.equal(runs.device.outputs[slot.name].detach(), slot.tensor())


def test_the_inputs_given_are_never_changed(tmp_path: Path) -> None:
    call = record_one(tmp_path / "run", lambda: needing(X).clone().add_(Y), "add_")
    inputs = make_inputs(call, "random")
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    replay = Replay(call.model, inputs)
    replay.gradients({"output.0": torch.ones(6, 8)})
    assert all(torch.equal(inputs[name], before[name]) and not inputs[name].requires_grad for name in inputs)


def test_a_replay_has_the_strides_of_the_record(tmp_path: Path) -> None:
    wide = torch.randn(4, 12)
    call = record_one(tmp_path / "run", lambda: torch.neg(wide[:, ::3]), "neg")
    seen = []
    for data in ("random", "real"):
        (tensor,) = make_inputs(call, data).values()
        seen.append(tensor.stride())
        copy = Replay(call.model, {"input.0": tensor}, precision="double")._leaves["input.0"]
        assert copy.stride() == (12, 3) and copy.dtype is torch.float64
        assert torch.equal(copy, tensor.double())
    assert seen == [(12, 3), (12, 3)]


def test_checking_twice_says_the_same(tmp_path: Path) -> None:
    for call in record(tmp_path / "run", lambda: F.gelu(F.linear(needing(X), needing(W)))):
        one, other = (msgspec.structs.replace(check(call), elapsed_s=0.0) for _ in range(2))
        assert one == other and one.forward == "pass"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, HALF])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_healthy_ops_pass_in_every_dtype(tmp_path: Path, dtype: torch.dtype, device: str) -> None:
    def program() -> None:
        x, w = needing(torch.randn(16, 32).to(dtype)), needing(torch.randn(32, 32).to(dtype))
        y = F.layer_norm(F.linear(x, w), (32,))
        y = F.softmax(F.gelu(y), -1) * x + torch.sigmoid(x)
        torch.cumsum(y, 0).sum().backward()

    calls = record(tmp_path / "run", program)
    assert len(calls) >= 8
    for call in calls:
        if "float" in str([slot.dtype for slot in call.inputs]):
            found = check(call, device=device)
            assert (found.forward, found.message) == ("pass", ""), found.message


def test_the_reference_is_wider_than_the_recorded_dtype(tmp_path: Path) -> None:
    call = record_one(tmp_path / "run", lambda: torch.exp(X.half()), "exp")
    assert {one.reference_dtype for one in check(call).details} == {"torch.float64"}
    seed = check(call, standard="seed")
    assert [(one.device_dtype, one.reference_dtype) for one in seed.details] == [("torch.float16", "torch.float32")]


def test_bfloat16_replays(tmp_path: Path) -> None:
    call = record_one(tmp_path / "run", lambda: torch.matmul(needing(X.bfloat16()), needing(W.bfloat16())), "matmul")
    assert {one.device_dtype for one in assert_passes(call).details} == {"torch.bfloat16"}
    assert {one.device_dtype for one in assert_passes(call, device="cpu").details} == {"torch.bfloat16"}


def test_autocast_is_on_again(tmp_path: Path) -> None:
    def program() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.matmul(needing(X), needing(W))
            torch.matmul(needing(X.bfloat16()), needing(W))

    for call in record(tmp_path / "run", program):
        if call.op == "Torch.matmul":
            found = assert_passes(call)
            assert [one.device_dtype for one in found.details if one.direction == "forward"] == ["torch.bfloat16"]


def test_functions_keep_their_identity(tmp_path: Path) -> None:
    activation = F.gelu
    (call,) = record(tmp_path / "run", lambda: F.gelu(X))
    check(call)
    assert F.gelu is activation


MAGIC: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": lambda a, b: a + b,
    "__and__": lambda a, b: a & b,
    "__bool__": lambda a, b: bool(a),
    "__div__": lambda a, b: torch.Tensor.__div__(a, b),
    "__eq__": lambda a, b: a == b,
    "__ge__": lambda a, b: a >= b,
    "__gt__": lambda a, b: a > b,
    "__iadd__": lambda a, b: a.__iadd__(b),
    "__iand__": lambda a, b: a.__iand__(b),
    "__idiv__": lambda a, b: a.__idiv__(b),
    "__ifloordiv__": lambda a, b: a.__ifloordiv__(b),
    "__ilshift__": lambda a, b: a.__ilshift__(b),
    "__imod__": lambda a, b: a.__imod__(b),
    "__imul__": lambda a, b: a.__imul__(b),
    "__ior__": lambda a, b: a.__ior__(b),
    "__irshift__": lambda a, b: a.__irshift__(b),
    "__isub__": lambda a, b: a.__isub__(b),
    "__ixor__": lambda a, b: a.__ixor__(b),
    "__lshift__": lambda a, b: a << b,
    "__matmul__": lambda a, b: a @ b,
    "__mod__": lambda a, b: a % b,
    "__mul__": lambda a, b: a * b,
    "__nonzero__": lambda a, b: torch.Tensor.__nonzero__(a),
    "__or__": lambda a, b: a | b,
    "__radd__": lambda a, b: a.__radd__(2),
    "__rmul__": lambda a, b: a.__rmul__(2),
    "__rshift__": lambda a, b: a >> b,
    "__sub__": lambda a, b: a - b,
    "__truediv__": lambda a, b: a / b,
    "__xor__": lambda a, b: a ^ b,
}
WHOLE = ("and", "ilshift", "iand", "ior", "irshift", "ixor", "lshift", "or", "rshift", "xor")


def operands(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if name in ("__bool__", "__nonzero__"):
        return torch.tensor([1.5]), torch.tensor([1.0])
    if name.strip("_") in WHOLE:
        return torch.randint(1, 9, (4, 4)), torch.randint(1, 4, (4, 4))
    return torch.rand(4, 4) + 1, torch.rand(4, 4) + 1


@pytest.mark.parametrize("name", MAGIC)
def test_magic_functions_replay_by_their_old_name(tmp_path: Path, name: str) -> None:
    """As a record of the older tool has them: `Tensor.__add__`."""
    one, other = operands(name)
    alone = name in ("__bool__", "__nonzero__")
    inputs = (
        [one.numpy()] if alone else [one.numpy(), 2 if "__r" in name and name[3:6] in ("add", "mul") else other.numpy()]
    )
    arrays = [value for value in inputs if isinstance(value, numpy.ndarray)]
    args = [{"slot": f"input.{at}"} if isinstance(value, numpy.ndarray) else value for at, value in enumerate(inputs)]
    run = write(tmp_path / "run", [made_call(f"Tensor.{name}.0.forward", inputs=arrays, args=args)])
    (call,) = tensorprobe.open_run(run).calls()
    assert find_function(call.op) is getattr(torch.Tensor, name)
    for data in ("random", "real"):
        assert_passes(call, data=data, backward="skip")


@pytest.mark.parametrize("name", [name for name in MAGIC if name not in ("__bool__", "__nonzero__")])
def test_magic_functions_replay_as_capture_names_them(tmp_path: Path, name: str) -> None:
    one, other = operands(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        *_, call = record(tmp_path / "run", lambda: MAGIC[name](one.clone(), other))
    for data in ("random", "real"):
        assert_passes(call, data=data, backward="skip")


def test_a_number_that_comes_back_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(
        tmp_path / "run",
        [made_call("Tensor.__bool__.0.forward", inputs=[numpy.ones(1, "float32")], args=[{"slot": "input.0"}])],
    )
    (call,) = tensorprobe.open_run(run).calls()
    assert_passes(call, backward="skip")
    with planted(monkeypatch, outputs=torch.logical_not):
        assert check(call).forward == "fail"


REFUSED: dict[str, str] = {
    "Torch.empty.0.forward": "not initialised",
    "Distributed.all_reduce.0.forward": "a collective needs the other ranks",
    "Tensor.set_.0.forward": "manages memory",
    "Torch.no_such_op.0.forward": "not a known operation on tensors in this process",
    "Torch.load.0.forward": "load reads or writes files",
    "Functional.torch.load.0.forward": "load reads or writes files",
    "Torch.compile.0.forward": "not a known operation on tensors",
    "Torch.set_num_threads.0.forward": "not a known operation on tensors",
    "Functional.importlib.import_module.0.forward": "not a known operation on tensors",
    "Torch.hub.load.0.forward": "load reads or writes files",
    "Torch.jit.load.0.forward": "load reads or writes files",
    "Torch.os.system.0.forward": "not a known operation on tensors",
    "Torch._C._jit_set_profiling_mode.0.forward": "not a known operation on tensors",
    "Torch.ops.load_library.0.forward": "not a known operation on tensors",
    "Torch.from_file.0.forward": "from_file reads or writes files",
    "Tensor.__class__.0.forward": "not a known operation on tensors",
    "Ops.load_library.0.forward": "not a known operation on tensors",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_skipped_with_the_reason(tmp_path: Path, name: str) -> None:
    """Also what a hostile run names: nothing of torch is called that is not an operation on tensors."""
    run = write(tmp_path / "run", [made_call(name, inputs=[numpy.ones(2, "float32")], args=["/etc/passwd"])])
    (call,) = tensorprobe.open_run(run).calls()
    assert_skipped(call, REFUSED[name])
    with pytest.raises(CannotReplay):
        find_function(call.op)


def test_sparse_results_are_skipped(tmp_path: Path) -> None:
    call = record_one(tmp_path / "run", lambda: X.to_sparse(), "to_sparse")
    assert_skipped(call, "output.0 is a sparse coo tensor")


def test_objects_are_skipped_with_their_type(tmp_path: Path) -> None:
    call = record_one(
        tmp_path / "run",
        lambda: F.triplet_margin_with_distance_loss(X, Y, X, distance_function=torch.nn.PairwiseDistance()),
        "triplet",
    )
    assert_skipped(call, "an object that cannot be recorded (torch.nn.modules.distance.PairwiseDistance)")


def test_an_op_that_raises_everywhere_is_skipped_and_one_that_raises_on_the_device_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = record_one(tmp_path / "run", lambda: torch.exp(X), "exp")
    hostile = write(
        tmp_path / "other",
        [made_call("Torch.matmul.0.forward", inputs=[numpy.ones((2, 3), "float32")] * 2,
                   args=[{"slot": "input.0"}, {"slot": "input.1"}])],
    )  # fmt: skip
    (wrong,) = tensorprobe.open_run(hostile).calls()
    assert_skipped(wrong, "it raises on the reference too: RuntimeError")

    def broken(output: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("error code 507015")

    with planted(monkeypatch, outputs=broken):
        found = check(call)
    assert (found.forward, found.backward) == ("fail", "skip")
    assert found.message == "it raised on cpu:0: RuntimeError: error code 507015"


def test_recorded_values_are_used_where_random_ones_mean_nothing(tmp_path: Path) -> None:
    call = record_one(
        tmp_path / "run",
        lambda: torch.repeat_interleave(X, torch.tensor([2, 0, 1, 3, 1, 2]), 0, output_size=9),
        "repeat",
    )
    found = assert_passes(call, backward="skip")
    assert found.data == "real"
    assert check(record_one(tmp_path / "plain", lambda: torch.exp(X), "exp")).data == "random"


def test_a_gradient_that_the_device_does_not_give_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = record_one(tmp_path / "run", calling("matmul", X, W), "matmul")

    class Forgets(Replay):
        def gradients(self, given: Any) -> dict[str, torch.Tensor]:
            found = super().gradients(given)
            return found if self._wide else {"output.0": found["output.0"]}

        def __init__(self, *args: Any, **where: Any) -> None:
            super().__init__(*args, **where)
            self._wide = where.get("device") != DEVICE

    monkeypatch.setattr("tensorprobe.replay.runs.Replay", Forgets)
    found = check_call(call, None, CheckSettings(device=DEVICE))
    assert (found.forward, found.backward) == ("pass", "fail")
    assert "backward output.1: the device gives none, the reference does" in found.message

"""Calls that an older torch does not show to a function mode are recorded all the same, and nobody notices."""

from __future__ import annotations

import inspect
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import tensorprobe
from tensorprobe.ops.names import canonical_op
from tests.taps.tiny import the_call, value

CALLS = {
    "x[0]": "Tensor.__getitem__",
    "x[0:2]": "Tensor.__getitem__",
    "x[rows]": "Tensor.__getitem__",
    "x[...]": "Tensor.__getitem__",
    "x[None]": "Tensor.__getitem__",
    "x[mask]": "Tensor.__getitem__",
    "x[0, 1]": "Tensor.__getitem__",
    "x[0] = v": "Tensor.__setitem__",
    "x[0] = 1.0": "Tensor.__setitem__",
    "x[mask] = 0.0": "Tensor.__setitem__",
    "x[0, 1] = v[0]": "Tensor.__getitem__ Tensor.__setitem__",
    "x.T": "",
    "x.to(torch.float64)": "Tensor.to",
    "x.to('cpu', copy=True)": "Tensor.to",
    "x.float()": "Tensor.float",
    "x.contiguous()": "Tensor.contiguous",
    "x.copy_(x)": "Tensor.copy_",
    "x.type(torch.float64)": "Tensor.type",
    "x.new_zeros(2)": "Tensor.new_zeros",
    "x == v": "Tensor.eq",
    "x + v": "Tensor.add",
    "1 - x": "Tensor.__rsub__",
    "x @ x": "Tensor.matmul",
    "x += v": "Tensor.add_",
    "abs(x)": "Tensor.abs",
    "torch.full((2,), 1.0)": "Torch.full",
    "torch.tensor([1.0])": "Torch.tensor",
    "torch.stack([v, v])": "Torch.stack",
    "torch.split(v, 2)": "Torch.split",
    "torch.einsum('i,i', v, v)": "Torch.einsum",
    "torch._foreach_add([v, v], 1.0)": "Torch._foreach_add",
    "torch.linalg.norm(v)": "Torch.linalg.norm",
    "torch.ops.aten.mm(x, x)": "Ops.aten.mm",
    "F.linear(x, x)": "Functional.linear",
    "F.layer_norm(x, (4,))": "Functional.layer_norm",
    "F.cross_entropy(x, rows)": "Functional.cross_entropy",
    "F.max_pool2d(x[None], 2)": "Tensor.__getitem__ Functional.max_pool2d",
    "torch.nn.init.normal_(v)": "Torch.nn.init.normal_",
    "v.sum().item()": "Tensor.sum",
    "[*v.unbind()]": "Tensor.unbind",
}


def operands() -> dict[str, Any]:
    x = torch.arange(16.0).view(4, 4)
    return {"x": x, "v": torch.ones(4), "rows": torch.arange(4), "mask": x > 3, "torch": torch, "F": F}


@pytest.mark.parametrize("code", CALLS)
def test_a_call_is_recorded_with_every_torch(code: str, tmp_path: Path) -> None:
    names, compiled = operands(), compile(code, "program", "exec")
    with tensorprobe.capture(tmp_path / "run"):
        exec(compiled, names)
    found = tensorprobe.open_run(tmp_path / "run").calls()
    assert " ".join(canonical_op(call.op) for call in found) == CALLS[code]


def test_values_before_and_after_an_assignment_are_recorded(tmp_path: Path) -> None:
    x = torch.zeros(2, 2)
    with tensorprobe.capture(tmp_path / "run"):
        x[1] = torch.ones(2)
        assert x[1].tolist() == [1.0, 1.0]
    run = tensorprobe.open_run(tmp_path / "run")
    call = the_call(run, "Tensor.__setitem__.0.forward")
    assert value(call, "input.0").tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert value(call, "output.0").tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert value(the_call(run, "Tensor.__getitem__.0.forward"), "output.0").tolist() == [1.0, 1.0]


def test_gradients_of_an_indexed_tensor_are_recorded(tmp_path: Path) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with tensorprobe.capture(tmp_path / "run"):
        (x[1] * 3).sum().backward()
    call = the_call(tensorprobe.open_run(tmp_path / "run"), "Tensor.__getitem__.0.backward")
    assert value(call, "output.0").tolist() == [[0.0, 0.0], [3.0, 3.0]]


def test_modes_and_classes_of_the_program_see_what_they_always_see(tmp_path: Path) -> None:
    class Seeing(TorchFunctionMode):
        seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        seen: list[Any] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    def program() -> list[Any]:
        Seeing.seen, Own.seen = [], []
        with Seeing():
            plain, own = torch.ones(3), torch.ones(3).as_subclass(Own)
            plain[0], plain[0, None], own[1]
            plain[0] = 2.0
            own[1] = torch.ones(())
        return Seeing.seen + Own.seen + [torch.Tensor.__getitem__, torch.Tensor.__setitem__]

    expected = program()
    with tensorprobe.capture(tmp_path / "run"):
        assert program() == expected
    assert "__getitem__" not in vars(torch.Tensor)


def test_collectives_stay_the_same_objects(tmp_path: Path) -> None:
    imported, signature = dist.all_reduce, inspect.signature(dist.all_reduce)
    with tensorprobe.capture(tmp_path / "run"):
        assert dist.all_reduce is imported and pickle.loads(pickle.dumps(imported)) is imported
        assert inspect.signature(dist.all_reduce) == signature
        with pytest.raises(TypeError):
            dist.all_reduce()  # type: ignore[call-arg]
    assert inspect.signature(dist.all_reduce) == signature


def test_other_threads_index_as_ever(tmp_path: Path) -> None:
    found: list[float] = []
    begun, ended = threading.Event(), threading.Event()

    def index() -> None:
        begun.wait()
        found.append(torch.arange(3.0)[2].item())
        ended.set()

    thread = threading.Thread(target=index)
    thread.start()
    with tensorprobe.capture(tmp_path / "run"):
        begun.set()
        ended.wait()
    thread.join()
    assert found == [2.0]
    assert not list(tensorprobe.open_run(tmp_path / "run").calls())


class Own(torch.Tensor):
    """A class as people write them: torch makes each result one of it with `as_subclass`."""


@pytest.mark.parametrize("level", ["aten", "mix"])
def test_subclasses_of_tensor_work_under_a_dispatch_mode(tmp_path: Path, level: str) -> None:
    with tensorprobe.capture(tmp_path / "run", level=level):
        x = torch.ones(2, requires_grad=True)
        y = x.as_subclass(Own) * 3
        z = torch.Tensor.as_subclass(x.detach(), cls=Own)
        y.sum().backward()
    assert type(y) is type(z) is Own and x.grad is not None and x.grad.tolist() == [3.0, 3.0]
    assert "as_subclass" not in vars(torch.Tensor)
    names = [call.name for call in tensorprobe.open_run(tmp_path / "run").calls()]
    assert any("mul" in name for name in names) and any("sum" in name for name in names)


def test_a_detach_is_recorded_once(tmp_path: Path) -> None:
    x = torch.ones(2, requires_grad=True)
    with tensorprobe.capture(tmp_path / "run", level="aten"):
        x.detach().detach()
    names = [call.name for call in tensorprobe.open_run(tmp_path / "run").calls()]
    assert names == ["Aten.detach.default.0.forward", "Aten.detach.default.1.forward"]

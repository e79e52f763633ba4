"""Calls that are handled in C are recorded as those that are not: same lines, same stacks, same errors for the program."""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorprobe import _fast as native
from tensorprobe import arguments
from tensorprobe.record import run_sink, snapshot
from tensorprobe.taps import function_tap, probe, quick, stacks, training
from tests.taps.tiny import record

Pool = list[Tensor]
WRITTEN_IN_C = pytest.param(run_sink.RunSink, "_queue", marks=pytest.mark.needs_torch("2.10", "calls recorded in C"))


def fail(pool: Pool) -> None:
    with pytest.raises(RuntimeError):
        torch.mm(pool[0].flatten(), pool[1].flatten())


def warn(pool: Pool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.ones(2).requires_grad_().mul(2).grad  # noqa: B018
    assert caught[0].filename == __file__


def backward(pool: Pool) -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    (pool[0] @ weight).tanh().sum().backward()
    pool[1] = weight.grad  # type: ignore[assignment]


def in_place(pool: Pool) -> None:
    pool[0] = pool[0].clone()
    pool[0].mul_(0.5).add_(pool[1], alpha=2)
    pool[0][1] = 7


def several(pool: Pool) -> None:
    pool[0], _ = torch.max(pool[0], 0, keepdim=True)
    pool[0] = pool[0].expand(3, 3)
    left, right = pool[1].split([1, 2])
    pool[1] = torch.cat([right, left])


def lists(pool: Pool) -> None:
    torch._foreach_mul_([pool[1].clone()], 2.0)
    torch.add(pool[0], pool[1], out=torch.empty(3, 3))


def questions(pool: Pool) -> None:
    assert pool[0].shape == (3, 3) and pool[0].dtype is torch.float32 and pool[0].dim() == 2
    assert pool[0].is_contiguous() in (True, False) and isinstance(pool[0].sum().item(), float)
    assert torch.is_tensor(pool[0]) and not pool[0].is_complex()


def train(pool: Pool) -> None:
    """Roles: of parameters, a buffer, gradients outside of modules, and states that come into being one by one."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(pool[0].detach()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.mul(model[1].running_mean, pool[0][0])  # type: ignore[arg-type]
    del model[0]


def layouts(pool: Pool) -> None:
    """Strides of every kind: permuted blocks, holes, overlap, sizes 1 and 0, no axis at all, more than the ring takes at once."""
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    for view in (base.permute(3, 1, 0, 2), base[:, ::2], base[:, :1].transpose(0, 2), base[..., 1:2], base[:0].mT):
        view.neg()
        view.to(torch.bfloat16).t() if view.dim() == 2 else view.half().abs()
    torch.ones(3).expand(2, 3).neg()
    torch.tensor(3).add(1)
    base.as_strided((2, 2), (1, 1)).neg()
    torch.ones(1, 4).t().neg()
    torch.ones(4, 70).double().t()[::3].neg()


def kinds(pool: Pool) -> None:
    """Dtypes, and tensors that the table of torch cannot show or shows as another."""
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.complex64):
        torch.ones(3, dtype=dtype).reshape(1, 3).clone()
    (torch.ones(2, dtype=torch.complex64) * 2j).conj().imag.abs()
    torch._neg_view(pool[0]).sum()
    torch.ones(2, 2).to_sparse().coalesce().to_dense()
    torch.ones(2, device="meta").add(1)
    torch.vmap(torch.sin)(pool[0])
    with torch.inference_mode():
        pool[0].add(1).add_(1)
    pool[0].detach().as_subclass(type("Odd", (Tensor,), {})).add(1)
    if hasattr(torch, "_lazy_clone"):  # since 2.2
        torch._lazy_clone(pool[0]).sum()


def values(pool: Pool) -> None:
    """Arguments of every kind."""
    pool[0].clamp(min=float("-inf"), max=2**40)
    pool[0].sum(dim=(0, -1), dtype=torch.float64)
    torch.full((2, 3), float("nan"), device="cpu")
    pool[0].contiguous().view(-1)[1:3].unsqueeze(0)
    pool[0].index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(5.0))
    torch.stack([pool[0], pool[1]], dim=0).unbind(0)
    torch.nn.functional.pad(pool[0], [1, 1], mode="constant", value=True)
    pool[0].to("cpu", torch.float64, copy=True, memory_format=torch.contiguous_format)
    pool[0].max(dim=0).values.add(pool[0].topk(1)[1], alpha=-300)
    torch.tensor([2**62]).mul(-(2**62)).add(-129).add(70_000).add(255)
    torch.split(pool[0], [1, 2]), pool[0].chunk(2), torch.meshgrid(pool[0][0], pool[0][1], indexing="ij")


def graph(pool: Pool) -> None:
    """What hangs in the graph where: one input twice, views, changes in place, several results, a cached cast."""
    weight = torch.ones(3, 3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    left, right = (weight * weight).split([1, 2])
    view = weight.clone()
    view[0].mul_(other)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.nn.functional.linear(torch.nn.functional.linear(pool[0], weight, other), weight)
    total = left.sum() + right.max(0).values.sum() + view.sum() + found.float().sum()
    total = total + torch.lerp(weight, other, 0.5).sum() + torch.cat([weight, weight]).mean()
    (total + torch.einsum("ij,jk->ik", weight, weight).sum()).backward(retain_graph=True)
    total.backward()
    pool[0] = (weight.grad - weight.grad.mean()).clamp(-3, 3)  # type: ignore[union-attr]


OPS: list[Callable[[Pool], None]] = [
    layouts,
    kinds,
    values,
    graph,
    fail,
    warn,
    backward,
    in_place,
    several,
    lists,
    questions,
    train,
    lambda pool: pool.append(pool.pop(0) @ pool[0].t()),
    lambda pool: pool.append(torch.nn.functional.layer_norm(pool.pop(0), [3], eps=1e-3)),
    lambda pool: pool.append(torch.nn.functional.softmax(pool.pop(0), -1)),
    lambda pool: pool.append(torch.where(pool[0] > 0, pool.pop(0), pool[0])),
]


@contextmanager
def in_python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (arguments, quick, snapshot, stacks, training):
            patch.setattr(module, "fast", None)
        patch.setattr(probe, "function_tap_type", function_tap.FunctionTap)
        yield


def lines(run: Any) -> list[Any]:
    fields = "name dtype shape stride device grad summary digest nbytes skipped written role".split()
    return [
        (
            *(call.name, call.parent, call.module, call.raised, call.phase, call.microbatch, call.thread, call.repeat),
            *(repr(call.args), repr(call.kwargs), call.stack),
            [repr([getattr(slot, field) for field in fields]) for slot in call.slots],  # a NaN does not equal itself
        )
        for call in run.calls()
    ]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(OPS), min_size=1, max_size=8), st.sampled_from(["tensor", "summary"]))
@example(OPS, "tensor")
def test_any_sequence_of_calls_is_recorded_alike(ops: list[Callable[[Pool], None]], mode: str) -> None:
    def program() -> None:
        torch.manual_seed(1)
        pool = [torch.randn(3, 3), torch.randn(3, 3)]
        for op in ops:
            op(pool)

    with tempfile.TemporaryDirectory() as folder:
        in_c = lines(record(Path(folder) / "c", program, mode=mode))
        with in_python():
            assert in_c == lines(record(Path(folder) / "python", program, mode=mode))


def test_plain_calls_and_questions_never_reach_the_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function goes there once, to get its plan."""
    seen: list[str] = []
    original = function_tap.FunctionTap.__torch_function__

    def noting(tap: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return original(tap, func, types, args, kwargs)

    monkeypatch.setattr(function_tap.FunctionTap, "__torch_function__", noting)
    one = torch.ones(2)

    def program() -> None:
        seen.clear()
        for _ in range(5):
            one.mul(2).dim()

    run = record(tmp_path / "run", program, mode="tensor")
    assert seen == ["mul", "dim"]
    assert [call.op for call in run.calls()] == ["Tensor.mul"] * 5


def test_error_of_an_op_comes_from_the_programs_line(tmp_path: Path) -> None:
    def program() -> None:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        try:
            torch.mm(torch.ones(2), torch.ones(2))
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
            assert [frame.name for frame in frames] == ["program"]
            assert error.__context__ is None

    run = record(tmp_path / "run", program, mode="tensor")
    assert [call.raised for call in run.calls() if call.op == "Torch.mm" and call.raised] == ["RuntimeError"]


@pytest.mark.parametrize(("owner", "method"), [(function_tap.Describing, "_raised"), WRITTEN_IN_C])
def test_exception_raised_while_an_error_is_recorded_has_it_as_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    if owner is function_tap.Describing:
        monkeypatch.setattr(function_tap, "recording_in_c", lambda *_: None)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def program() -> None:
        one, other = torch.ones(2), torch.ones(3)
        for by in (one, other):  # on one line: its stack is known the second time
            if by is other:
                raising = interrupted if owner is function_tap.Describing else property(interrupted)
                monkeypatch.setattr(owner, method, raising, raising=False)
            with pytest.raises(KeyboardInterrupt) if by is other else nullcontext() as caught:
                one.mul(by)
        monkeypatch.undo()
        assert isinstance(caught.value.__context__, RuntimeError)
        one.mul(one)

    run = record(tmp_path / "run", program, mode="tensor")
    assert [call.op for call in run.calls()] == ["Torch.ones", "Torch.ones", "Tensor.mul", "Tensor.mul"]


def test_roles_are_those_that_the_owner_still_holds() -> None:
    """Addresses are used again: an owner that has let go of a tensor gives it no role, and one that is gone neither."""

    class Slot:
        role = ""

    model = torch.nn.Linear(2, 2, bias=False)
    tensor, state = model.weight, {"exp_avg": model.weight}
    owner: Any = weakref.ref(model)
    owned = (owner, "weight", "w", False, False, "parameter w")
    cases: list[tuple[Any, str]] = [
        (owned, "parameter w"),
        ((owner, "bias", "w", False, False, "parameter w"), ""),
        ((owner, "weight", "w", False, True, "buffer w"), ""),
        ((owner, "weight", "w", True, False, "gradient w"), ""),
        ((weakref.ref(torch.nn.Linear(1, 1)), "weight", "w", False, False, "parameter w"), ""),
        ((state, "exp_avg", "state"), "state"),
        ((state, "step", "state"), ""),
        ((3, "step", "state"), ""),
        (("too", "short"), ""),
        (None, ""),
    ]
    for known, role in cases:
        for tables in (({id(tensor): known}, None), ({}, lambda key, known=known: {key: known})):
            slot = Slot()
            native.mark(*tables, [("input.0", tensor)], [slot])
            assert slot.role == role
    model.weight.sum().backward()
    slot = Slot()
    gradient = model.weight.grad
    known = {id(gradient): (owner, "weight", "w", True, False, "gradient w")}
    native.mark(known, None, [("input.0", gradient)], [slot])
    assert slot.role == "gradient w"


def test_second_table_is_asked_again_once_for_what_it_lacks() -> None:
    asked: list[int] = []

    def outside(key: int) -> dict[int, Any]:
        asked.append(key)
        return {id(tensors[0]): None}

    tensors = [torch.ones(1) for _ in range(4)]
    native.mark({}, outside, [("input.0", tensor) for tensor in tensors], [None] * 4)
    assert asked == [id(tensors[0]), id(tensors[1])]
    for wrong in (lambda key: 3, lambda key: key.nothing):
        with pytest.raises((TypeError, AttributeError)):
            native.mark({}, wrong, [("input.0", tensors[0])], [None])
    for arguments_ in ((), ({}, None, (), []), (3, None, [], [])):
        with pytest.raises(TypeError):
            native.mark(*arguments_)


def frames_in(key: bytes | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(memoryview(key).cast("q")) if isinstance(key, bytes) else key


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.integers(0, 400), st.booleans())
def test_stacks_walked_in_c_are_those_of_the_twin(depth: int, outer_at: int, met: bool) -> None:
    book, twin = stacks.StackBook(), stacks.StackBook()
    twin.walker = None

    def deeper(left: int, outers: list[Any]) -> None:
        frame = sys._getframe()
        if left == outer_at and met:
            outers = [stacks.OuterStack(frame, each.walk(frame.f_back, None)) for each in (book, twin)]
        if left:
            (lambda: deeper(left - 1, outers))()
            return
        for innermost in (frame, frame.f_back, None):
            found = [each.walk(innermost, outer) for each, outer in zip((book, twin), outers, strict=True)]
            assert isinstance(found[0], bytes) and isinstance(found[1], tuple)
            assert frames_in(found[0]) == found[1]

    deeper(depth, [None, None])


def test_walker_refuses_what_is_no_stack() -> None:
    walker = native.walker(FrameType)

    def fail(_: Any) -> bool:
        raise ValueError("no")

    for wrong in (
        (walker, 3, None, b"", fail),
        (walker, sys._getframe(), None, "", fail),
        (None, None, None, b"", fail),
    ):
        with pytest.raises((TypeError, ValueError)):
            native.walk(*wrong)
    with pytest.raises(ValueError, match="no"):
        native.walk(walker, sys._getframe(), None, b"", fail)
    assert native.walk(walker, None, None, b"", fail) == b""
    assert native.walk(walker, sys._getframe(), None, b"", lambda code: False) == b""


def test_an_empty_result_does_not_hide_later_calls(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda: [torch.unbind(torch.ones(rows, 3)) for rows in (2, 0, 3)])
    assert [len(call.outputs) for call in run.calls() if call.op == "Torch.unbind"] == [2, 3]

"""Programs whose tensors and modules are of rare kinds do the same with a watch on them, and no call is missed."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional
from torch.fx.experimental.proxy_tensor import make_fx

import tensorprobe
from tensorprobe.watches.overflow.looker import facts_of, places_of
from tests.harm.programs import Program, Say, Watch, assert_unharmed

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


@program
def sizes_that_are_traced_as_symbols(watch: Watch, say: Say) -> None:
    with watch():
        traced = make_fx(lambda x: torch.relu(x).new_empty(x.shape[0]).fill_(1) + x.shape[0], tracing_mode="symbolic")
        say(traced(torch.ones(3, 4)).code)


@program
def subclasses_made_by_their_constructor(watch: Watch, say: Say) -> None:
    class Plain(torch.Tensor):
        pass

    class Named(torch.Tensor):
        @staticmethod
        def __new__(cls, data: Any, label: str) -> Any:
            return super().__new__(cls, data)

        def __init__(self, data: Any, label: str) -> None:
            self.label = label

    constructor = torch.Tensor.__new__
    with watch():
        say(Plain([1.0, 2.0]), Plain(torch.ones(2)) * 2, Plain(3).shape, Named([1.0], "a").label, torch.Tensor([4.0]))
        say(torch.Tensor.__new__ is constructor)
        say(torch.Tensor.__new__(Plain, [3.0]) + 1, torch.Tensor.__new__(torch.Tensor, [4.0]))
        with pytest.raises(TypeError, match="invalid data type"):
            Plain("no data")
        compiled = torch.compile(lambda x: Plain(x).sin(), backend="eager", fullgraph=True)
        say(compiled(torch.ones(2)))
        torch.compiler.reset()
    say(torch.Tensor.__new__ is constructor, "__new__" in vars(torch.Tensor))


@program
def kernels_that_warn(watch: Watch, say: Say) -> None:
    """Python shows a warning of a line once by default, and counts it in the module; `error` makes it an exception."""
    mask = torch.ones(3, dtype=torch.uint8)
    with watch():
        for action in ("always", "default", "error"):
            warnings.simplefilter(action)  # type: ignore[arg-type]
            for _ in range(2):
                try:
                    say(torch.ones(3)[mask], torch.add(torch.ones(3), 1, out=torch.ones(2)))
                    say(torch.ones(2, 2).std(0, correction=2))
                except UserWarning as raised:
                    say(str(raised))


@program
def transforms_inside_a_trace(watch: Watch, say: Say) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    with watch(model):
        say(make_fx(torch.func.grad(lambda x: model(x).sum()))(torch.ones(3, 4)).code)


@program
def modules_of_torchscript(watch: Watch, say: Say) -> None:
    inner = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    model = nn.Sequential(inner, nn.Linear(4, 1))
    with watch(model):
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        say(model(torch.ones(2, 4)), [parameter.grad for parameter in model.parameters()])


@program
def tensors_without_memory_of_their_own(watch: Watch, say: Say) -> None:
    eye, ones = torch.eye(3), torch.ones(2, 3)
    with watch():
        say((eye.to_sparse_csr() @ torch.ones(3, 1)), ones.to_mkldnn().relu().to_dense())
        say(functional.jacobian(torch.sin, torch.ones(3), vectorize=True))
        say(torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))(ones))


@program
def duals_of_forward_mode(watch: Watch, say: Say) -> None:
    with watch(), forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        say(*forward_ad.unpack_dual(dual.sin() * dual))


@program
def parameters_that_are_filled_on_no_device(watch: Watch, say: Say) -> None:
    with watch():
        model = nn.Linear(3, 3, device="meta")
        nn.init.kaiming_uniform_(tensor=model.weight, a=5)
        say(str(model.weight.device), nn.Linear(3, 3).weight)


@program
def lists_that_log_who_iterates(watch: Watch, say: Say) -> None:
    log: list[str] = []

    class Logged(list[Any]):
        def __iter__(self) -> Any:
            log.append("iter")
            return super().__iter__()

    class Pair(tuple[Any, ...]):
        def __iter__(self) -> Any:
            log.append("iter")
            return super().__iter__()

    class Returning(nn.Module):
        def forward(self, given: Any) -> Any:
            return given

    with watch():
        Returning()(Logged([torch.ones(1)]))
        Returning()(Pair((torch.ones(1), 2)))
    say(log)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_the_same_and_seen_with(name: str, tmp_path: Path) -> None:
    assert_unharmed(PROGRAMS[name], tmp_path, complete=True)


def test_a_tensor_repeated_beyond_memory_needs_none(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught, tensorprobe.overflow(out=tmp_path / "watch"):
        large = torch.ones(1).expand(1 << 40)
        some = large.view(1 << 20, 1 << 20)[:2, :2] * 2
    assert some.tolist() == [[2, 2], [2, 2]]
    assert not caught
    nan = torch.tensor([1.0, math.nan])[:, None].expand(2, 1 << 40)
    assert places_of(nan) == (1, [[1, 0]])
    facts = facts_of("input.0", nan)
    assert facts is not None and facts.moments.nan == 1


def test_online_compares_no_op_that_asks_for_storage(tmp_path: Path) -> None:
    with (
        warnings.catch_warnings(),
        tensorprobe.online(out=tmp_path / "watch") as watch,
        forward_ad.dual_level(),
    ):
        warnings.simplefilter("ignore")  # torch's own, of its first dual
        forward_ad.make_dual(torch.ones(2, 3)[0], torch.ones(3))
    assert not watch.failures

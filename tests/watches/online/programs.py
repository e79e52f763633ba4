"""Small programs, each in a corner of torch that a second execution of its calls could disturb. A program gives back everything
that came out of it: results, parameters, gradients, states of optimizers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Program = Callable[[], list[Any]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for held in value.values():
            yield from leaves(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from leaves(held)
    else:
        yield value


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, *, amp: torch.dtype | None = None
) -> list[Any]:
    """Three steps; the losses, and what the model and the optimizer then hold."""
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=amp or torch.bfloat16, enabled=amp is not None):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, list(model.state_dict().values()), list(leaves(optimizer.state_dict()["state"]))]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3))


@program
def adam_in_float32() -> list[Any]:
    model = perceptron()
    return train(model, torch.optim.Adam(model.parameters(), lr=0.01), torch.randn(5, 6))


@program
def adam_over_lists_of_tensors() -> list[Any]:
    model = perceptron()
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True), torch.randn(5, 6))


@program
def fused_adam_under_autocast() -> list[Any]:
    model = perceptron()
    return train(
        model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True), torch.randn(5, 6), amp=torch.bfloat16
    )


@program
def momentum_in_bfloat16() -> list[Any]:
    model = perceptron().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return train(model, optimizer, torch.randn(5, 6).bfloat16())


@program
def running_statistics_of_batch_norm() -> list[Any]:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    ).to(memory_format=torch.channels_last)
    x = torch.randn(4, 2, 6, 6).contiguous(memory_format=torch.channels_last)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), x)


@program
def attention() -> list[Any]:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    trained = train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 5, 8))
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return [*trained, out, *torch.autograd.grad(out.sum(), q)]


@program
def recurrent() -> list[Any]:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(3, 4, batch_first=True), nn.GRUCell(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(self.lstm(x)[0][:, -1])

    model = Last()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 5, 3))


@program
def reading_what_is_written() -> list[Any]:
    x, n, d = torch.randn(4, 4), torch.arange(6), torch.randn(5).double()
    x.add_(x).mul_(x.t().clone())
    x[0].copy_(x[1])
    n.add_(n)
    torch.cumsum(n, 0, out=n)
    d.add_(d)
    torch.mul(d, d, out=d)
    torch.add(x, 1.5, out=x)
    torch._foreach_mul_([d, x], [d, x])
    return [x, n, d]


@program
def views_and_odd_memory() -> list[Any]:
    base = torch.randn(12, requires_grad=True)
    rows = base.clone().view(3, 4)
    rows[:, 1].mul_(2)
    rows.t()[2].add_(1)
    wide = torch.randn(3).expand(4, 3)
    overlapping = torch.as_strided(torch.randn(4), (3, 2), (1, 1))
    out = torch.empty(3, 3)
    torch.matmul(rows.detach(), wide, out=out)
    rows.sum().backward()
    flipped = torch.randn(2, 3, 4, 5).permute(3, 0, 2, 1)
    return [base.grad, rows, wide + 1, overlapping * 2, torch.randn(9).unfold(0, 3, 1).sum(1), out, flipped.softmax(1)]


@program
def numbers_of_all_kinds() -> list[Any]:
    z = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    (z @ z.conj().T).abs().sum().backward()
    tenth = torch.full((4,), 0.1)
    empty = torch.empty(0, 3)
    nothing = torch.zeros(3) / torch.zeros(3)
    scalar = torch.tensor(1.5) * 2
    return [
        z.grad, torch.fft.rfft(torch.randn(8)), tenth == 0.1, tenth.bfloat16() >= 0.1, empty @ torch.randn(3, 2), empty.mean(),
        nothing, scalar, torch.arange(5) // 2, torch.arange(5) > 2, torch.randint(0, 9, (4,)).bitwise_and(3), torch.zeros(4).norm(),
        torch.full((3,), torch.inf).softmax(0), torch.tensor([1.0, 1.0, 0.5]).max(0), torch.randn(6).topk(2), torch.log(torch.zeros(2)),
    ]  # fmt: skip


@program
def random_numbers() -> list[Any]:
    x = torch.randn(20)
    x.normal_().bernoulli_(0.5)
    return [x, F.dropout(torch.ones(20), 0.5), torch.randperm(7), torch.multinomial(torch.ones(5), 3), torch.rand(3)]


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


@program
def backward_of_ones_own_and_twice() -> list[Any]:
    x = torch.randn(3, requires_grad=True)
    y = _Cube.apply(x) * x.sin()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [y, first, second, torch.autograd.functional.hessian(lambda t: (t**4).sum(), x.detach())]


@program
def recomputation() -> list[Any]:
    block, x = perceptron(), torch.randn(5, 6, requires_grad=True)
    for reentrant in (True, False):
        checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


@program
def transforms() -> list[Any]:
    weight, x = torch.randn(3, 3), torch.randn(4, 3)

    def loss(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (w @ row).tanh().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    return [each, torch.func.jacrev(torch.sin)(x[0]), torch.func.jvp(torch.exp, (x,), (torch.ones_like(x),))]


@program
def sparse_gradients() -> list[Any]:
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([0, 2, 2])).square().sum().backward()
    optimizer.step()
    assert table.weight.grad is not None
    return [table.weight, table.weight.grad.to_dense(), torch.eye(3).to_sparse() @ torch.ones(3, 2)]


@program
def inference() -> list[Any]:
    with torch.inference_mode():
        model = perceptron().eval()
        x = torch.randn(5, 6)
        return [model(x), x.add_(x), torch.mul(x, 2, out=x)]


@program
def threads() -> list[Any]:
    found: dict[int, torch.Tensor] = {}
    weights = [torch.randn(6, 6, requires_grad=True) for _ in range(3)]

    def work(at: int) -> None:
        weights[at].matmul(weights[at]).sum().backward()
        found[at] = weights[at] * 2

    workers = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [[found[at], weights[at].grad] for at in range(3)]


class _Named(torch.Tensor):
    """A subclass as users make them."""


@program
def subclasses() -> list[Any]:
    x = torch.randn(3, 3).as_subclass(_Named)
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=torch.jagged)
    return [x @ x, (nested * 2).values(), copy.deepcopy(nn.Parameter(torch.randn(3))) + 1]


@program
def tracing() -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    return [torch.jit.trace(model, torch.randn(2, 3), check_trace=False)(torch.randn(2, 3))]


@program
def compiled_region() -> list[Any]:
    torch._dynamo.reset()
    weight = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(lambda x: (x @ weight).tanh().sum(), backend="aot_eager")
    loss = compiled(torch.randn(3, 4)) * 2
    loss.backward()
    return [loss, weight.grad]

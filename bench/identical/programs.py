"""Small programs of many kinds. Each gives the same losses in every execution, and leaves some memory unwritten or work to other threads.

A program is a function that takes `step`, the function that ends a step, and whatever it needs it makes itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8
Program = Callable[[Callable[[], None]], None]
PROGRAMS: dict[str, Program] = {}
RANKS: dict[str, int] = {}
"""How many processes a program needs; one if it is not listed."""
NEEDS: dict[str, tuple[str, str]] = {}
"""The first torch that can execute a program, and what for, where the oldest cannot."""


def program(name: str, ranks: int = 1, needs: tuple[str, str] | None = None) -> Callable[[Program], Program]:
    def enter(function: Program) -> Program:
        PROGRAMS[name] = function
        if needs is not None:
            NEEDS[name] = needs
        if ranks > 1:
            RANKS[name] = ranks
        return function

    return enter


def _net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), *extra, nn.Linear(2 * WIDTH, WIDTH))


def _train(model: nn.Module, step: Callable[[], None], data: Tensor | None = None, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(4, WIDTH) if data is None else data
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        step()


def _use(value: Tensor) -> Tensor:
    return nn.Linear(value.shape[-1], 2)(value.float()).sum()


@program("training")
def _training(step: Callable[[], None]) -> None:
    _train(_net(), step)


@program("sgd foreach, fused and clipping")
def _optimizers(step: Callable[[], None]) -> None:
    model = _net()
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
        torch.optim.Adam(model.parameters(), fused=True),
        torch.optim.Adagrad(model.parameters()),
    ):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    step()


@program("dropout")
def _dropout(step: Callable[[], None]) -> None:
    _train(_net(nn.Dropout(0.3), nn.AlphaDropout(0.1)), step)


@program("batch norm and convolution")
def _convolution(step: Callable[[], None]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    _train(model, step, torch.randn(2, 2, 9, 9))


@program("transformer encoder")
def _encoder(step: Callable[[], None]) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    _train(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), step, torch.randn(2, 5, WIDTH))


@program("lstm and gru")
def _recurrent(step: Callable[[], None]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1), nn.GRU(WIDTH, WIDTH)

        def forward(self, data: Tensor) -> Tensor:
            return self.gru(self.lstm(data)[0])[0]

    _train(Net(), step, torch.randn(5, 2, WIDTH))


@program("sparse embedding")
def _embedding(step: Callable[[], None]) -> None:
    table, bag = nn.Embedding(20, WIDTH, sparse=True), nn.EmbeddingBag(20, WIDTH)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    tokens = torch.randint(0, 20, (2, 6))
    (table(tokens).sum() + bag(tokens).square().sum()).backward()
    optimizer.step()
    step()


@program("mixture of experts")
def _experts(step: Callable[[], None]) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, data: Tensor) -> Tensor:
            weights, chosen = self.gate(data).softmax(-1).topk(2)
            made = torch.empty_like(data).zero_()
            for number, expert in enumerate(self.experts):
                row, which = torch.where(chosen == number)
                made.index_add_(0, row, expert(data[row]) * weights[row, which, None])
            return made

    _train(Experts(), step, torch.randn(12, WIDTH))


@program("experts, sorted into an empty buffer")
def _sorted_experts(step: Callable[[], None]) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

        def forward(self, data: Tensor) -> Tensor:
            order = self.gate(data).argmax(-1).argsort(stable=True)
            buffer = data.new_empty(len(data) + 4, WIDTH)
            buffer[: len(data)] = data[order]
            made = torch.empty_like(data)
            made[order] = self.expert(buffer[: len(data)])
            return made

    _train(Experts(), step, torch.randn(12, WIDTH))


@program("gradient checkpointing")
def _checkpointing(step: Callable[[], None]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = _net(nn.Dropout(0.2)), _net()

        def forward(self, data: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.one, data, use_reentrant=False)
            return checkpoint(self.two, made.requires_grad_() if made.is_leaf else made, use_reentrant=True)

    _train(Net(), step)


@program("gradient scaler and autocast")
def _scaler(step: Callable[[], None]) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, WIDTH)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        step()


@program("torch.compile, eager backend")
def _compiled(step: Callable[[], None]) -> None:
    torch.compiler.reset()
    _train(torch.compile(_net(), backend="eager"), step)  # type: ignore[arg-type]
    _use(torch.randn(2, WIDTH))
    step()


@program("generation, cache filled by slices")
def _generation(step: Callable[[], None]) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.qkv, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 20)

        def forward(self, token: Tensor, keys: Tensor, values: Tensor, at: int) -> Tensor:
            query, key, value = self.qkv(self.table(token)).chunk(3, -1)
            keys[:, at], values[:, at : at + 1] = key, value[:, None]
            made = F.scaled_dot_product_attention(query[:, None], keys[:, : at + 1], values[:, : at + 1])
            return self.head(made[:, 0]).argmax(-1)

    model = Cached().eval()
    keys, values = torch.empty(2, 16, WIDTH), torch.empty(2, 16, WIDTH)
    token = torch.tensor([3, 5])
    with torch.no_grad():
        for at in range(8):
            token = model(token, keys, values, at)
        keys.clone(), values.transpose(0, 1).contiguous()
    step()


@program("generation, cache filled by index_copy_ and masked")
def _masked_generation(step: Callable[[], None]) -> None:
    model, keys = nn.Linear(WIDTH, WIDTH), torch.empty(2, 4, 12, WIDTH)
    data = torch.randn(2, 4, 1, WIDTH)
    with torch.inference_mode():
        for at in range(4):
            place = torch.tensor([at])
            keys.index_copy_(2, place, model(data))
            scores = data @ keys.transpose(2, 3)
            scores = scores.masked_fill(torch.arange(12) > at, float("-inf")).softmax(-1)
            data = scores[..., : at + 1] @ keys[:, :, : at + 1]
    step()


@program("bernoulli_, normal_, random_ on fresh memory")
def _random(step: Callable[[], None]) -> None:
    mask = torch.empty(WIDTH, WIDTH).bernoulli_(0.5)
    noise = torch.empty_like(mask).normal_().add_(torch.empty(WIDTH).uniform_())
    whole = torch.empty(WIDTH, WIDTH, dtype=torch.long).random_(10)
    _use(mask * noise + whole + torch.empty(WIDTH).exponential_() + torch.empty(WIDTH).cauchy_())
    step()


@program("scatter_, index_put_, masked_fill_ on fresh memory")
def _scatters(step: Callable[[], None]) -> None:
    places, data = torch.tensor([[0, 2, 5]]), torch.randn(1, 3)
    scattered = torch.empty(1, WIDTH).scatter_(1, places, data)
    put = torch.empty(6, WIDTH).index_put_((torch.tensor([1, 3]),), torch.randn(2, WIDTH))
    filled = torch.empty(4, WIDTH).index_fill_(0, torch.tensor([2]), 1.5)
    masked = torch.empty(WIDTH).masked_fill_(torch.arange(WIDTH) > 3, 2.0)
    copied = torch.empty(4, WIDTH)
    copied[torch.tensor([True, False, True, False])] = 3.0
    copied[-1, ::2] = 4.0
    _use(torch.cat([scattered[:, 2:3], put[1:2, :1], filled[2:3, :1], masked[None, 5:6], copied[2:3, :1]], 1))
    step()


@program("empty, filled by pieces")
def _pieces(step: Callable[[], None]) -> None:
    buffer = torch.empty(4, 6, WIDTH)
    for at in range(4):
        buffer[at, :3].copy_(torch.randn(3, WIDTH))
    buffer.narrow(1, 3, 1).fill_(2.0)
    halves = buffer.transpose(0, 1)
    _use(halves[:4] * 2)
    buffer[:, 4:] = 0
    _use(buffer.reshape(-1, WIDTH))
    step()


@program("out= arguments")
def _out(step: Callable[[], None]) -> None:
    one, two = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    with torch.no_grad():
        made, half = torch.empty(WIDTH, WIDTH), torch.empty(2 * WIDTH, WIDTH)
        torch.mm(one, two, out=made)
        torch.add(made, one, out=half[:WIDTH])
        torch.cat([one, two], out=torch.empty(2 * WIDTH, WIDTH))
        torch.max(half[:WIDTH], 0, out=(torch.empty(WIDTH), torch.empty(WIDTH, dtype=torch.long)))
        _use(half[:WIDTH])
    step()


@program("in-place operations")
def _in_place(step: Callable[[], None]) -> None:
    value = torch.randn(WIDTH, WIDTH, requires_grad=True)
    made = (value * 2).add_(1).mul_(0.5)
    made[2:4] *= 3
    made += value
    _use(F.relu(made, inplace=True)).backward()
    step()


@program("written through numpy and through a pointer")
def _numpy(step: Callable[[], None]) -> None:
    import ctypes

    filled = torch.empty(WIDTH, WIDTH)
    filled.numpy()[:] = 2.5
    pointed = torch.empty(WIDTH)
    ones = torch.ones(WIDTH)
    ctypes.memmove(pointed.data_ptr(), ones.data_ptr(), 4 * WIDTH)
    _use(filled + pointed)
    step()


@program("custom autograd function")
def _custom(step: Callable[[], None]) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            made = torch.empty_like(value)
            torch.mul(value, 3, out=made)
            context.save_for_backward(value)
            return made

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            made = torch.empty_like(gradient)
            made.copy_(gradient)
            return made * 3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, data: Tensor) -> Tensor:
            return Scale.apply(self.net(data))

    _train(Net(), step)


@program("threads")
def _threads(step: Callable[[], None]) -> None:
    model, made = _net(), [torch.zeros(())] * 3
    data = torch.randn(4, WIDTH)

    def work(number: int) -> None:
        made[number] = model(data * number).sum()

    for number in range(3):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
    torch.stack(made).sum().backward()
    step()


@program("DataLoader with workers")
def _workers(step: Callable[[], None]) -> None:
    model = _net()
    data = TensorDataset(torch.randn(24, WIDTH), torch.arange(24))
    for batch, _ in DataLoader(data, batch_size=4, num_workers=2, shuffle=True, multiprocessing_context="fork"):
        model(batch).sum().backward()
        step()


@program("parametrized weights")
def _parametrized(step: Callable[[], None]) -> None:
    _train(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), step)


@program("double backward")
def _double(step: Callable[[], None]) -> None:
    model, data = _net(), torch.randn(4, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(data).square().sum(), data, create_graph=True)
    gradient.square().sum().backward()
    step()


@program("vmap and jvp")
def _functorch(step: Callable[[], None]) -> None:
    model = _net()
    _use(torch.randn(2, WIDTH))
    torch.func.vmap(lambda row: torch.tanh(row) * 2)(torch.randn(4, WIDTH))
    torch.func.jvp(model, (torch.randn(4, WIDTH),), (torch.randn(4, WIDTH),))
    step()


@program("fft, linear algebra and sorting")
def _algebra(step: Callable[[], None]) -> None:
    square = torch.randn(WIDTH, WIDTH)
    torch.fft.irfft(torch.fft.rfft(square))
    torch.linalg.qr(square), torch.linalg.solve(square, square), torch.linalg.svd(square)
    torch.unique(square.round(), return_inverse=True), square.kthvalue(2), torch.cdist(square, square)
    _use(square)
    square.median(), square.nonzero(), torch.histc(square), square.sort()
    step()


@program("diffusion sampling")
def _diffusion(step: Callable[[], None]) -> None:
    model = nn.Conv2d(2, 2, 3, padding=1)
    with torch.no_grad():
        image = torch.empty(1, 2, WIDTH, WIDTH).normal_()
        for _ in range(4):
            image.sub_(model(image), alpha=0.1).add_(torch.randn_like(image), alpha=0.05)
            F.interpolate(F.pad(image, (1, 1, 1, 1)), scale_factor=2)
            step()


@program("double precision loss, histogram binning by bincount")
def _counting(step: Callable[[], None]) -> None:
    counts = torch.bincount(torch.randint(0, 5, (40,)), minlength=WIDTH)
    made = torch.zeros(WIDTH).scatter_add_(0, torch.randint(0, WIDTH, (40,)), torch.randn(40))
    _use((counts * made)[None]).backward()
    step()


@program("DDP", ranks=2)
def _ddp(step: Callable[[], None]) -> None:
    _train(nn.parallel.DistributedDataParallel(_net()), step)


def _mesh() -> Any:
    try:
        from torch.distributed.device_mesh import DeviceMesh
    except ImportError:  # before torch 2.2
        from torch.distributed._tensor import DeviceMesh
    return DeviceMesh("cpu", [0, 1])


@program("FSDP2", ranks=2, needs=("2.8", "fully_shard on the CPU"))
def _fsdp(step: Callable[[], None]) -> None:
    from torch.distributed.fsdp import fully_shard

    model, mesh = _net(), _mesh()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, step)


@program("tensor parallel", ranks=2)
def _tensor_parallel(step: Callable[[], None]) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = _net()
    parallelize_module(model, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _train(model, step)


@program("functional collectives", ranks=2)
def _functional(step: Callable[[], None]) -> None:
    import torch.distributed._functional_collectives as collectives
    from torch.distributed import group

    data = torch.randn(4, WIDTH)
    summed = collectives.all_reduce(data, "sum", group.WORLD)
    gathered = collectives.all_gather_tensor(data * 2, 0, group.WORLD)
    _use(gathered[:4] + summed)
    step()


@program("pipeline parallel", ranks=2)
def _pipeline(step: Callable[[], None]) -> None:
    from torch import distributed

    model = _net()
    if distributed.get_rank() == 0:
        made = model(torch.randn(4, WIDTH))
        distributed.send(made.detach(), 1)
        gradient = torch.empty(4, WIDTH)
        distributed.recv(gradient, 1)
        made.backward(gradient)
    else:
        received = torch.empty(4, WIDTH)
        distributed.recv(received, 0)
        model(received.requires_grad_()).square().sum().backward()
        distributed.send(received.grad, 0)
    step()


@program("asynchronous collectives", ranks=2, needs=("2.2", "all_gather_into_tensor of Gloo"))
def _asynchronous(step: Callable[[], None]) -> None:
    from torch import distributed

    data, gathered = torch.randn(4, WIDTH), torch.empty(8, WIDTH)
    waits = [
        distributed.all_reduce(data, async_op=True),
        distributed.all_gather_into_tensor(gathered, torch.randn(4, WIDTH), async_op=True),
    ]
    listed = [torch.empty(WIDTH) for _ in range(2)]
    distributed.all_gather(listed, torch.randn(WIDTH))
    for wait in waits:
        wait.wait()
    _use(data + gathered[:4] + listed[0])
    step()

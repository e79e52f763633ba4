"""What goes wrong when a model moves to another accelerator, version of torch, or layout of processes. May be read and used for tuning."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench.heldout import kinds
from bench.heldout.cases import Fault
from bench.heldout.plant import call, gradient_kernel, kernel, keyword, loaded, optimizer, position, program, tensor
from bench.heldout.training import Entry, Setup, Training


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        held = x.float()
        return (held * torch.rsqrt(held.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(16), Norm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, n, bias=False) for n in (16, 8, 8, 16))
        self.gate, self.up, self.down = nn.Linear(16, 28), nn.Linear(16, 28), nn.Linear(28, 16)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        held = self.norm1(x)
        q, k, v = (each(held).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(2, 1)
        scores = (q @ k.transpose(-2, -1) / 2.0).masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(-1) @ v.repeat_interleave(2, 1)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        held = self.norm2(x)
        return x + self.down(F.silu(self.gate(held)) * self.up(held))


class Decoder(nn.Module):
    """A language model as they are ported most: tables of angles and the mask are buffers, groups of heads share keys."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.norm = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False), Norm(16)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(2))
        angles = torch.outer(torch.arange(8.0), 0.3 ** torch.arange(2.0)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("hidden", torch.ones(8, 8, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.hidden)
        return self.head(self.norm(x))


class Clipped(Training):
    """Gradients are clipped, and the learning rate follows a schedule."""

    most = 0.2

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.most)
        super().update()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9


def decoder(setup: Setup) -> Training:
    model = setup.place(Decoder())
    ids = setup.ids(32, 3, 9)
    used = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, foreach=False)
    loss = lambda _: F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())  # noqa: E731
    return Clipped(setup, model, loss, used)


class Frozen(nn.Module):
    """An image model that is trained further with the statistics of its norms as they were loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Linear(8, 5),
        )
        self.bn1, self.bn2, self.dropout = nn.BatchNorm2d(8).eval(), nn.BatchNorm2d(8).eval(), nn.Dropout(0.2)
        for each in (self.bn1, self.bn2):
            each.running_mean.copy_(torch.randn(8) * 0.3)
            each.running_var.copy_(torch.rand(8) + 0.3)

    def forward(self, x: Tensor) -> Tensor:
        held = F.avg_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        held = F.interpolate(F.relu(self.bn2(self.conv2(held))), scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.dropout(held.amax((2, 3))))


def frozen(setup: Setup) -> Training:
    model = setup.place(Frozen())
    x, classes = setup.randn(4, 3, 8, 8), setup.ids(5, 4)
    used = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    return Training(setup, model, lambda _: F.cross_entropy(model(x), classes), used)


class Square(nn.Module):
    """Every size is eight, so that wrong broadcasting and transposed weights raise no error."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8) + 0.5)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        held = self.one(x) + self.places
        held = (held - held.mean(-1, keepdim=True)) * self.scale
        return self.two(torch.tanh(held))


def square(setup: Setup) -> Training:
    model = setup.place(Square())
    x, y = setup.randn(8, 8, 8), setup.randn(8, 8, 8)
    used = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    return Training(setup, model, lambda _: F.mse_loss(model(x), y), used)


class Cached(nn.Module):
    """One token at a time, with keys and values of a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(24, 12), nn.Embedding(6, 12), nn.Linear(12, 24)
        self.qkv, self.out, self.norm = nn.Linear(12, 36), nn.Linear(12, 12), nn.LayerNorm(12)
        self.register_buffer("keys", torch.zeros(3, 6, 12))
        self.register_buffer("values", torch.zeros(3, 6, 12))

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        x = self.words(ids) + self.places(at)
        q, k, v = self.qkv(self.norm(x)).split(12, -1)
        self.keys.index_copy_(1, at, k.unsqueeze(1))
        self.values.index_copy_(1, at, v.unsqueeze(1))
        scores = torch.bmm(self.keys, q.unsqueeze(2)).squeeze(2) / 12**0.5
        later = torch.arange(6, device=ids.device) > at
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.head(x + self.out(torch.bmm(weights.unsqueeze(1), self.values).squeeze(1)))


class Generation(Training):
    """Nothing is trained: each step writes five tokens."""

    def step(self, number: int) -> None:
        with torch.no_grad(), self.setup.autocast():
            self.loss(number)


def generation(setup: Setup) -> Training:
    model, first = setup.place(Cached()).eval(), setup.ids(24, 4, 3)

    def write(number: int) -> Tensor:
        ids = first[number % 4]
        for at in range(5):
            logits = model(ids, torch.tensor([at], device=ids.device))
            ids = logits.argmax(-1)
        return logits.mean()

    return Generation(setup, model, write, torch.optim.SGD(model.parameters(), lr=0.1))


class Enter(torch.autograd.Function):
    """The input of layers that are split over ranks: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
        ctx.summed = summed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        held = gradients[0].clone()
        if ctx.summed:
            distributed.all_reduce(held)
        return held, None


class Leave(torch.autograd.Function):
    """The output of layers that are split over ranks: parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        held = x.clone()
        distributed.all_reduce(held)
        return held

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Split(nn.Module):
    """Two layers, split by columns and then by rows over the ranks there are; one rank has all."""

    everywhere, summed = False, True

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        whole = nn.Linear(8, 24), nn.Linear(24, 8)
        part = slice(24 * rank // ranks, 24 * (rank + 1) // ranks)
        self.up, self.up_bias = nn.Parameter(whole[0].weight.data[part]), nn.Parameter(whole[0].bias.data[part])
        self.down, self.down_bias = (
            nn.Parameter(whole[1].weight.data[:, part].clone()),
            nn.Parameter(whole[1].bias.data),
        )
        self.ranks, self.rank, self.norm = ranks, rank, nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        held = self.norm(x)
        held = Enter.apply(held, self.summed) if self.ranks > 1 else held
        bias = self.down_bias if self.everywhere or self.rank == 0 else None
        held = F.linear(F.gelu(F.linear(held, self.up, self.up_bias)), self.down, bias)
        return x + (Leave.apply(held) if self.ranks > 1 else held)


def split(setup: Setup) -> Training:
    ranks, rank = (distributed.get_world_size(), distributed.get_rank()) if distributed.is_initialized() else (1, 0)
    model = setup.place(nn.Sequential(Split(ranks, rank), Split(ranks, rank), nn.Linear(8, 3)))
    x, y = setup.randn(6, 8), setup.randn(6, 3)
    used = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return Training(setup, model, lambda _: F.mse_loss(model(x), y), used)


class Synchronised(Training):
    """Data parallel. Gradients of the step `alone` stay on their rank."""

    alone = -1
    wrapped: DistributedDataParallel

    def step(self, number: int) -> None:
        with self.wrapped.no_sync() if number == self.alone else contextlib.nullcontext():
            super().step(number)


def synchronised(setup: Setup, **settings: Any) -> Training:
    model = setup.place(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4)))
    x, classes = setup.randn(2, 6, 10)[distributed.get_rank()], setup.ids(4, 2, 6)[distributed.get_rank()]
    wrapped = DistributedDataParallel(model, **settings)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    training = Synchronised(setup, model, lambda _: F.cross_entropy(wrapped(x), classes), used)
    training.wrapped = wrapped
    return training


FAMILIES: dict[str, Entry] = {
    "decoder": Entry(decoder, "fp32 bf16 autocast"),
    "frozen": Entry(frozen, "fp32 autocast"),
    "square": Entry(square),
    "generation": Entry(generation, "fp32 bf16"),
    "split": Entry(split, ranks=2),
    "synchronised": Entry(synchronised, ranks=2),
}

EVERY = ("*",)


def cast_everywhere(training: Training) -> None:
    training.setup = Setup(training.setup.device, "autocast")


FAULTS: list[Fault] = [
    # another mode of the arithmetic
    Fault("decoder", "mode", "all products in TF32", kernel("mm", kinds.short_mantissa(), way=None)),
    Fault("decoder", "mode", "one product of the attention in TF32", kernel("bmm", kinds.short_mantissa(), 2)),
    Fault("frozen", "mode", "convolutions in TF32", kernel("convolution", kinds.short_mantissa())),
    Fault("square", "mode", "products in bfloat16, results in float32", kernel("addmm", kinds.narrow_inputs())),
    Fault("decoder", "mode", "autocast is on", program(cast_everywhere)),
    Fault("split", "mode", "autocast is on", program(cast_everywhere)),
    Fault("decoder", "mode", "softmax rounded to bfloat16", kernel("_softmax", kinds.rounded(), 1)),
    Fault("decoder", "mode", "mean of squares added up in float16", kernel("mean.dim", kinds.rounded(torch.float16), 3)),
    Fault("generation", "mode", "scores added up in bfloat16", kernel("bmm", kinds.accumulated(block=3), 2)),
    # checkpoints read wrongly
    Fault("decoder", "loading", "weights went through bfloat16", loaded("*", lambda w: w.bfloat16().to(w.dtype)), parameters=EVERY),
    Fault("decoder", "loading", "one weight went through float16", loaded("blocks.1.up.weight", lambda w: w.half().float()),
          parameters=("blocks.1.up.weight",)),
    Fault("decoder", "loading", "a square weight is transposed", loaded("blocks.0.q.weight", lambda w: w.T),
          parameters=("blocks.0.q.weight",)),
    Fault("decoder", "loading", "heads of the query in another order",
          loaded("blocks.1.q.weight", lambda w: w.view(4, 4, 16).flip(0).reshape(16, 16)), parameters=("blocks.1.q.weight",)),
    Fault("decoder", "loading", "a norm is missing and stays at one", loaded("blocks.1.norm2.weight", torch.ones_like), "bf16",
          parameters=("blocks.1.norm2.weight",)),
    Fault("frozen", "loading", "kernels of a convolution with rows and columns exchanged",
          loaded("conv1.weight", lambda w: w.transpose(2, 3)), parameters=("conv1.weight",)),
    Fault("square", "loading", "first layer transposed", loaded("one.weight", lambda w: w.T), parameters=("one.weight",)),
    Fault("split", "loading", "rank 1 has the columns in another order", loaded("1.down", lambda w: w.roll(1, 1), 1),
          parameters=("1.down",)),
    # buffers that are old, or made otherwise
    Fault("decoder", "buffer", "mask one place too far", loaded("hidden", lambda m: m.roll(1, 1) & m), parameters=("hidden",)),
    Fault("decoder", "buffer", "angles one position too far", loaded("[cs]*[sn]", lambda t: t.roll(1, 0)), parameters=("cos", "sin")),
    Fault("decoder", "buffer", "cosines in bfloat16", loaded("cos", lambda t: t.bfloat16().float()), parameters=("cos",)),
    Fault("frozen", "buffer", "variances of the second norm are not loaded", loaded("bn2.running_var", torch.ones_like),
          parameters=("bn2.running_var",)),
    Fault("frozen", "buffer", "means of the first norm in another order", loaded("bn1.running_mean", lambda m: m.flip(0)),
          "autocast", parameters=("bn1.running_mean",)),
    Fault("generation", "buffer", "values hold something from before", loaded("values", lambda v: v + 1.0), parameters=("values",)),
    # memory: unwritten, misread, too early
    Fault("decoder", "memory", "last elements of a product are not numbers", kernel("mm", kinds.unwritten(float("nan")), 6)),
    Fault("decoder", "memory", "last elements of a product are huge", kernel("addmm", kinds.unwritten(1e30), 2)),
    Fault("frozen", "memory", "last elements of a pool are nearly zero", kernel("avg_pool2d", kinds.unwritten(1e-40))),
    Fault("square", "memory", "tail of a gradient is unwritten", gradient_kernel("tanh_backward", kinds.unwritten(0.0, 8))),
    Fault("square", "memory", "transposed weight read as if contiguous", kernel("addmm", kinds.misread(2), 1)),
    Fault("decoder", "memory", "transposed weight read as if contiguous", kernel("mm", kinds.misread(1), 5), "bf16"),
    Fault("decoder", "memory", "in backward, a transposed operand read as if contiguous", gradient_kernel("mm", kinds.misread(0), 0)),
    Fault("generation", "memory", "a value has not arrived in the cache", kernel("index_copy_", kinds.not_done, 5)),
    Fault("generation", "memory", "keys are written one place too far",
          kernel("index_copy_", kinds.index_off(2, lambda x, dim, *_: x.shape[dim]), 4)),
    Fault("generation", "memory", "product of the cache is stale", kernel("bmm", kinds.stale(), 4), "bf16"),
    Fault("frozen", "memory", "result of the second convolution is stale", kernel("convolution", kinds.stale(), 1, step=1)),
    # masks, positions and shapes
    Fault("decoder", "places", "mask is too weak", call("t.masked_fill", position(2, -3.0), 1)),
    Fault("decoder", "places", "scores divided by another root", call("t.__truediv__", position(1, 4.0), 1)),
    Fault("generation", "places", "mask lets a key of the future through", call("t.masked_fill", tensor(1, lambda m: m.roll(1, 0) & m), 2)),
    Fault("generation", "places", "position one too far", kernel("embedding", kinds.index_off(1, lambda w, *_: len(w)), 5)),
    Fault("square", "places", "places added with rows and columns exchanged", call("t.__add__", tensor(1, lambda p: p.T))),
    Fault("square", "places", "mean without keepdim", call("t.mean", keyword(keepdim=False))),
    Fault("square", "places", "scale along the wrong dimension", call("t.__mul__", tensor(1, lambda s: s[:, None]))),
    Fault("frozen", "places", "colours in reverse order", call("F.conv2d", tensor(0, lambda x: x.flip(1)))),
    # defaults of another library
    Fault("frozen", "defaults", "batch norms with eps 0.001", call("F.batch_norm", position(7, 1e-3), None)),
    Fault("frozen", "defaults", "pool does not count the padding", call("F.avg_pool2d", keyword(count_include_pad=False))),
    Fault("frozen", "defaults", "interpolation aligns corners", call("F.interpolate", keyword(align_corners=True)), "autocast"),
    Fault("generation", "defaults", "norm with eps 0.001", call("F.layer_norm", position(4, 1e-3), None)),
    Fault("decoder", "defaults", "gelu instead of silu", program(lambda t: setattr(F, "silu", F.gelu))),
    # random streams
    Fault("frozen", "random", "one number drawn before", program(lambda _: torch.rand(1))),
    Fault("frozen", "random", "dropout with another rate", call("F.dropout", position(1, 0.25))),
    Fault("frozen", "random", "dropout is off", call("F.dropout", position(2, False))),
    # optimizers
    Fault("decoder", "optimizer", "gradients are clipped at another norm", program(lambda t: setattr(t, "most", 0.22)), parameters=EVERY),
    Fault("decoder", "optimizer", "gradients are not clipped", program(lambda t: setattr(t, "most", 1e9)), parameters=EVERY, modules=True),
    Fault("decoder", "optimizer", "other betas", optimizer(betas=(0.9, 0.95)), steps=3, parameters=EVERY),
    Fault("square", "optimizer", "another eps", optimizer(eps=1e-4), parameters=EVERY),
    Fault("square", "optimizer", "AMSGrad", optimizer(amsgrad=True), steps=3, parameters=EVERY),
    Fault("decoder", "optimizer", "decay is added to the gradient", optimizer(decoupled_weight_decay=False), parameters=EVERY),
    # layouts of processes
    Fault("split", "parallel", "bias is added on both ranks", program(lambda t: setattr(t.model[1], "everywhere", True))),
    Fault("split", "parallel", "gradients of the input are not summed", program(lambda t: setattr(t.model[1], "summed", False)),
          parameters=EVERY),
    Fault("split", "parallel", "rank 1 does not wait for the sum", call("distributed.all_reduce", tensor(0, torch.clone), 1, rank=1)),
    Fault("split", "parallel", "rank 0 does not wait for the sum of gradients",
          call("distributed.all_reduce", tensor(0, torch.clone), 0, way="backward", rank=0)),
    Fault("synchronised", "parallel", "gradients of step 1 are not averaged", program(lambda t: setattr(t, "alone", 1)),
          steps=3, parameters=EVERY, modules=True),
    Fault("synchronised", "parallel", "rank 1 starts from other weights", loaded("2.weight", lambda w: w * 1.01, 1),
          parameters=("2.weight",)),
    Fault("synchronised", "parallel", "rank 1 has another learning rate",
          program(lambda t: t.optimizer.param_groups[0].update(lr=0.1 + 0.005 * distributed.get_rank())), parameters=EVERY, modules=True),
]  # fmt: skip

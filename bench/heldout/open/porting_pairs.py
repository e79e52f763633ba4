"""Two right ways to compute one model, as one meets them on another accelerator, version of torch, or layout of processes.

May be read and used for tuning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.heldout import kinds
from bench.heldout.cases import Pair, planted
from bench.heldout.device import Kernel, Layer, add_layer
from bench.heldout.open import families, library_models, porting, sequences
from bench.heldout.open.porting import decoder, frozen, split, square, synchronised
from bench.heldout.plant import call, gradient_kernel, kernel, loaded, program, tensor, unseen_gradient
from bench.heldout.programs import attend_by_products, attend_fused, simple, words
from bench.heldout.training import Family, Setup, Training


def on_device(build: Family, **layers: Layer) -> Family:
    """The same program where some kernels compute otherwise, but rightly."""

    def built(setup: Setup) -> Training:
        training = build(setup)
        for op, layer in layers.items():
            add_layer(op.replace("__", "."), layer)
        return training

    return built


def in_parts(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sums of a product are made in three parts, and the parts are added up, all in float32; rounded once."""
    *first, a, b = (each.float() for each in args)
    cut = a.shape[-1] // 3 or 1
    total = kernel(*first, a[..., :cut], b[..., :cut, :], **kwargs)
    for at in range(cut, a.shape[-1], cut):
        total = total + a[..., at : at + cut] @ b[..., at : at + cut, :]
    return total.to(args[-1].dtype)


def backwards(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction begins with its last element."""
    return kernel(args[0].flip(args[1] or list(range(args[0].dim()))), *args[1:], **kwargs)


def channels_backwards(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kernel(args[0].flip(1), args[1].flip(1), *args[2:], **kwargs)


def scattered_backwards(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows that meet in one place are added up in another order: `index_add`, and the gradient of an embedding."""
    if isinstance(args[1], Tensor):
        return kernel(args[0].flatten(0, -2).flip(0), args[1].flatten().flip(0), *args[2:], **kwargs)
    return kernel(args[0], args[1], args[2].flip(0), args[3].flip(args[1]), *args[4:], **kwargs)


def one_ulp_off(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A third of the elements are the next above the right ones, a third the next below: functions of most accelerators."""
    result = kernel(*args, **kwargs)
    side = torch.arange(result.numel()).view(result.shape) % 3 - 1
    return torch.where(
        (side == 0) | (result == 0), result, torch.nextafter(result, (side * torch.inf).to(result.dtype))
    )


def attend_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def angles(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
    return torch.outer(places, 0.2 ** torch.arange(x.shape[-1] // 2, device=x.device))


def turn_real(x: Tensor) -> Tensor:
    cos, sin = angles(x).cos(), angles(x).sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def turn_complex(x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones_like(angles(x)), angles(x))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def turned(turn: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend_by_products(turn(q), turn(k), v)


class OwnNorm(torch.autograd.Function):
    """A layer norm with its gradient written out, as in a library of fused kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(centred * scale, scale, weight)
        return torch.addcmul(bias, centred * scale, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (normal, scale, weight) = gradients, ctx.saved_tensors
        inner = gradient * weight
        held = inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)
        return held * scale, (gradient * normal).sum((0, 1)), gradient.sum((0, 1))


def in_chunks(logits: Tensor, wanted: Tensor) -> Tensor:
    parts = zip(logits.flatten(0, 1).split(7), wanted.flatten().split(7), strict=True)
    return torch.stack([F.cross_entropy(x, y, reduction="sum") for x, y in parts]).sum() / wanted.numel()


def drop_by_hand(x: Tensor) -> Tensor:
    return F.gelu(x) * torch.empty_like(x).bernoulli_(0.9).div_(0.9)


class ByColumns(nn.Module):
    """A linear layer that stores its weight the other way round."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.data.T.contiguous()), layer.bias
        self.out_features = layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def store_by_columns(model: nn.Module) -> nn.Module:
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, ByColumns(layer))
    return model


class Plain(Setup):
    """Autocast that casts a weight anew at each use."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)


def without_cache(build: Family) -> Family:
    return lambda setup: build(Plain(setup.device, setup.precision))


class InHalves(Training):
    """Gradients of two halves of the batch are added up."""

    halves: tuple[Callable[[], Tensor], Callable[[], Tensor]]

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for half in self.halves:
            (half() / 2).backward()
        self.update()


def batch(*, halves: bool) -> Family:
    def build(setup: Setup) -> Training:
        model = setup.place(nn.Sequential(nn.Linear(9, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 4)))
        x, y = setup.randn(8, 9), setup.randn(8, 4)
        used = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        training = (InHalves if halves else Training)(setup, model, lambda _: F.mse_loss(model(x), y), used)
        if isinstance(training, InHalves):
            training.halves = lambda: F.mse_loss(model(x[:4]), y[:4]), lambda: F.mse_loss(model(x[4:]), y[4:])
        return training

    return build


class InBackward(Training):
    """Each parameter is updated as soon as its gradient is there."""

    def step(self, number: int) -> None:
        self.loss(number).backward()

    def prepare(self) -> None:
        for each in self.model.parameters():
            each.register_post_accumulate_grad_hook(self.update_one)

    def update_one(self, parameter: Tensor) -> None:
        used = optim.SGD([parameter], lr=0.1, foreach=False)
        used.step()
        used.zero_grad()


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, foreach=False)


def in_backward(setup: Setup) -> Training:
    plain = simple(sgd)(setup)
    training = InBackward(setup, plain.model, plain.loss, plain.optimizer)
    training.prepare()
    return training


def with_hook(setup: Setup) -> Training:
    training: Any = synchronised(setup)
    training.wrapped.register_comm_hook(None, allreduce_hook)
    return training


def layers(setup: Setup, *, sharded: bool) -> Training:
    model = setup.place(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)))
    x, y = setup.randn(2, 6, 8)[distributed.get_rank()], setup.randn(2, 6, 4)[distributed.get_rank()]
    if sharded:
        fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2,)))
        called: Any = model
    else:
        called = nn.parallel.DistributedDataParallel(model)
    return Training(setup, model, lambda _: F.mse_loss(called(x), y), sgd(model.parameters()))


PAIRS = [
    Pair("sums: whole, in parts", decoder, on_device(decoder, mm=in_parts, bmm=in_parts, addmm=in_parts), (
        planted("inside", "product of block 1 without its last term", kernel("mm", kinds.short_sum(1), 5)),
        planted("inside", "scores of block 0 in TF32", kernel("bmm", kinds.short_mantissa(), 0)),
        planted("behind", "table of cosines one place too far", loaded("cos", lambda t: t.roll(1, 0)), "cos"),
    )),
    Pair("sums: whole, in parts, bfloat16", decoder, on_device(decoder, mm=in_parts, bmm=in_parts, addmm=in_parts), (
        planted("inside", "up projection of block 0 4 % too large", kernel("addmm", kinds.scaled(1.04), 1)),
    ), precision="bf16"),
    Pair("sums: first to last, last to first", square, on_device(square, sum__dim_IntList=backwards, mean__dim=backwards), (
        planted("inside", "mean without its last element", kernel("mean.dim", kinds.short_reduction(1))),
        planted("behind", "weight of the second layer transposed", loaded("two.weight", lambda w: w.T), "two.weight"),
    )),
    Pair("convolution: channels in order, in reverse", frozen, on_device(frozen, convolution=channels_backwards), (
        planted("inside", "second convolution, one element", kernel("convolution", kinds.one_element(0.3), 1)),
        planted("behind", "variances are not loaded", loaded("bn1.running_var", torch.ones_like), "bn1.running_var"),
    )),
    Pair("attention: flash backend, math backend", words(attend=attend_fused), words(attend=attend_plain), (
        planted("inside", "softmax of block 1 1 % too large", kernel("_softmax", kinds.scaled(1.01), 1)),
        planted("border", "keys of another sample", call("F.scaled_dot_product_attention", tensor(1, lambda k: k.roll(1, 0)))),
        planted("behind", "output projection of block 0 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 3)),
    )),
    Pair("attention: flash backend, math backend, bfloat16", words(attend=attend_fused), words(attend=attend_plain), (
        planted("behind", "gelu of block 0 5 % too large", kernel("gelu", kinds.scaled(1.05), 0)),
    ), precision="bf16"),
    Pair("autocast: weights cast once, at each use", words(), without_cache(words()), (
        planted("inside", "projection of block 1 5 % too large", kernel("addmm", kinds.scaled(1.05), 7)),
    ), precision="autocast"),
    Pair("positions: real numbers, complex numbers", words(attend=turned(turn_real)), words(attend=turned(turn_complex)), (
        planted("inside", "angles of the keys of block 0", kernel("polar", kinds.rolled(1, 0), 1)),
        planted("behind", "scores of block 0 0.5 % too large", kernel("bmm", kinds.scaled(1.005), 0)),
    )),
    Pair("layer norm: of torch, own function", words(), words(norm=lambda layer, x: OwnNorm.apply(x, layer.weight, layer.bias)), (
        planted("inside", "rsqrt of the second norm 0.5 % too large", kernel("rsqrt", kinds.scaled(1.005), 1)),
        planted("inside", "gradient: mean 5 % too large", gradient_kernel("mean.dim", kinds.scaled(1.05), 1)),
        planted("behind", "softmax of block 0, last column", kernel("_softmax", kinds.last_columns(0.5), 0)),
    )),
    Pair("loss: whole, in chunks", words(), words(loss=in_chunks), (
        planted("inside", "loss of the second chunk 1 % too large", kernel("nll_loss_forward", kinds.scaled(1.01), 1)),
        planted("border", "head rounded to bfloat16", kernel("addmm", kinds.rounded(), 12)),
    )),
    Pair("dropout: of torch, by hand", words(act=lambda x: F.dropout(F.gelu(x), 0.1)), words(act=drop_by_hand), (
        planted("inside", "rate of block 1 too large", call("t.bernoulli_", lambda x, _: ((x, 0.8), {}), 1)),
        planted("behind", "down projection of block 0 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 5)),
    )),
    Pair("linear: stored by rows, by columns", words(), words(wrap=store_by_columns), (
        planted("inside", "product of the value projection 0.5 % too large", kernel("mm", kinds.scaled(1.005), 2)),
        planted("behind", "gelu of block 1, one element", kernel("gelu", kinds.one_element(0.4), 1)),
    )),
    Pair("batch: whole, two halves", batch(halves=False), batch(halves=True), (
        planted("inside", "gelu of the second half 1 % too large", kernel("gelu", kinds.scaled(1.01), 1)),
        planted("behind", "one gradient 1 % too large, unseen", unseen_gradient("3.weight", lambda g: g.__imul__(1.01)), "3.weight"),
    )),
    Pair("optimizer: after backward, in backward", simple(sgd), in_backward, (
        planted("optimizer", "update of one parameter 2 % too large", kernel("add_.Tensor", kinds.scaled(1.02), 1, way=None), "*"),
        planted("behind", "tanh of the second step, one element", kernel("tanh", kinds.one_element(0.3), 1, step=1)),
    )),
    Pair("optimizer: parameters in order, in reverse", simple(sgd), simple(lambda parameters: sgd(list(parameters)[::-1])), (
        planted("optimizer", "update of one parameter, one element", kernel("add_.Tensor", kinds.one_element(0.2), 1), "*"),
    )),
    Pair("DDP: one bucket, many", synchronised, lambda setup: synchronised(setup, bucket_cap_mb=0.0005), (
        planted("behind", "gradients 1 % too large on rank 1, unseen",
                unseen_gradient("2.weight", lambda g: g.__imul__(1.01), rank=1), "2.weight"),
        planted("behind", "tanh on rank 0 1 % too large", kernel("tanh", kinds.scaled(1.01), 1, rank=0)),
    ), ranks=(2, 2)),
    Pair("DDP: copies, views of buckets", synchronised, lambda setup: synchronised(setup, gradient_as_bucket_view=True), (
        planted("behind", "gradients of step 1 are not averaged", program(lambda t: setattr(t, "alone", 1)), "*"),
    ), ranks=(2, 2)),
    Pair("DDP: own average, hook of the program", synchronised, with_hook, (
        planted("behind", "last product on rank 1, one element", kernel("addmm", kinds.one_element(0.4), 2, rank=1)),
    ), ranks=(2, 2)),
    Pair("DDP, FSDP", lambda setup: layers(setup, sharded=False), lambda setup: layers(setup, sharded=True), (
        planted("behind", "first tanh on rank 0 1 % too large", kernel("tanh", kinds.scaled(1.01), 0, rank=0)),
    ), ranks=(2, 2)),
    Pair("layers: in one process, split over two", split, split, (), ranks=(1, 2)),
]  # fmt: skip

FUNCTIONS = (
    "exp log tanh sigmoid silu gelu erf rsqrt softplus tanh_backward sigmoid_backward silu_backward gelu_backward"
)
RIGHT: dict[str, tuple[Layer, str, str]] = {
    "sums in parts": (
        in_parts, "mm bmm addmm", "gru, gru bf16, tied, tied bf16, window, window autocast, capsule, dlrm, switchmoe, t5,"
        " whisper autocast, mamba2, generation, lora bf16",
    ),
    "reductions from the end": (backwards, "sum__dim_IntList mean__dim", "tied, capsule, convvae, t5, sparsemax"),
    "scattered in another order": (scattered_backwards, "index_add embedding_dense_backward", "dlrm, skipgram, switchmoe, t5"),
    "functions one ulp off": (
        one_ulp_off, FUNCTIONS, "gru, tied, window, capsule, convvae, whisper, mamba2, generation, ode, penalty",
    ),
}  # fmt: skip
"""Devices that compute some kernels otherwise, but rightly: how, which kernels, and the families that run there."""
_BUILT = sequences.FAMILIES | families.FAMILIES | library_models.FAMILIES | porting.FAMILIES


def on_right_device(where: str, way: str) -> Pair:
    (layer, ops, _), (name, _, precision) = RIGHT[way], where.partition(" ")
    build = _BUILT[name].build
    candidate = on_device(build, **dict.fromkeys(ops.split(), layer))
    return Pair(f"{where}: {way}", build, candidate, precision=precision or "fp32")


PAIRS += [on_right_device(where, way) for way, (_, _, names) in RIGHT.items() for where in names.split(", ")]

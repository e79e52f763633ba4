# CLOSED: held out. Whoever changes how runs are compared or judged does not read this file.
"""Pairs of programs of the closed part, and faults in their candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bench.heldout import kinds
from bench.heldout.cases import Pair, planted
from bench.heldout.plant import call, gradient_kernel, kernel, tensor, unseen_gradient
from bench.heldout.programs import adamw, attend_by_products, attend_fused, image, library, simple, words
from bench.heldout.training import Family, Setup, Training

optim = torch.optim
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def made(kind: Any, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer with settings, which takes the loop unless asked otherwise."""
    return lambda parameters: kind(parameters, **{"foreach": False, **settings})


class OwnAdamW(torch.optim.Optimizer):
    """Adam with decoupled decay, as the paper has it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2e-3})
        self._means: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._count += 1
        for each in self.param_groups[0]["params"]:
            first, second = self._means.get(each, (torch.zeros_like(each), torch.zeros_like(each)))
            first = 0.9 * first + 0.1 * each.grad
            second = 0.999 * second + 0.001 * each.grad**2
            self._means[each] = first, second
            right = first / (1 - 0.9**self._count), second / (1 - 0.999**self._count)
            each -= 2e-3 * (0.01 * each + right[0] / (right[1].sqrt() + 1e-8))


def attend_with(mask: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention with a mask that is added: some large negative number."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.full((q.shape[-2], k.shape[-2]), mask, dtype=q.dtype, device=q.device).triu(1)
        return (q @ k.mT * q.shape[-1] ** -0.5 + hidden).softmax(-1) @ v

    return attend


def attend_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.full((q.shape[-2], k.shape[-2]), float("-inf"), device=q.device).triu(1)
    weights = F.softmax(torch.einsum("nhqd,nhkd->nhqk", q * q.shape[-1] ** -0.5, k) + hidden, -1)
    return torch.einsum("nhqk,nhkd->nhqd", weights, v)


def attend_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads = q.shape[:2]
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    hidden = torch.full((1, q.shape[1], k.shape[1]), float("-inf"), device=q.device).triu(1)
    scores = torch.baddbmm(hidden.expand(len(q), -1, -1), q, k.mT, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (batch, heads))


def attend_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads = q.shape[:2]
    q, k, v = (each.reshape(batch * heads, -1, 8) for each in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) / 8**0.5
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    weights = F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.bmm(weights, v).view(batch, heads, -1, 8)


class FusedBlock(nn.Module):
    """One projection for queries, keys and values, and one for gate and value, made from those of a plain block."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.norm, self.last, self.out, self.down = plain.norm, plain.last, plain.out, plain.down
        self.qkv, self.wide = self.joined(plain.q, plain.k, plain.v), self.joined(plain.gate, plain.up)

    @staticmethod
    def joined(*layers: nn.Linear) -> nn.Linear:
        made = nn.Linear(layers[0].in_features, sum(each.out_features for each in layers), device="meta")
        made.weight = nn.Parameter(torch.cat([each.weight.detach() for each in layers]))
        made.bias = nn.Parameter(torch.cat([each.bias.detach() for each in layers]))
        return made

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(attend_fused(q, k, v).transpose(1, 2).flatten(2))
        gate, value = self.wide(self.last(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        held = self.norm(x)
        q, k, v = (part(held).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(attend_fused(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.activate(self.last(x)))

    def activate(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class HalfFused(PlainBlock):
    """Only the projections of the gated layer are one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = FusedBlock.joined(self.gate, self.up)
        del self.gate, self.up

    def activate(self, x: Tensor) -> Tensor:
        gate, value = self.wide(x).chunk(2, -1)
        return F.silu(gate) * value


class Swiglu(torch.autograd.Function):
    """A fused activation with its own gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        share = torch.sigmoid(gate)
        return gradients[0] * value * share * (1 + gate * (1 - share)), gradients[0] * gate * share


class CustomBlock(PlainBlock):
    def activate(self, x: Tensor) -> Tensor:
        made: Tensor = Swiglu.apply(self.gate(x), self.up(x))
        return made


def blocks(make: Callable[[], nn.Module], call_it: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> Family:
    def build(setup: Setup) -> Training:
        model = setup.place(nn.Sequential(make(), make()))
        x, y = setup.randn(3, 7, 16), setup.randn(3, 7, 16)
        return Training(setup, model, lambda _: F.mse_loss(call_it(model, x), y), adamw(model.parameters()))

    return build


def called_as_function(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    return found


def layer_norm(layer: Any, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    spread = (x - mean).pow(2).mean(-1, keepdim=True)
    return layer.weight * ((x - mean) * torch.rsqrt(spread + layer.eps)) + layer.bias


def rms_norm(layer: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer.eps) * layer.weight


def rms(size: int) -> nn.Module:
    return nn.RMSNorm(size, eps=1e-6)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def unfolded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    height, width = (
        size + 2 * pad - kernel + 1
        for size, pad, kernel in zip(x.shape[2:], layer.padding, layer.kernel_size, strict=True)
    )
    columns = F.unfold(x, layer.kernel_size, padding=layer.padding)
    assert layer.bias is not None
    return (layer.weight.flatten(1) @ columns + layer.bias[:, None]).unflatten(-1, (height, width))


def by_addmm(layer: Any, x: Tensor) -> Tensor:
    return torch.addmm(layer.bias, x.flatten(0, 1), layer.weight.T).view(*x.shape[:2], -1)


def by_point(layer: nn.Conv2d, x: Tensor) -> Tensor:
    if layer.kernel_size != (1, 1):
        return layer(x)
    return F.linear(x.permute(0, 2, 3, 1), layer.weight.flatten(1), layer.bias).permute(0, 3, 1, 2)


def logsumexp_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return (logits.logsumexp(-1) - logits.gather(-1, wanted[..., None]).squeeze(-1)).mean()


class Gated(nn.Module):
    def __init__(self, *, cells: bool) -> None:
        super().__init__()
        whole = nn.GRU(7, 10, batch_first=True)
        self.cells, self.head = cells, nn.Linear(10, 3)
        self.rnn: nn.Module = nn.GRUCell(7, 10) if cells else whole
        if cells:
            self.rnn.load_state_dict({key.removesuffix("_l0"): value for key, value in whole.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        if not self.cells:
            return self.head(self.rnn(x)[0])
        state, found = x.new_zeros(x.shape[0], 10), []
        for at in range(x.shape[1]):
            state = self.rnn(x[:, at], state)
            found.append(state)
        return self.head(torch.stack(found, 1))


def gated(*, cells: bool) -> Family:
    def build(setup: Setup) -> Training:
        model = setup.place(Gated(cells=cells))
        x, y = setup.randn(4, 5, 7), setup.randn(4, 5, 3)
        return Training(setup, model, lambda _: F.mse_loss(model(x), y), adamw(model.parameters()))

    return build


class Experts(nn.Module):
    """Each token uses its best expert: token by token, or all experts for all tokens with a mask."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.dense, self.gate = dense, nn.Linear(8, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 16) * 0.3), nn.Parameter(torch.randn(3, 16, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        chance = self.gate(x).softmax(-1)
        best, which = chance.max(-1)
        if self.dense:
            made = torch.einsum("enh,ehd->end", torch.einsum("nd,edh->enh", x, self.up).relu(), self.down)
            return x + torch.einsum("end,ne->nd", made, F.one_hot(which, 3).to(x.dtype) * best[:, None])
        out = torch.zeros_like(x)
        for number in range(3):
            rows = (which == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, (x[rows] @ self.up[number]).relu() @ self.down[number] * best[rows, None])
        return x + out


def experts(*, dense: bool) -> Family:
    def build(setup: Setup) -> Training:
        model = setup.place(Experts(dense=dense))
        x, y = setup.randn(20, 8), setup.randn(20, 8)
        return Training(setup, model, lambda _: F.mse_loss(model(x), y), adamw(model.parameters()))

    return build


def parallel(way: str) -> Family:
    """Eight samples: DDP, gradients averaged by hand, or all in one process."""

    def build(setup: Setup) -> Training:
        model = setup.place(nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 3)))
        x, y = setup.randn(8, 6), setup.randn(8, 3)
        if way != "single":
            x, y = (each.chunk(2)[distributed.get_rank()] for each in (x, y))
        called = DistributedDataParallel(model) if way == "ddp" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        training = Training(setup, model, lambda _: F.mse_loss(called(x), y), optimizer)

        def average() -> None:
            for each in model.parameters():
                distributed.all_reduce(each.grad)
                each.grad /= 2

        if way == "manual":
            training.after_backward.append(average)
        return training

    return build


class OwnLlama(nn.Module):
    """Llama with plain functions and names of its own, around the weights of transformers' model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        theirs = LlamaForCausalLM(config)
        self.words, self.norm, self.head = theirs.model.embed_tokens, theirs.model.norm.weight, theirs.lm_head
        self.blocks = nn.ModuleList(OwnLlamaBlock(each) for each in theirs.model.layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(F.rms_norm(x, (16,), self.norm, 1e-6))


class OwnLlamaBlock(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = theirs.input_layernorm.weight, theirs.post_attention_layernorm.weight
        attention, mlp = theirs.self_attn, theirs.mlp
        self.q, self.k, self.v, self.out = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    @staticmethod
    def turn(x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[2]).float(), 10000.0 ** -(torch.arange(0, 8, 2) / 8)).repeat(1, 2)
        one, other = x.chunk(2, -1)
        return x * angle.cos().to(x) + torch.cat([-other, one], -1) * angle.sin().to(x)

    def forward(self, x: Tensor) -> Tensor:
        held = F.rms_norm(x, (16,), self.norm1, 1e-6)
        q, k, v = (part(held).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        held = F.rms_norm(x, (16,), self.norm2, 1e-6)
        return x + self.down(F.silu(self.gate(held)) * self.up(held))


LLAMA = LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, rms_norm_eps=1e-6,
)  # fmt: skip
LLAMA_MAP = """
Module.model.embed_tokens = Module.words
Module.model.layers = Module.blocks
Module.lm_head = Module.head
"""


def gpt2(attention: str) -> Family:
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation=attention, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return library(config, GPT2LMHeadModel)


def compiled(backend: str) -> Callable[[nn.Module], Any]:
    torch._dynamo.config.recompile_limit = 64
    return lambda model: torch.compile(model, backend=backend)


PAIRS: list[Pair] = [
    Pair("adafactor: loop, foreach", simple(made(optim.Adafactor)), simple(made(optim.Adafactor, foreach=True)), (
        planted("optimizer", "running mean of one parameter 1 % too large", kernel("lerp_.Scalar", kinds.scaled(1.01), 2)),
    )),
    Pair("adagrad: loop, foreach", simple(made(optim.Adagrad)), simple(made(optim.Adagrad, foreach=True)), (
        planted("optimizer", "root of one parameter 1 % too large", kernel("sqrt", kinds.scaled(1.01), 3)),
    )),
    Pair("adam: loop, foreach", simple(made(optim.Adam)), simple(made(optim.Adam, foreach=True)), (
        planted("optimizer", "first moment of one parameter 2 % too large", kernel("lerp_.Scalar", kinds.scaled(1.02), 4)),
        planted("behind", "tanh of the second step 0.5 % too large", kernel("tanh", kinds.scaled(1.005), 0, step=1)),
    )),
    Pair("adamax: loop, foreach", simple(made(optim.Adamax)), simple(made(optim.Adamax, foreach=True)), (
        planted("optimizer", "update of one parameter 2 % too large",
                kernel("addcdiv_", kinds.keyword_argument(value=lambda v: v * 1.02), 2), "*"),
    )),
    Pair("adamw: loop, foreach", simple(adamw), simple(made(optim.AdamW, lr=2e-3, foreach=True)), (
        planted("optimizer", "second moment of one parameter rounded to bfloat16", kernel("addcmul_", kinds.rounded(), 1)),
        planted("optimizer", "decay of one parameter", kernel("mul_.Scalar", kinds.scaled(0.99), 0), "*"),
        planted("behind", "one gradient 2 % too large, unseen", unseen_gradient("0.weight", lambda g: g.__imul__(1.02)), "0.weight"),
    )),
    Pair("adamw: torch, own", simple(adamw), simple(OwnAdamW), (
        planted("optimizer", "root of one parameter 1 % too large", kernel("sqrt", kinds.scaled(1.01), 2)),
    )),
    Pair("mask: -3.4e38, -1e9", words(attend=attend_with(torch.finfo(torch.float32).min)), words(attend=attend_with(-1e9)), (
        planted("inside", "softmax behind the mask 1 % too large", kernel("_softmax", kinds.scaled(1.01), 1)),
        planted("inside", "one score before the mask", kernel("bmm", kinds.one_element(0.3, 0.0), 0)),
        planted("behind", "output projection 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 3)),
    )),
    Pair("products: matmul, bmm", words(), words(attend=attend_bmm), (
        planted("inside", "second product of block 0 1 % too large", kernel("bmm", kinds.scaled(1.01), 1)),
        planted("behind", "output projection of block 1, last column", kernel("addmm", kinds.last_columns(0.8), 9)),
    )),
    Pair("casts: none, to float and back", words(), words(norm=lambda layer, x: layer(x.double().float()).to(x.dtype)), (
        planted("behind", "second norm with a larger eps", kernel("native_layer_norm", kinds.argument(4, 1e-2), 1)),
    )),
    Pair("loss: cross entropy, logsumexp", words(), words(loss=logsumexp_loss), (
        planted("inside", "logsumexp 0.5 % too large", kernel("logsumexp", kinds.scaled(1.005))),
        planted("border", "head, one element", kernel("addmm", kinds.one_element(0.6), 12)),
    )),
    Pair("memory: contiguous, channels last", image(), image(memory_format=torch.channels_last), (
        planted("inside", "second convolution 0.5 % too large", kernel("convolution", kinds.scaled(1.005), 1)),
        planted("inside", "weight gradient of a convolution", gradient_kernel("convolution_backward", kinds.scaled(1.01, 1), 1)),
    )),
    Pair("checkpointing: off, reentrant", words(), words(run=lambda block, x: checkpoint(block, x, use_reentrant=True)), (
        planted("inside", "softmax of block 1 1 % too large", kernel("_softmax", kinds.scaled(1.01), 1)),
    )),
    Pair("compiled: no, aot_eager", words(), words(wrap=compiled("aot_eager")), (
        planted("inside", "gelu of block 0 1 % too large", kernel("gelu", kinds.scaled(1.01), 0)),
    ), level="mix"),
    Pair("compiled: no, eager", words(), words(wrap=compiled("eager")), (
        planted("inside", "first norm 1 % too large", kernel("native_layer_norm", kinds.scaled(1.01), 0)),
    ), level="mix"),
    Pair("convolution: layer, unfold and product", image(), image(convolve=unfolded), (
        planted("inside", "columns of two places swapped", kernel("im2col", kinds.swapped_rows(3, 4, 2), 1)),
        planted("behind", "batch norm with a larger eps", kernel("native_batch_norm", kinds.argument(7, 1e-2), 1)),
    )),
    Pair("convolution: one by one, linear", image(), image(convolve=by_point), (
        planted("inside", "linear layer in its place 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 0)),
        planted("border", "relu before it, one tile", kernel("relu", kinds.one_tile(1.3), 1)),
    )),
    Pair("swiglu: plain, own function", blocks(PlainBlock), blocks(CustomBlock), (
        planted("inside", "silu of block 1 0.5 % too large", kernel("silu", kinds.scaled(1.005), 1)),
        planted("inside", "sigmoid in its gradient 2 % too large", gradient_kernel("sigmoid", kinds.scaled(1.02), 0)),
    )),
    Pair("two processes: DDP, by hand", parallel("ddp"), parallel("manual"), (
        planted("inside", "average of one gradient 1 % too large on rank 1", kernel("div_.Tensor", kinds.scaled(1.01), 2, rank=1)),
        planted("behind", "gelu on rank 0 1 % too large", kernel("gelu", kinds.scaled(1.01), rank=0)),
    ), ranks=(2, 2)),
    Pair("one process, two with DDP", parallel("single"), parallel("ddp"), (), ranks=(1, 2)),
    Pair("attention: einsum, sdpa", words(attend=attend_einsum), words(attend=attend_fused), (
        planted("inside", "attention of block 1, one element", kernel(FLASH, kinds.one_element(0.4), 1)),
        planted("border", "value of the sample before", call("F.scaled_dot_product_attention", tensor(2, lambda v: v.roll(1, 0)), 0)),
    )),
    Pair("experts: token by token, all with a mask", experts(dense=False), experts(dense=True), (
        planted("inside", "product of the experts 1 % too large", kernel("bmm", kinds.scaled(1.01), 1)),
        planted("border", "softmax of the gate shifted", kernel("_softmax", kinds.shifted(0.02))),
    )),
    Pair("call: direct, functional_call", blocks(PlainBlock), blocks(PlainBlock, called_as_function), (
        planted("inside", "query projection of block 1 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 7)),
    )),
    Pair("gelu with tanh: fused, by hand", words(act=lambda x: F.gelu(x, approximate="tanh")), words(act=gelu_tanh), (
        planted("inside", "tanh of block 0 1 % too large", kernel("tanh", kinds.scaled(1.01), 0)),
        planted("inside", "gradient of tanh, one element", gradient_kernel("tanh_backward", kinds.one_element(0.5), 0)),
    )),
    Pair("GPT-2: eager attention, sdpa", gpt2("eager"), gpt2("sdpa"), (
        planted("inside", "attention of layer 0 1 % too small", kernel(FLASH, kinds.scaled(0.99), 0)),
        planted("behind", "projection behind attention without its last term", kernel("addmm", kinds.short_sum(1), 1)),
    )),
    Pair("GRU: layer, cells", gated(cells=False), gated(cells=True), (
        planted("behind", "head 1 % too large", kernel("addmm", kinds.scaled(1.01), 10)),
    )),
    Pair("hardswish: fused, by hand", words(act=F.hardswish), words(act=lambda x: x * (x + 3).clamp(0, 6) / 6), (
        planted("inside", "division 0.5 % too large", kernel("div.Tensor", kinds.scaled(1.005), 1)),
    )),
    Pair("layer norm: fused, by hand", words(), words(norm=layer_norm), (
        planted("inside", "rsqrt of the third norm 0.3 % too large", kernel("rsqrt", kinds.scaled(1.003), 2)),
        planted("inside", "mean without its last element", kernel("mean.dim", kinds.short_reduction(1), 0)),
        planted("border", "down projection before it, one element", kernel("addmm", kinds.one_element(0.5), 5)),
    )),
    Pair("mask: smallest number, infinity", words(attend=attend_with(torch.finfo(torch.float32).min)), words(), (
        planted("inside", "softmax of block 0, last column", kernel("_softmax", kinds.last_columns(0.5), 0)),
        planted("behind", "gelu of block 0 0.5 % too large", kernel("gelu", kinds.scaled(1.005), 0)),
    )),
    Pair("linear: layer, addmm", words(), words(project=by_addmm), (
        planted("inside", "second product without its last term", kernel("addmm", kinds.short_sum(1), 1)),
    )),
    Pair("linear: layer, product and bias", words(), words(project=lambda layer, x: x @ layer.weight.T + layer.bias), (
        planted("inside", "product of the value projection 0.5 % too large", kernel("mm", kinds.scaled(1.005), 2)),
        planted("behind", "softmax of block 1 0.5 % too large", kernel("_softmax", kinds.scaled(1.005), 1)),
    )),
    Pair("Llama: transformers, own rewrite", library(LLAMA, LlamaForCausalLM), library(LLAMA, OwnLlama), (
        planted("inside", "RMS norm: rsqrt 0.5 % too large", kernel("rsqrt", kinds.scaled(1.005), 1)),
        planted("behind", "silu of block 1 1 % too large", kernel("silu", kinds.scaled(1.01), 1)),
    ), map=LLAMA_MAP),
    Pair("attention: products, baddbmm", words(attend=attend_by_products), words(attend=attend_baddbmm), (
        planted("inside", "scores of block 0 0.5 % too large", kernel("baddbmm", kinds.scaled(1.005), 0)),
        planted("behind", "down projection of block 0, one element", kernel("addmm", kinds.one_element(0.5), 5)),
    )),
    Pair("projections: three, one", blocks(PlainBlock), blocks(lambda: FusedBlock(PlainBlock())), (
        planted("inside", "joined projection of block 1 1 % too large", kernel("addmm", kinds.scaled(1.01), 4)),
        planted("behind", "attention of block 0 1 % too large", kernel(FLASH, kinds.scaled(1.01), 0)),
    )),
    Pair("relu: out of place, in place", image(), image(act=lambda x: F.relu(x, inplace=True)), (
        planted("inside", "relu of the second layer, one element", kernel("relu_", kinds.one_element(0.5), 1)),
        planted("behind", "second convolution 0.3 % too large", kernel("convolution", kinds.scaled(1.003), 1)),
    )),
    Pair("shapes: unflatten, view and permute", words(),
         words(split=lambda x, heads: x.view(*x.shape[:2], heads, 8).permute(0, 2, 1, 3),
               merge=lambda x: x.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)), (
        planted("behind", "scores of block 1, one element", kernel("bmm", kinds.one_element(0.4, 0.1), 2)),
    )),
    Pair("RMS norm: fused, by hand", words(make_norm=rms), words(make_norm=rms, norm=rms_norm), (
        planted("inside", "rsqrt of the second norm rounded to bfloat16", kernel("rsqrt", kinds.rounded(), 1)),
    )),
    Pair("sgd: loop, foreach", simple(made(optim.SGD, lr=0.1, momentum=0.9)),
         simple(made(optim.SGD, lr=0.1, momentum=0.9, foreach=True)), (
        planted("optimizer", "update of one parameter, one element", kernel("add_.Tensor", kinds.one_element(0.1), 3), "*"),
    )),
    Pair("swiglu: two projections, one", blocks(PlainBlock), blocks(HalfFused), (
        planted("inside", "joined projection of block 0, last column", kernel("addmm", kinds.last_columns(0.5), 4)),
        planted("behind", "down projection of block 1 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 11)),
    )),
]  # fmt: skip

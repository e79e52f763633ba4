"""Pairs of programs of the open part, and faults in their candidates. They may be read and used for tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bench.heldout import kinds
from bench.heldout.cases import Pair, planted
from bench.heldout.plant import call, gradient_kernel, kernel, tensor, unseen_gradient
from bench.heldout.programs import (
    adamw,
    attend_by_products,
    attend_fused,
    image,
    library,
    simple,
    words,
)
from bench.heldout.training import Family, Setup, Training

optim = torch.optim
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def made(kind: Any, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer with settings, which takes the loop unless asked otherwise."""
    return lambda parameters: kind(parameters, **{"foreach": False, **settings})


class OwnSGD(torch.optim.Optimizer):
    """Momentum as a textbook has it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._speed: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            speed = each.grad if each not in self._speed else 0.9 * self._speed[each] + each.grad
            self._speed[each] = speed
            each -= self.param_groups[0]["lr"] * speed


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    found = list(parameters)
    return optim.AdamW([{"params": found[::2]}, {"params": found[1::2]}], lr=2e-3, foreach=False)


def clip(foreach: bool) -> Callable[[Training], None]:
    def finish(training: Training) -> None:
        training.after_backward.append(
            lambda: nn.utils.clip_grad_norm_(training.model.parameters(), 0.05, foreach=foreach) and None
        )

    return finish


class KeepsZeros(Training):
    def step(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss(number).backward()
        self.update()


def zeros(setup: Setup) -> Training:
    usual = simple(made(optim.SGD, lr=0.1))(setup)
    return KeepsZeros(setup, usual.model, usual.loss, usual.optimizer)


def attend_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def attend_online(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two blocks of keys, with a running maximum and a running sum."""
    scale, length = q.shape[-1] ** -0.5, k.shape[-2]
    rows = torch.arange(length, device=q.device)
    top = q.new_full((*q.shape[:-1], 1), -1e30)
    total, mixed = torch.zeros_like(top), torch.zeros_like(q)
    for begin in range(0, length, 4):
        part = slice(begin, begin + 4)
        scores = (q @ k[..., part, :].mT * scale).masked_fill(rows[part] > rows[:, None], -1e30)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, old = (scores - higher).exp(), (top - higher).exp()
        total, mixed, top = total * old + weights.sum(-1, keepdim=True), mixed * old + weights @ v[..., part, :], higher
    return mixed / total


def attend_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_by_products(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def attend_expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (each.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))
    return attend_by_products(q, k, v)


class HandAttention(nn.Module):
    """What nn.MultiheadAttention computes, in its own words and with its own names."""

    def __init__(self, like: nn.MultiheadAttention) -> None:
        super().__init__()
        self.in_proj_weight, self.in_proj_bias, self.out_proj = like.in_proj_weight, like.in_proj_bias, like.out_proj

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (q, k, v))
        return self.out_proj(attend_fused(q, k, v).transpose(1, 2).flatten(2))


class OneLayer(nn.Module):
    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.by_hand, self.attention = by_hand, HandAttention(attention) if by_hand else attention
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            return self.head(self.norm(x + self.attention(x)))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.norm(x + self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]))


def one_layer(*, by_hand: bool) -> Family:
    def build(setup: Setup) -> Training:
        model = setup.place(OneLayer(by_hand=by_hand))
        x, y = setup.randn(3, 8, 16), setup.randn(3, 8, 6)
        return Training(setup, model, lambda _: F.mse_loss(model(x), y), adamw(model.parameters()))

    return build


def batch_norm(layer: Any, x: Tensor) -> Tensor:
    mean = x.mean((0, 2, 3), keepdim=True)
    spread = (x - mean).square().mean((0, 2, 3), keepdim=True)
    weight, bias = layer.weight.view(1, -1, 1, 1), layer.bias.view(1, -1, 1, 1)
    return (x - mean) / (spread + layer.eps).sqrt() * weight + bias


def group_norm(layer: Any, x: Tensor) -> Tensor:
    held = x.unflatten(1, (3, -1))
    spread, mean = torch.var_mean(held, (2, 3, 4), correction=0, keepdim=True)
    held = ((held - mean) * torch.rsqrt(spread + layer.eps)).flatten(1, 2)
    return torch.addcmul(layer.bias.view(1, -1, 1, 1), held, layer.weight.view(1, -1, 1, 1))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp_min(0)


def one_hot(layer: Any, ids: Tensor) -> Tensor:
    return F.one_hot(ids, layer.num_embeddings).to(layer.weight.dtype) @ layer.weight


def select(layer: Any, ids: Tensor) -> Tensor:
    return layer.weight.index_select(0, ids.flatten()).view(*ids.shape, -1)


def pick(logits: Tensor, wanted: Tensor) -> Tensor:
    return -F.log_softmax(logits, -1).gather(-1, wanted.unsqueeze(-1)).mean()


def bce(x: Tensor, y: Tensor) -> Tensor:
    return (x.clamp_min(0) - x * y + torch.log1p(torch.exp(-x.abs()))).mean()


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    y += x
    return y


def copied(x: Tensor, heads: int) -> Tensor:
    return x.clone().unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


def stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads one by one, stacked afterwards."""
    return torch.stack(
        [attend_by_products(*each) for each in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)], 1
    )


def concatenated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat(
        [attend_by_products(*each) for each in zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), strict=True)], 1
    )


class Tagger(nn.Module):
    def __init__(self, *, cells: bool) -> None:
        super().__init__()
        whole = nn.LSTM(7, 10, batch_first=True)
        self.cells, self.head = cells, nn.Linear(10, 3)
        self.rnn: nn.Module = nn.LSTMCell(7, 10) if cells else whole
        if cells:
            self.rnn.load_state_dict({key.removesuffix("_l0"): value for key, value in whole.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        if not self.cells:
            return self.head(self.rnn(x)[0])
        state = (x.new_zeros(x.shape[0], 10), x.new_zeros(x.shape[0], 10))
        found = []
        for at in range(x.shape[1]):
            state = self.rnn(x[:, at], state)
            found.append(state[0])
        return self.head(torch.stack(found, 1))


def tagger(*, cells: bool) -> Family:
    def build(setup: Setup) -> Training:
        model = setup.place(Tagger(cells=cells))
        x, y = setup.randn(4, 5, 7), setup.randn(4, 5, 3)
        return Training(setup, model, lambda _: F.mse_loss(model(x), y), adamw(model.parameters()))

    return build


class OwnBlock(nn.Module):
    """A block of GPT-2, with linear layers in place of transposed weights."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = theirs.ln_1, theirs.ln_2
        self.qkv, self.out, self.up, self.down = (
            self.turned(each) for each in (theirs.attn.c_attn, theirs.attn.c_proj, theirs.mlp.c_fc, theirs.mlp.c_proj)
        )

    @staticmethod
    def turned(layer: Any) -> nn.Linear:
        made = nn.Linear(*layer.weight.shape, device="meta")
        made.weight, made.bias = nn.Parameter(layer.weight.detach().T.contiguous()), layer.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(attend_fused(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class OwnGPT2(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        theirs = GPT2LMHeadModel(config)
        self.words, self.places = theirs.transformer.wte, theirs.transformer.wpe
        self.blocks = nn.ModuleList(OwnBlock(each) for each in theirs.transformer.h)
        self.norm = theirs.transformer.ln_f

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


GPT2 = GPT2Config(
    vocab_size=50,
    n_positions=16,
    n_embd=16,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
GPT2_MAP = """
Module.transformer.wte = Module.words
Module.transformer.wpe = Module.places
Module.transformer.ln_f = Module.norm
Module.transformer.h = Module.blocks
"""


def llama(attention: str) -> Family:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation=attention,
    )  # fmt: skip
    return library(config, LlamaForCausalLM)


PAIRS: list[Pair] = [
    Pair("adadelta: loop, foreach", simple(made(optim.Adadelta)), simple(made(optim.Adadelta, foreach=True)), (
        planted("optimizer", "running mean of one parameter 1 % too large", kernel("addcmul_", kinds.scaled(1.01), 4)),
    )),
    Pair("adagrad: loop, fused", simple(made(optim.Adagrad)), simple(made(optim.Adagrad, foreach=None, fused=True)), (
        planted("optimizer", "update of one parameter 1 % too large", kernel("_fused_adagrad_", kinds.one_update(2, 1.01)), "2.weight"),
    )),
    Pair("adam: loop, fused", simple(made(optim.Adam)), simple(made(optim.Adam, foreach=None, fused=True)), (
        planted("optimizer", "update of one parameter 1 % too large", kernel("_fused_adam_", kinds.one_update(0, 1.01)), "0.weight"),
        planted("behind", "gradients 1 % too large, unseen", unseen_gradient("4.weight", lambda g: g.__imul__(1.01)), "4.weight"),
    )),
    Pair("adamw: foreach, fused", simple(made(optim.AdamW, foreach=True)), simple(made(optim.AdamW, foreach=None, fused=True)), (
        planted("optimizer", "other learning rate",
                kernel("_fused_adamw_", kinds.keyword_argument(lr=lambda lr: lr * 1.02)), "*"),
        planted("behind", "tanh of the second step 1 % too large", kernel("tanh", kinds.scaled(1.01), 1, step=1)),
    )),
    Pair("residual: out of place, in place", words(), words(add=add_in_place), (
        planted("inside", "in-place sum of the second block, one element", kernel("add_.Tensor", kinds.one_element(0.3), 2)),
        planted("behind", "second norm 0.5 % too large", kernel("native_layer_norm", kinds.scaled(1.005), 1)),
    )),
    Pair("batch norm: fused, by hand", image(), image(norm=batch_norm), (
        planted("inside", "variance 1 % too large", kernel("mean.dim", kinds.scaled(1.01), 1)),
        planted("border", "convolution before the norm 0.5 % too large", kernel("convolution", kinds.scaled(1.005), 1)),
        planted("behind", "relu after the second norm, one element", kernel("relu", kinds.one_element(0.4), 1)),
    )),
    Pair("loss: bce with logits, by hand", simple(made(optim.SGD, lr=0.1), F.binary_cross_entropy_with_logits),
         simple(made(optim.SGD, lr=0.1), bce), (
        planted("inside", "log1p 1 % too large", kernel("log1p", kinds.scaled(1.01))),
        planted("border", "last linear layer, last column", kernel("addmm", kinds.last_columns(0.9), 2)),
    )),
    Pair("attention: causal flag, mask", words(attend=attend_fused), words(attend=attend_masked), (
        planted("inside", "attention of the second block 1 % too large", kernel(FLASH, kinds.scaled(1.01), 1)),
        planted("behind", "gradient of attention, last column",
                gradient_kernel(f"{FLASH}_backward", kinds.last_columns(0.5, 1), 0)),
    )),
    Pair("loss: cross entropy, gather", words(), words(loss=pick), (
        planted("inside", "gather one place too far", kernel("gather", kinds.index_off(2, lambda x, dim, *_: x.shape[dim]))),
        planted("border", "head 1 % too large", kernel("addmm", kinds.scaled(1.01), 12)),
    )),
    Pair("checkpointing: off, on", words(), words(run=lambda block, x: checkpoint(block, x, use_reentrant=False)), (
        planted("inside", "gelu of the second block 0.5 % too large", kernel("gelu", kinds.scaled(1.005), 1)),
        planted("behind", "gradient of layer norm 1 % too small",
                gradient_kernel("native_layer_norm_backward", kinds.scaled(0.99), 1)),
    )),
    Pair("clipping: loop, foreach", simple(made(optim.SGD, lr=0.1), finish=clip(False)),
         simple(made(optim.SGD, lr=0.1), finish=clip(True)), (
        planted("inside", "norm of all gradients 2 % too large", kernel("linalg_vector_norm", kinds.scaled(1.02), 0)),
        planted("behind", "update of one parameter", kernel("add_.Tensor", kinds.one_element(0.2), 1)),
    )),
    Pair("copies: none, clone and contiguous", words(), words(split=copied), (
        planted("border", "query projection 1 % too large", kernel("addmm", kinds.scaled(1.01), 6)),
        planted("behind", "softmax of the second block, last column", kernel("_softmax", kinds.last_columns(0.5), 1)),
    )),
    Pair("dropout: absent, of zero", words(), words(act=lambda x: F.dropout(F.gelu(x), 0.0)), (
        planted("behind", "down projection of block 0 0.5 % too small", kernel("addmm", kinds.scaled(0.995), 5)),
    )),
    Pair("embedding: lookup, one-hot product", words(), words(embed=one_hot), (
        planted("inside", "product of the one-hot rows, one element", kernel("mm", kinds.one_element(0.5))),
        planted("behind", "first norm 0.5 % too large", kernel("native_layer_norm", kinds.scaled(1.005), 0)),
    )),
    Pair("embedding: lookup, index_select", words(), words(embed=select), (
        planted("inside", "one row too far", kernel("index_select", kinds.index_off(2, lambda w, *_: len(w)))),
    )),
    Pair("gelu: fused, by hand", words(), words(act=gelu), (
        planted("inside", "erf 1 % too large", kernel("erf", kinds.scaled(1.01), 1)),
        planted("border", "up projection 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 4)),
    )),
    Pair("GPT-2: transformers, own rewrite", library(GPT2, GPT2LMHeadModel), library(GPT2, OwnGPT2), (
        planted("inside", "fused attention 1 % too large", kernel(FLASH, kinds.scaled(1.01), 1)),
        planted("behind", "last norm, one element", kernel("native_layer_norm", kinds.one_element(0.5), 4)),
    ), map=GPT2_MAP),
    Pair("shared keys: repeated, expanded", words(attend=attend_repeated, key_heads=1), words(attend=attend_expanded, key_heads=1), (
        planted("border", "key projection 1 % too large", kernel("addmm", kinds.scaled(1.01), 1)),
        planted("behind", "scores 0.5 % too large", kernel("bmm", kinds.scaled(1.005), 2)),
    )),
    Pair("group norm: fused, by hand", image(make_norm=lambda: nn.GroupNorm(3, 12)),
         image(norm=group_norm, make_norm=lambda: nn.GroupNorm(3, 12)), (
        planted("inside", "rsqrt 0.5 % too large", kernel("rsqrt", kinds.scaled(1.005), 1)),
        planted("inside", "variance, one element", kernel("var_mean.correction", kinds.one_element(0.2), 0)),
        planted("behind", "gradient of relu 2 % too large", gradient_kernel("threshold_backward", kinds.scaled(1.02), 0)),
    )),
    Pair("AdamW: one group, two groups", simple(adamw), simple(two_groups), (
        planted("optimizer", "update of the second group's first parameter",
                kernel("addcdiv_", kinds.keyword_argument(value=lambda v: v * 1.02), 3), "*"),
    )),
    Pair("linear: layer, einsum", words(), words(project=lambda layer, x: torch.einsum("btd,od->bto", x, layer.weight) + layer.bias), (
        planted("inside", "product of the key projection 0.5 % too large", kernel("bmm", kinds.scaled(1.005), 1)),
        planted("behind", "softmax of block 0 shifted", kernel("_softmax", kinds.shifted(0.02), 0)),
    )),
    Pair("Llama: eager attention, sdpa", llama("eager"), llama("sdpa"), (
        planted("inside", "fused attention of layer 1, last columns", kernel(FLASH, kinds.last_columns(0.5, 2), 1)),
        planted("behind", "silu of layer 0 0.5 % too large", kernel("silu", kinds.scaled(1.005), 0)),
    )),
    Pair("loss: mean, sum over the number", words(),
         words(loss=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") / y.numel()), (
        planted("inside", "sum 1 % too large", kernel("nll_loss_forward", kinds.scaled(1.01))),
    )),
    Pair("LSTM: layer, cells", tagger(cells=False), tagger(cells=True), (
        planted("inside", "tanh of time step 2 1 % too large", kernel("tanh", kinds.scaled(1.01), 4)),
        planted("behind", "head, one element", kernel("addmm", kinds.one_element(0.4), 10)),
    )),
    Pair("attention: products, einsum", words(), words(attend=attend_einsum), (
        planted("inside", "scores of block 1 0.5 % too large", kernel("bmm", kinds.scaled(1.005), 2)),
        planted("behind", "output projection of block 0 without its last term", kernel("addmm", kinds.short_sum(1), 3)),
    )),
    Pair("attention: products, blocks of keys", words(), words(attend=attend_online), (
        planted("inside", "exponential of the second block of keys 1 % too large", kernel("exp", kinds.scaled(1.01), 2)),
        planted("border", "value projection 1 % too large", kernel("addmm", kinds.scaled(1.01), 2)),
        planted("behind", "output projection, one element", kernel("addmm", kinds.one_element(0.5), 9)),
    )),
    Pair("attention: products, sdpa", words(), words(attend=attend_fused), (
        planted("inside", "attention of block 0 0.5 % too large", kernel(FLASH, kinds.scaled(1.005), 0)),
        planted("inside", "gradient of attention 2 % too large", gradient_kernel(f"{FLASH}_backward", kinds.scaled(1.02, 1), 1)),
        planted("border", "query of another head", call("F.scaled_dot_product_attention", tensor(0, lambda q: q.flip(1)), 1)),
        planted("behind", "output projection of block 1 0.5 % too large", kernel("addmm", kinds.scaled(1.005), 9)),
    )),
    Pair("attention: layer of torch, by hand", one_layer(by_hand=False), one_layer(by_hand=True), (
        planted("inside", "output projection 1 % too large", kernel("addmm", kinds.scaled(1.01), 1)),
        planted("behind", "norm with a larger eps", kernel("native_layer_norm", kinds.argument(4, 1e-2))),
    )),
    Pair("loss: mse, by hand", simple(made(optim.SGD, lr=0.1)), simple(made(optim.SGD, lr=0.1), lambda x, y: (x - y).square().mean()), (
        planted("inside", "mean 1 % too large", kernel("mean", kinds.scaled(1.01))),
    )),
    Pair("nadam: loop, foreach", simple(made(optim.NAdam)), simple(made(optim.NAdam, foreach=True)), (
        planted("optimizer", "root of one parameter rounded to bfloat16", kernel("sqrt", kinds.rounded(), 3)),
    )),
    Pair("radam: loop, foreach", simple(made(optim.RAdam)), simple(made(optim.RAdam, foreach=True)), (
        planted("optimizer", "second moment of one parameter 1 % too large", kernel("addcmul_", kinds.scaled(1.01), 2)),
    )),
    Pair("rmsprop: loop, foreach", simple(made(optim.RMSprop, momentum=0.5)), simple(made(optim.RMSprop, momentum=0.5, foreach=True)), (
        planted("optimizer", "update of one parameter 2 % too large",
                kernel("addcdiv_", kinds.scaled(1.02), 1), "*"),
    )),
    Pair("sgd: loop, fused", simple(made(optim.SGD, lr=0.1, momentum=0.9)),
         simple(made(optim.SGD, lr=0.1, momentum=0.9, foreach=None, fused=True)), (
        planted("optimizer", "update of one parameter 2 % too large", kernel("_fused_sgd_", kinds.one_update(4, 1.02)), "4.weight"),
    )),
    Pair("sgd: torch, own", simple(made(optim.SGD, lr=0.1, momentum=0.9)), simple(OwnSGD), (
        planted("optimizer", "speed of one parameter", kernel("mul.Tensor", kinds.scaled(1.02), 3)),
    )),
    Pair("silu: fused, by hand", words(act=F.silu), words(act=lambda x: x * torch.sigmoid(x)), (
        planted("inside", "sigmoid shifted", kernel("sigmoid", kinds.shifted(0.01), 1)),
        planted("inside", "gradient of sigmoid 2 % too small", gradient_kernel("sigmoid_backward", kinds.scaled(0.98), 0)),
    )),
    Pair("softplus: fused, by hand", words(act=F.softplus), words(act=softplus), (
        planted("inside", "log1p rounded to bfloat16", kernel("log1p", kinds.rounded(), 0)),
    )),
    Pair("heads: concatenated, stacked", words(attend=concatenated), words(attend=stacked), (
        planted("inside", "softmax of one head 1 % too large", kernel("_softmax", kinds.scaled(1.01), 3)),
    )),
    Pair("gradients: set to None, set to zero", simple(made(optim.SGD, lr=0.1)), zeros, (
        planted("behind", "tanh of the second step, one element", kernel("tanh", kinds.one_element(0.3), 1, step=1)),
    )),
]  # fmt: skip

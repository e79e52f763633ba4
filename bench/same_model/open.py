"""The open part: it may be read, and used for tuning."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.same_model.training import (
    Choices,
    Pair,
    backwards_off,
    kind_of,
    off,
    off_at_the_end,
    sgd,
    with_choices,
    wrong_gradient,
)

WIDTH, HEADS, TOKENS = 16, 2, 30


# A GPT: attention, norms, activations


def attend(q: Tensor, k: Tensor, v: Tensor, drop: Any = None) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    shares = F.softmax(scores.masked_fill(future, float("-inf")), -1)
    return (shares if drop is None else drop(shares)) @ v


def attend_fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def attend_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    future = torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu(1)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores + future, -1), v)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, size: int = 4, slip: float = 1.0) -> Tensor:
    """Like flash attention: blocks of keys, with a running maximum and a running sum."""
    length, scale = q.shape[-2], q.shape[-1] ** -0.5
    row = torch.arange(length, device=q.device)[:, None]
    peak = q.new_full((*q.shape[:-1], 1), -1e30)
    total, made = torch.zeros_like(peak), torch.zeros_like(q)
    for at in range(0, length, size):
        scores = q @ k[..., at : at + size, :].mT * scale
        scores = scores.masked_fill(row < torch.arange(at, at + size, device=q.device), -torch.inf)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shares, fade = torch.exp(scores - higher), torch.exp(peak - higher)
        total = total * fade * slip + shares.sum(-1, keepdim=True)
        made, peak = made * fade + shares @ v[..., at : at + size, :], higher
    return made / total


def attend_with_copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.contiguous(), k.clone(), v).contiguous().clone()


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias


def gelu_by_hand(x: Tensor, half: float = 0.5) -> Tensor:
    return half * x * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def tanh_gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


def residual(x: Tensor, more: Tensor) -> Tensor:
    return x + more


class Block(nn.Module):
    def __init__(self, norm: Any, attend: Any, act: Any, residual: Any, out: Any) -> None:
        super().__init__()
        self.norm, self.attend, self.act, self.residual, self.behind = norm, attend, act, residual, out
        self.weights = nn.ParameterList([*(1 + 0.1 * torch.randn(2, WIDTH))])
        self.biases = nn.ParameterList([*(0.1 * torch.randn(2, WIDTH))])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm(x, self.weights[0], self.biases[0])).view(batch, length, 3, HEADS, -1)
        y = self.attend(*heads.permute(2, 0, 3, 1, 4).unbind(0))
        x = self.residual(x, self.behind(self.out(y.transpose(1, 2).reshape(batch, length, -1))))
        more: Tensor = x + self.down(self.act(self.up(self.norm(x, self.weights[1], self.biases[1]))))
        return more


class Gpt(nn.Module):
    def __init__(
        self,
        norm: Any = norm,
        attend: Any = attend,
        act: Any = F.gelu,
        residual: Any = residual,
        out: Any = nn.Identity(),  # noqa: B008
        drop: float = 0.0,
        again: bool = False,
    ) -> None:
        super().__init__()
        self.table, self.again = nn.Embedding(TOKENS, WIDTH), again
        self.blocks = nn.ModuleList(Block(norm, attend, act, residual, out) for _ in range(2))
        self.drop, self.norm, self.head = nn.Dropout(drop), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.table(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        logits: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return logits


def next_tokens(g: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(TOKENS, (4, 8), generator=g)
    return tokens, tokens.roll(-1, 1)


def next_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target.flatten())


gpt = partial(with_choices, {"batch": next_tokens, "loss": next_loss}, Gpt)


# A Llama: RMS norm, RoPE, SwiGLU


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def rms_by_hand(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def angles(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    return torch.outer(torch.arange(x.shape[-2], device=x.device).float(), rates)


def rope(x: Tensor, turn: float = 1.0) -> Tensor:
    at = angles(x).repeat(1, 2) * turn
    one, other = x.chunk(2, -1)
    return x * at.cos() + torch.cat((-other, one), -1) * at.sin()


def rope_in_halves(x: Tensor) -> Tensor:
    at = angles(x)
    cos, sin = at.cos(), at.sin()
    one, other = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


def rope_complex(x: Tensor) -> Tensor:
    at = angles(x)
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(at), at)
    return torch.cat(torch.view_as_real(pairs).unbind(-1), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return up * gate * torch.sigmoid(gate)


class Llama(nn.Module):
    def __init__(self, norm: Any = rms, rope: Any = rope, mlp: Any = swiglu, attend: Any = attend_fused) -> None:
        super().__init__()
        self.norm, self.rope, self.mlp, self.attend = norm, rope, mlp, attend
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.weights = nn.ParameterList([*(1 + 0.1 * torch.randn(5, WIDTH))])
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(14))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for at in (0, 1):
            q, k, v, out, gate, up, down = self.linears[7 * at : 7 * at + 7]
            y = self.norm(x, self.weights[2 * at])
            heads = [each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v)]
            y = self.attend(self.rope(heads[0]), self.rope(heads[1]), heads[2])
            x = x + out(y.transpose(1, 2).flatten(2))
            y = self.norm(x, self.weights[2 * at + 1])
            x = x + down(self.mlp(gate(y), up(y)))
        logits: Tensor = self.head(self.norm(x, self.weights[4])).flatten(0, 1)
        return logits


llama = partial(with_choices, {"batch": next_tokens, "loss": next_loss}, Llama)


# A net of convolutions: batch norm, pooling, layouts


def batch_norm(x: Tensor, module: nn.BatchNorm2d) -> Tensor:
    return F.batch_norm(x, module.running_mean, module.running_var, module.weight, module.bias, True, 0.1, module.eps)


def batch_norm_by_hand(x: Tensor, module: nn.BatchNorm2d, eps: float = 1e-5, momentum: float = 0.1) -> Tensor:
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    with torch.no_grad():
        count = x.numel() / x.shape[1]
        assert module.running_mean is not None and module.running_var is not None
        module.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        module.running_var.mul_(1 - momentum).add_(variance * (count / (count - 1)), alpha=momentum)
    normal = (x - mean[:, None, None]) * (variance + eps).rsqrt()[:, None, None]
    return normal * module.weight[:, None, None] + module.bias[:, None, None]


class Convolutions(nn.Module):
    def __init__(
        self, norm: Any = batch_norm, act: Any = torch.relu, last: bool = False, pool: Any = F.avg_pool2d
    ) -> None:
        super().__init__()
        self.norm, self.act, self.last, self.pool = norm, act, last, pool
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            x = x.contiguous(memory_format=torch.channels_last)
        x = self.act(self.norm(self.one(x), self.norms[0]))
        x = x + self.act(self.norm(self.two(self.pool(x, 2)), self.norms[1])).repeat_interleave(2, 2).repeat_interleave(
            2, 3
        )
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def pool_by_hand(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).mean((-3, -1))


PICTURES: Choices = {
    "batch": lambda g: (torch.randn(4, 3, 8, 8, generator=g), torch.randint(5, (4,), generator=g)),
    "loss": F.cross_entropy,
}
conv = partial(with_choices, PICTURES, Convolutions)


# Models of transformers


def hugging(kind: str, attention: str, **options: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": TOKENS, "attn_implementation": attention, "use_cache": False}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **sizes, **options)
        return transformers.GPT2LMHeadModel(config)
    more: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **more, **sizes, **options))


HUGGING: Choices = {
    "batch": next_tokens,
    "loss": lambda out, target: F.cross_entropy(out.logits.flatten(0, 1), target.flatten()),
}


def hf(kind: str, attention: str, **choices: Any) -> Choices:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if kind == "gpt2" else {}
    return with_choices(HUGGING, partial(hugging, kind, attention, **drops), **choices)


adamw = partial(kind_of, torch.optim.AdamW)
_KINDS: dict[str, Any] = {
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adam": partial(torch.optim.Adam, weight_decay=0.01),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


def optimizers(name: str, model: Any = gpt, **fault: Any) -> tuple[Choices, Choices]:
    kind = _KINDS[name]
    return model(optimizer=kind_of(kind, foreach=False)), model(optimizer=kind_of(kind, foreach=True, **fault))


def compiled(backend: str) -> Any:
    return lambda model: torch.compile(model, backend=backend)


LOOP, LISTS, FUSED = (adamw(foreach=False), adamw(foreach=True), adamw(fused=True))
CLIP_LOOP, CLIP_LISTS = ({"max_norm": 0.1, "foreach": lists} for lists in (False, True))
ALL = {"attend": attend_fused, "norm": norm_by_hand, "act": gelu_by_hand, "optimizer": FUSED}

HEALTHY = [
    *(Pair(f"{name} on lists", *optimizers(name)) for name in _KINDS),
    Pair("AdamW on lists", gpt(optimizer=LOOP), gpt(optimizer=LISTS)),
    Pair("AdamW fused", gpt(optimizer=LOOP), gpt(optimizer=FUSED)),
    Pair("AdamW lists against fused", llama(optimizer=LISTS), llama(optimizer=FUSED)),
    Pair("SGD fused", gpt(optimizer=sgd(momentum=0.9)), gpt(optimizer=sgd(momentum=0.9, foreach=False, fused=True))),
    Pair("clip and SGD on lists", gpt(clip=CLIP_LOOP), gpt(clip=CLIP_LISTS, optimizer=sgd(foreach=True))),
    Pair("clip and AdamW fused", gpt(clip=CLIP_LOOP, optimizer=LOOP), gpt(clip=CLIP_LISTS, optimizer=FUSED)),
    Pair("attention fused", gpt(), gpt(attend=attend_fused)),
    Pair("attention by einsum", gpt(attend=attend_fused), gpt(attend=attend_einsum)),
    Pair("attention in blocks", gpt(attend=attend_fused), gpt(attend=attend_in_blocks)),
    Pair("attention in blocks against plain", gpt(), gpt(attend=attend_in_blocks)),
    Pair("copies", gpt(), gpt(attend=attend_with_copies)),
    Pair("layer norm by hand", gpt(), gpt(norm=norm_by_hand)),
    Pair("gelu by hand", gpt(), gpt(act=gelu_by_hand)),
    Pair("tanh gelu by hand", gpt(act=tanh_gelu), gpt(act=tanh_gelu_by_hand)),
    Pair("all of a GPT", gpt(optimizer=LOOP), gpt(**ALL)),
    Pair("RMS norm by hand", llama(), llama(norm=rms_by_hand)),
    Pair("RoPE in halves", llama(), llama(rope=rope_in_halves)),
    Pair("RoPE with complex numbers", llama(), llama(rope=rope_complex)),
    Pair("SwiGLU by hand", llama(), llama(mlp=swiglu_by_hand)),
    Pair("all of a Llama", llama(), llama(norm=rms_by_hand, rope=rope_in_halves, mlp=swiglu_by_hand, attend=attend)),
    Pair("batch norm by hand", conv(), conv(norm=batch_norm_by_hand)),
    Pair("channels last", conv(), conv(last=True)),
    Pair("relu in place", conv(), conv(act=torch.relu_)),
    Pair("silu in place", conv(act=F.silu), conv(act=partial(F.silu, inplace=True))),
    Pair("pooling by hand", conv(), conv(pool=pool_by_hand)),
    Pair("checkpointing", gpt(), gpt(again=True)),
    Pair("checkpointing and fused attention", gpt(), gpt(again=True, attend=attend_fused)),
    Pair("compiled, eager", gpt(), gpt(wrap=compiled("eager"))),
    Pair("compiled, aot_eager", llama(), llama(wrap=compiled("aot_eager"))),
    Pair("compiled, aot_eager, AdamW", conv(optimizer=LOOP), conv(optimizer=FUSED, wrap=compiled("aot_eager"))),
    Pair("GPT-2, sdpa and eager", hf("gpt2", "eager"), hf("gpt2", "sdpa")),
    Pair("Llama, sdpa and eager", hf("llama", "eager"), hf("llama", "sdpa", optimizer=LISTS) | {"optimizer": sgd()}),
    Pair("Llama, sdpa, AdamW", hf("llama", "eager", optimizer=LOOP), hf("llama", "sdpa", optimizer=FUSED)),
    Pair("GPT on the device", gpt(optimizer=adamw()), gpt(optimizer=adamw(), device="npu")),
    Pair(
        "GPT-2 on the device",
        hf("gpt2", "sdpa", optimizer=adamw()),
        hf("gpt2", "sdpa", optimizer=adamw(), device="npu"),
    ),
    Pair(
        "Llama on the device",
        hf("llama", "eager", optimizer=adamw()),
        hf("llama", "sdpa", optimizer=adamw(), device="npu"),
    ),
    Pair("convolutions on the device", conv(optimizer=adamw()), conv(optimizer=adamw(), device="npu")),
]


def pair_of(name: str, ours: Choices, theirs: Choices, *guilty: str, **more: Any) -> Pair:
    return Pair(name, ours, theirs, guilty, **more)


SDPA, NORM = "scaled_dot_product_attention", "layer_norm"
_HOT = partial(attend_fused, scale=1.01 / math.sqrt(WIDTH // HEADS))


def tampered(name: str, at: int = 0, factor: float = 1.01) -> Any:
    """Return what scales the gradient of a parameter before a step, where no call shows it."""

    def tamper(model: nn.Module, step: int) -> None:
        gradient = dict(model.named_parameters())[name].grad
        if step == at and gradient is not None:
            gradient.data.numpy()[...] *= factor

    return tamper


def nan_last(function: Any) -> Any:
    def wrong(*args: Any) -> Tensor:
        made: Tensor = function(*args)
        hole = torch.zeros_like(made)
        hole[..., -1, -1] = torch.nan
        return made + hole

    return wrong


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 1.01)
    return x


FAULTS = [
    pair_of("attention, scale", gpt(), gpt(attend=_HOT), SDPA),
    pair_of("attention, scale against einsum", gpt(attend=attend_einsum), gpt(attend=_HOT), SDPA),
    pair_of("attention, not causal", gpt(), gpt(attend=F.scaled_dot_product_attention), SDPA),
    pair_of("attention, last columns", gpt(), gpt(attend=off_at_the_end(attend_fused)), SDPA),
    pair_of(
        "attention in blocks, sum", gpt(attend=attend_fused), gpt(attend=partial(attend_in_blocks, slip=1.001)), SDPA
    ),
    pair_of("attention, NaN", gpt(), gpt(attend=nan_last(attend_fused)), SDPA),
    pair_of("attention, backward 5 %", gpt(), gpt(attend=backwards_off(attend_fused, 1.05)), SDPA),
    pair_of("attention, backward 1 %", gpt(), gpt(attend=backwards_off(attend_fused)), SDPA),
    pair_of("attention by hand, backward 1 %", gpt(attend=attend_fused), gpt(attend=backwards_off(attend)), SDPA),
    pair_of("attention, gradient of v", gpt(), gpt(attend=lambda q, k, v: attend_fused(q, k, wrong_gradient(v))), SDPA),
    pair_of(
        "attention, gradient of q", gpt(), gpt(attend=lambda q, k, v: attend_fused(hooked(q * 1), k, v)), SDPA, "mul"
    ),
    pair_of("attention, k for v", gpt(), gpt(attend=lambda q, k, v: attend_fused(q, k, k)), SDPA),
    pair_of("attention, before", gpt(), gpt(attend=lambda q, k, v: attend_fused(q * 1.01, k, v)), SDPA, "mul"),
    pair_of("attention, behind", gpt(), gpt(attend=off(attend_fused)), SDPA, "mul"),
    pair_of(
        "behind attention, a factor", gpt(), gpt(attend=attend_fused, residual=lambda x, y: x + 1.001 * y), "mul", "add"
    ),
    pair_of("behind attention, a sum dropped", gpt(), gpt(attend=attend_fused, residual=lambda x, y: y), "add"),
    pair_of("behind attention, out", gpt(), gpt(attend=attend_fused, out=lambda x: x * 1.002), "mul"),
    pair_of("behind attention, activation", gpt(), gpt(attend=attend_fused, act=tanh_gelu), "gelu"),
    pair_of(
        "behind attention, gradient", gpt(), gpt(attend=attend_fused, out=lambda x: wrong_gradient(x, 1.02)), "mul"
    ),
    pair_of("norm, eps", gpt(), gpt(norm=partial(norm_by_hand, eps=1e-3)), NORM),
    pair_of("norm, weight", gpt(), gpt(norm=lambda x, w, b: norm_by_hand(x, w * 1.001, b)), NORM),
    pair_of("norm, no bias", gpt(), gpt(norm=lambda x, w, b: norm_by_hand(x, w, 0 * b)), NORM),
    pair_of(
        "norm, biased variance",
        gpt(),
        gpt(norm=lambda x, w, b: (x - x.mean(-1, True)) / x.std(-1, keepdim=True) * w + b),
        NORM,
    ),
    pair_of("norm, backward", gpt(), gpt(norm=backwards_off(norm_by_hand)), NORM),
    pair_of("gelu, factor", gpt(), gpt(act=partial(gelu_by_hand, half=0.5005)), "gelu"),
    pair_of("gelu, other formula", gpt(), gpt(act=tanh_gelu_by_hand), "gelu"),
    pair_of("gelu, last columns", gpt(), gpt(act=off_at_the_end(gelu_by_hand, 1)), "gelu"),
    pair_of("gelu, backward", gpt(), gpt(act=backwards_off(gelu_by_hand)), "gelu"),
    pair_of("gelu right, behind it wrong", gpt(), gpt(act=gelu_by_hand, optimizer=sgd(lr=1.1e-2)), "add_"),
    pair_of("RMS norm, eps", llama(), llama(norm=partial(rms_by_hand, eps=1e-3)), "rms_norm"),
    pair_of("RMS norm, no weight", llama(), llama(norm=lambda x, w: rms_by_hand(x, torch.ones_like(w))), "rms_norm"),
    pair_of("RMS norm, one column", llama(), llama(norm=off_at_the_end(rms_by_hand, 1)), "rms_norm"),
    pair_of("RoPE, angle", llama(rope=rope_in_halves), llama(rope=partial(rope, turn=1.001)), "mul", "cat", "cos"),
    pair_of("RoPE, not for k", llama(), llama(rope=lambda x: x * 1), "mul", "cat", "cos"),
    pair_of("RoPE, sign", llama(), llama(rope=lambda x: rope_in_halves(x).roll(1, -1)), "mul", "cat", "roll"),
    pair_of("SwiGLU, sigmoid", llama(), llama(mlp=lambda g, u: u * g * torch.sigmoid(1.01 * g)), "silu"),
    pair_of("SwiGLU, swapped", llama(), llama(mlp=lambda g, u: swiglu_by_hand(u, g)), "silu"),
    pair_of("SwiGLU, backward", llama(), llama(mlp=backwards_off(swiglu_by_hand)), "silu"),
    pair_of("SwiGLU, behind it", llama(), llama(mlp=off(swiglu_by_hand)), "silu", "mul"),
    pair_of("batch norm, eps", conv(), conv(norm=partial(batch_norm_by_hand, eps=1e-3)), "batch_norm"),
    pair_of("batch norm, momentum", conv(), conv(norm=partial(batch_norm_by_hand, momentum=0.11)), "batch_norm"),
    pair_of("pooling by hand", conv(), conv(pool=off(pool_by_hand)), "avg_pool2d"),
    pair_of("channels last, activation", conv(), conv(last=True, act=lambda x: torch.relu(x) * 1.001), "mul"),
    pair_of(
        "AdamW on lists, beta", gpt(optimizer=LOOP), gpt(optimizer=adamw(foreach=True, betas=(0.91, 0.999))), "lerp_"
    ),
    pair_of("AdamW fused, eps", gpt(optimizer=LOOP), gpt(optimizer=adamw(fused=True, eps=1e-4)), "lerp_"),
    pair_of("AdamW fused, decay", gpt(optimizer=LOOP), gpt(optimizer=adamw(fused=True, weight_decay=0.5)), "lerp_"),
    pair_of("AdamW fused, rate", gpt(optimizer=LOOP), gpt(optimizer=adamw(fused=True, lr=1.01e-3)), "lerp_"),
    pair_of("Adam on lists, no decay", *optimizers("Adam", weight_decay=0.0), "lerp_"),
    pair_of("NAdam, decay of momentum", *optimizers("NAdam", momentum_decay=8e-3), "lerp_"),
    pair_of("Adamax, beta", *optimizers("Adamax", betas=(0.9, 0.99)), "lerp_", step=1),
    pair_of("Adamax, rate", *optimizers("Adamax", lr=1.02e-3), "lerp_"),
    pair_of("Rprop, rate", *optimizers("Rprop", lr=1.1e-3), "addcmul", "mul"),
    pair_of("ASGD, decay", *optimizers("ASGD", weight_decay=0.1), "add", "mul"),
    pair_of("Adafactor, decay", *optimizers("Adafactor", weight_decay=0.5), "mul_", "add_"),
    pair_of("SGD on lists, momentum", *optimizers("SGD", momentum=0.8), "add", "mul"),
    pair_of("SGD on lists, rate", *optimizers("SGD", lr=1.01e-3), "add", "mul"),
    pair_of("RMSprop, centred", *optimizers("RMSprop", centered=False), "addcmul", "addcdiv"),
    pair_of("Adagrad, decay", *optimizers("Adagrad", eps=1e-3), "addcmul", "addcdiv"),
    pair_of(
        "clip, another norm",
        gpt(clip=CLIP_LOOP),
        gpt(clip=CLIP_LISTS | {"max_norm": 0.11}),
        "clamp",
        "mul",
        "norm",
        "rtruediv",
    ),
    pair_of(
        "clip and AdamW, another norm",
        gpt(clip=CLIP_LOOP, optimizer=LOOP),
        gpt(clip=CLIP_LISTS | {"max_norm": 0.09}, optimizer=FUSED),
        *("clamp", "mul", "norm", "rtruediv"),
    ),
    pair_of(
        "a gradient before the step",
        gpt(optimizer=LOOP),
        gpt(optimizer=FUSED, before_step=tampered("head.weight")),
        *("head.weight", "lerp_"),
    ),
    pair_of("checkpointing, activation", gpt(), gpt(again=True, act=tanh_gelu), "gelu"),
    pair_of("checkpointing, behind", gpt(), gpt(again=True, attend=attend_fused, out=lambda x: x * 1.002), "mul"),
    pair_of("compiled, eager, wrong", gpt(), gpt(wrap=compiled("eager"), optimizer=sgd(lr=1.1e-2)), "add_"),
    pair_of(
        "GPT-2, eps",
        hf("gpt2", "eager"),
        hf("gpt2", "sdpa", layer_norm_epsilon=1e-3),
        "layer_norm",
    ),
    pair_of("Llama, eps", hf("llama", "eager"), hf("llama", "sdpa", rms_norm_eps=1e-3), "add"),
]

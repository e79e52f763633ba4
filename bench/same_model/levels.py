"""Programs of one model at every level, in fp32 and bf16, on several devices; written before anything was tuned on them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.same_model.training import Choices, Pair, backwards_off, kind_of, off, sgd, with_choices, wrong_gradient

adamw = partial(kind_of, torch.optim.AdamW)
LOOP, LISTS, FUSED = adamw(foreach=False), adamw(foreach=True), adamw(fused=True)


def _numbers(*shape: int, classes: int = 5, target: tuple[int, ...] | None = None) -> Any:
    def draw(g: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, generator=g), torch.randint(classes, target or shape[:1], generator=g)

    return draw


def _entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten())


def _again(x: Tensor) -> Tensor:
    return x


# A mixer: products over tokens and over channels


class Mixer(nn.Module):
    def __init__(self, act: Any = F.gelu, einsum: bool = False, again: bool = False, border: Any = _again) -> None:
        super().__init__()
        self.act, self.einsum, self.again, self.border = act, einsum, again, border
        self.stem = nn.Conv2d(3, 24, 4, 4)
        self.tokens = nn.ParameterList([*(0.3 * torch.randn(2, 16, 16))])
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(24, 48) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(48, 24) for _ in range(2))
        self.head = nn.Linear(24, 5)

    def block(self, x: Tensor, at: int) -> Tensor:
        y, weight = self.norms[2 * at](x), self.tokens[at]
        mixed = torch.einsum("btc,ts->bsc", y, weight) if self.einsum else (y.transpose(1, 2) @ weight).transpose(1, 2)
        x = x + self.border(mixed)
        made: Tensor = x + self.downs[at](self.act(self.ups[at](self.norms[2 * at + 1](x))))
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for at in (0, 1):
            x = checkpoint(self.block, x, at, use_reentrant=False) if self.again else self.block(x, at)
        logits: Tensor = self.head(x.mean(1))
        return logits


mixer = partial(with_choices, {"batch": _numbers(4, 3, 16, 16), "loss": _entropy}, Mixer)


# A small U-Net: group norm, silu, pooling, upsampling


def group_norm(x: Tensor, module: nn.GroupNorm) -> Tensor:
    return F.group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


def group_norm_by_hand(x: Tensor, module: nn.GroupNorm, eps: float = 1e-5) -> Tensor:
    parts = x.unflatten(1, (module.num_groups, -1)).flatten(2)
    mean, variance = parts.mean(-1, keepdim=True), parts.var(-1, keepdim=True, unbiased=False)
    normal = ((parts - mean) / torch.sqrt(variance + eps)).view_as(x)
    return normal * module.weight[:, None, None] + module.bias[:, None, None]


class UNet(nn.Module):
    def __init__(self, norm: Any = group_norm, act: Any = F.silu, last: bool = False, join: Any = None) -> None:
        super().__init__()
        self.norm, self.act, self.last, self.join = norm, act, last, join or (lambda x, y: torch.cat((x, y), 1))
        widths = ((3, 8), (8, 16), (24, 8))
        self.convs = nn.ModuleList(nn.Conv2d(*each, 3, padding=1) for each in widths)
        self.norms = nn.ModuleList(nn.GroupNorm(4, each[1]) for each in widths)
        self.head = nn.Conv2d(8, 5, 1)

    def stage(self, x: Tensor, at: int) -> Tensor:
        made: Tensor = self.act(self.norm(self.convs[at](x), self.norms[at]))
        return made

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            x = x.contiguous(memory_format=torch.channels_last)
        one = self.stage(x, 0)
        two = self.stage(F.max_pool2d(one, 2), 1)
        up = F.interpolate(two, scale_factor=2, mode="nearest")
        logits: Tensor = self.head(self.stage(self.join(one, up), 2))
        return logits.permute(0, 2, 3, 1)


unet = partial(with_choices, {"batch": _numbers(2, 3, 8, 8, target=(2, 8, 8)), "loss": _entropy}, UNet)


# Recurrence: a module of torch against a loop


class Recurrent(nn.Module):
    def __init__(self, loop: bool = False, gate: Any = torch.sigmoid) -> None:
        super().__init__()
        self.loop, self.gate, self.cell = loop, gate, nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 5)

    def run(self, x: Tensor) -> Tensor:
        if not self.loop:
            hidden: Tensor = self.cell(x)[0]
            return hidden
        cell, state, made = self.cell, x.new_zeros(x.shape[0], 12), []
        given = F.linear(x, cell.weight_ih_l0, cell.bias_ih_l0)
        for at in range(x.shape[1]):
            r, z, n = given[:, at].chunk(3, -1)
            hr, hz, hn = F.linear(state, cell.weight_hh_l0, cell.bias_hh_l0).chunk(3, -1)
            r, z = self.gate(r + hr), torch.sigmoid(z + hz)
            state = (1 - z) * torch.tanh(n + r * hn) + z * state
            made.append(state)
        return torch.stack(made, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.run(x).mean(1))
        return logits


recurrent = partial(with_choices, {"batch": _numbers(4, 6, 8), "loss": _entropy}, Recurrent)


# A graph: sums over neighbours by index and by a matrix

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 4, 6], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6, 0, 2]])


class Graph(nn.Module):
    def __init__(self, dense: bool = False, act: Any = F.elu, border: Any = _again) -> None:
        super().__init__()
        self.dense, self.act, self.border = dense, act, border
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def gather(self, x: Tensor) -> Tensor:
        start, end = EDGES.to(x.device)
        if self.dense:
            matrix = torch.zeros(8, 8, device=x.device, dtype=x.dtype)
            matrix.index_put_((end, start), torch.ones_like(start, dtype=x.dtype), accumulate=True)
            return matrix @ x
        return torch.zeros_like(x).index_add(1, end, x.index_select(1, start))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(x + self.act(self.border(self.gather(layer(x)))))
        logits: Tensor = self.head(x.mean(1))
        return logits


graph = partial(with_choices, {"batch": _numbers(4, 8, 8), "loss": _entropy}, Graph)


# A mixture of experts: a loop over tokens of each, and all of them with shares


class Experts(nn.Module):
    def __init__(self, dense: bool = False, act: Any = F.silu, slip: float = 1.0) -> None:
        super().__init__()
        self.dense, self.act, self.slip = dense, act, slip
        self.table, self.gate = nn.Embedding(20, 16), nn.Linear(16, 4, bias=False)
        self.ups = nn.ModuleList(nn.Linear(16, 24) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(24, 16) for _ in range(4))
        self.norm, self.head = nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 20, bias=False)

    def expert(self, x: Tensor, at: int) -> Tensor:
        made: Tensor = self.downs[at](self.act(self.ups[at](x)))
        return made

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).flatten(0, 1)
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        if self.dense:
            full = torch.zeros(x.shape[0], 4, dtype=x.dtype, device=x.device).scatter(1, chosen, shares * self.slip)
            y = torch.stack([self.expert(x, at) for at in range(4)], -1)
            x = x + (y * full[:, None]).sum(-1)
        else:
            made = torch.zeros_like(x)
            for at in range(4):
                token, place = torch.where(chosen == at)
                made.index_add_(0, token, self.expert(x[token], at) * (shares * self.slip)[token, place, None])
            x = x + made
        logits: Tensor = self.head(self.norm(x))
        return logits


def _tokens(high: int, *shape: int) -> Any:
    def draw(g: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(high, shape, generator=g)
        return tokens, tokens.roll(-1, -1)

    return draw


experts = partial(with_choices, {"batch": _tokens(20, 3, 7), "loss": _entropy}, Experts)


# An encoder: nn.MultiheadAttention against heads by hand


class Encoder(nn.Module):
    def __init__(self, by_hand: bool = False, drop: float = 0.0, border: Any = _again, scale: float = 1.0) -> None:
        super().__init__()
        self.by_hand, self.border, self.scale = by_hand, border, scale
        self.table, self.places = nn.Embedding(20, 16), nn.Parameter(0.1 * torch.randn(7, 16))
        self.attention = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*each) for _ in range(2)) for each in ((16, 32), (32, 16)))
        self.drop, self.head = nn.Dropout(drop), nn.Linear(16, 20)

    def attend(self, x: Tensor, at: int) -> Tensor:
        layer = self.attention[at]
        if not self.by_hand:
            made: Tensor = layer(x, x, x, need_weights=False)[0]
            return made
        q, k, v = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = torch.softmax(self.scale * q @ k.mT / math.sqrt(8), -1) @ v
        return F.linear(y.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.table(tokens) + self.places)
        for at in (0, 1):
            x = self.norms[2 * at](x + self.border(self.attend(x, at)))
            x = self.norms[2 * at + 1](x + self.drop(self.downs[at](F.relu(self.ups[at](x)))))
        logits: Tensor = self.head(x)
        return logits


encoder = partial(with_choices, {"batch": _tokens(20, 3, 7), "loss": _entropy}, Encoder)


# A state space: a scan in a loop, and all at once


class Scan(nn.Module):
    def __init__(self, at_once: bool = False, rate: float = 1.0) -> None:
        super().__init__()
        self.at_once, self.rate = at_once, rate
        self.up, self.down, self.decay = nn.Linear(8, 24), nn.Linear(12, 8), nn.Parameter(torch.randn(12))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def scan(self, x: Tensor) -> Tensor:
        keep = torch.sigmoid(self.decay) * self.rate
        if self.at_once:
            times = torch.arange(x.shape[1], device=x.device)
            powers = keep ** (times[:, None] - times).clamp(min=0)[..., None]
            return torch.einsum("tsc,bsc->btc", powers * (times[:, None] >= times)[..., None], x)
        state, made = torch.zeros_like(x[:, 0]), []
        for each in x.unbind(1):
            state = keep * state + each
            made.append(state)
        return torch.stack(made, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.up(self.norm(x)).chunk(2, -1)
        logits: Tensor = self.head((x + self.down(self.scan(y) * F.silu(gate))).mean(1))
        return logits


scan = partial(with_choices, {"batch": _numbers(4, 6, 8), "loss": _entropy}, Scan)


# Models of transformers, with both kinds of attention


def hugging(kind: str, attention: str, again: bool = False, **options: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "attn_implementation": attention,
    }  # fmt: skip
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    causal = {"use_cache": False, "num_key_value_heads": 1}
    kinds: dict[str, tuple[Any, Any, Choices]] = {
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, causal),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, causal),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, causal),
        "roberta": (transformers.RobertaConfig, transformers.RobertaForMaskedLM, quiet),
        "electra": (transformers.ElectraConfig, transformers.ElectraForMaskedLM, {**quiet, "embedding_size": 16}),
    }
    config, model, more = kinds[kind]
    made: nn.Module = model(config(**sizes, **more, **options))
    if again:
        made.gradient_checkpointing_enable()
    return made.train()


HUGGING: Choices = {"batch": _tokens(24, 2, 9), "loss": lambda out, target: _entropy(out.logits, target)}


def hf(kind: str, attention: str, **choices: Any) -> Choices:
    return with_choices(HUGGING, partial(hugging, kind, attention), **choices)


def compiled(backend: str) -> Any:
    return lambda model: torch.compile(model, backend=backend)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


EVEN = {"batch": _tokens(20, 4, 7)}
"""A batch that two processes can share: the mean over both is that of the whole."""
TWO = {"ranks": 2, "wrap": ddp}

PROGRAMS: dict[str, tuple[Choices, Choices]] = {
    "mixer by einsum": (mixer(optimizer=LOOP), mixer(einsum=True, optimizer=LISTS)),
    "mixer, checkpointing, fused AdamW": (mixer(optimizer=LOOP), mixer(again=True, optimizer=FUSED)),
    "mixer, aot_eager": (mixer(), mixer(wrap=compiled("aot_eager"))),
    "U-Net, group norm by hand": (unet(), unet(norm=group_norm_by_hand, optimizer=sgd(foreach=True))),
    "U-Net, channels last": (unet(optimizer=LOOP), unet(last=True, optimizer=LOOP)),
    "U-Net, silu in place": (unet(), unet(act=partial(F.silu, inplace=True))),
    "GRU in a loop": (recurrent(), recurrent(loop=True)),
    "graph by a matrix": (graph(optimizer=LOOP), graph(dense=True, optimizer=FUSED)),
    "graph, elu in place": (graph(), graph(act=partial(F.elu, inplace=True))),
    "graph, compiled": (graph(), graph(wrap=compiled("eager"))),
    "experts at once": (experts(), experts(dense=True)),
    "experts, RMSprop on lists": (
        experts(optimizer=kind_of(torch.optim.RMSprop, foreach=False)),
        experts(optimizer=kind_of(torch.optim.RMSprop, foreach=True)),
    ),
    "encoder by hand": (encoder(), encoder(by_hand=True)),
    "encoder by hand, fused AdamW": (encoder(optimizer=LOOP), encoder(by_hand=True, optimizer=FUSED)),
    "encoder, dropout": (encoder(drop=0.1), encoder(drop=0.1, by_hand=True)),
    "scan at once": (scan(optimizer=LOOP), scan(at_once=True, optimizer=LISTS)),
    "Mistral, sdpa": (hf("mistral", "eager", optimizer=LOOP), hf("mistral", "sdpa", optimizer=FUSED)),
    "Qwen2, sdpa, checkpointing": (hf("qwen2", "eager"), hf("qwen2", "sdpa", again=True)),
    "Olmo2, sdpa": (hf("olmo2", "eager"), hf("olmo2", "sdpa")),
    "Roberta, sdpa": (hf("roberta", "eager", optimizer=LOOP), hf("roberta", "sdpa", optimizer=LISTS)),
    "Electra, sdpa": (hf("electra", "eager"), hf("electra", "sdpa")),
}
"""Healthy pairs of different programs, measured at every level and in both dtypes."""
DEVICES: dict[str, Choices] = {
    "mixer": mixer(optimizer=adamw()),
    "U-Net": unet(optimizer=adamw()),
    "GRU": recurrent(loop=True, optimizer=adamw()),
    "graph": graph(optimizer=adamw()),
    "experts": experts(optimizer=adamw()),
    "encoder": encoder(optimizer=adamw()),
    "scan": scan(optimizer=adamw()),
    "Mistral": hf("mistral", "sdpa", optimizer=adamw()),
    "Qwen2": hf("qwen2", "sdpa", optimizer=adamw()),
    "Olmo2": hf("olmo2", "sdpa", optimizer=adamw()),
    "Roberta": hf("roberta", "sdpa", optimizer=adamw()),
    "Electra": hf("electra", "eager", optimizer=adamw()),
}
"""One program on two devices, measured at every level and in both dtypes."""
LEVELS: dict[str, Choices] = {
    "api": {},
    "mix": {"level": "mix"},
    "module": {"level": "module"},
    "aten": {"level": "aten"},
    "summary": {"mode": "summary"},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _everywhere(name: str, ours: Choices, theirs: Choices) -> list[Pair]:
    return [
        Pair(f"{name} {dtype} {level}", ours | more, theirs | more)
        for dtype, kind in DTYPES.items()
        for level, settings in LEVELS.items()
        for more in [{"settings": settings, "dtype": kind}]
    ]


LONG: Choices = {"steps": 38}
HEALTHY = [
    *(pair for name, both in PROGRAMS.items() for pair in _everywhere(name, *both)),
    *(
        pair
        for where in ("threads", "second", "npu")
        for name, program in DEVICES.items()
        for pair in _everywhere(f"{name} on {where}", program, program | {"device": where})
    ),
    Pair("DDP against one process", encoder(**EVEN), encoder(**EVEN, **TWO)),
    Pair("DDP against one process, mixer", mixer(optimizer=LOOP), mixer(**TWO, optimizer=LOOP)),
    Pair(
        "DDP against one process, module",
        mixer() | {"settings": LEVELS["module"]},
        mixer(**TWO) | {"settings": LEVELS["module"]},
    ),
    *(
        Pair(f"38 steps, {name} on {where} {level}", program | more, program | more | {"device": where})
        for name, program in (("scan", scan(optimizer=adamw())), ("graph", graph(optimizer=sgd(momentum=0.9))))
        for where in ("second", "npu")
        for level in ("api", "summary", "module")
        for more in [LONG | {"settings": LEVELS[level]}]
    ),
]


def _late(function: Any, step: int, steps: int) -> Any:
    """Return the function, wrong in one step: its calls are counted."""
    count = [0]

    def sometimes(x: Tensor) -> Tensor:
        count[0] += 1
        made: Tensor = function(x)
        return made * 1.02 if (count[0] - 1) // steps == step else made

    return sometimes


def _clipped(x: Tensor) -> Tensor:
    return x.clamp(-0.5, 0.5)


def _fault(name: str, ours: Choices, theirs: Choices, *guilty: str, **more: Any) -> Pair:
    return Pair(name, ours, theirs, guilty, **more)


def _raised(model: nn.Module, step: int) -> None:
    """Make a gradient 5 % too large in step 30, with a call that the other program does not make."""
    gradient = dict(model.named_parameters())["down.weight"].grad
    if step == 30 and gradient is not None:
        gradient.mul_(1.05)


rmsprop = partial(kind_of, torch.optim.RMSprop)
THETA = {"rope_type": "default", "rope_theta": 9000.0}
MOMENTUM = {"optimizer": sgd(momentum=0.9), "steps": 32}
LATE = {"steps": 32, "device": "second", "before_step": _raised}
MIX = {"settings": LEVELS["mix"]}
SUMMARY = {"settings": LEVELS["summary"]}
FAULTS = [
    _fault("mixer by einsum, border", mixer(), mixer(einsum=True, border=off(_again)), "mul", "einsum", "transpose"),
    _fault(
        "mixer by einsum, gradient at the border",
        mixer(),
        mixer(einsum=True, border=wrong_gradient),
        "einsum",
        "transpose",
        "add",
    ),
    _fault("mixer, checkpointing, activation", mixer(), mixer(again=True, act=off(F.gelu)), "mul", "gelu"),
    _fault("mixer by einsum, behind", mixer(), mixer(einsum=True, act=partial(F.gelu, approximate="tanh")), "gelu"),
    _fault(
        "mixer by einsum, behind, mix",
        mixer() | MIX,
        mixer(einsum=True, act=partial(F.gelu, approximate="tanh")) | MIX,
        "gelu",
    ),
    _fault("group norm by hand, eps", unet(), unet(norm=partial(group_norm_by_hand, eps=1e-3)), "group_norm"),
    _fault("group norm by hand, backward", unet(), unet(norm=backwards_off(group_norm_by_hand)), "group_norm"),
    _fault("group norm by hand, behind", unet(), unet(norm=group_norm_by_hand, act=F.gelu), "silu", "gelu"),
    _fault(
        "U-Net, order of the join",
        unet(),
        unet(norm=group_norm_by_hand, join=lambda x, y: torch.cat((x, y * 1.01), 1)),
        "cat",
        "mul",
    ),
    _fault("channels last, activation", unet(), unet(last=True, act=off(F.silu)), "mul", "silu"),
    _fault(
        "GRU in a loop, gate",
        recurrent(),
        recurrent(loop=True, gate=lambda x: torch.sigmoid(1.02 * x)),
        "gru",
        "sigmoid",
    ),
    _fault(
        "GRU in a loop, gradient of a gate",
        recurrent(),
        recurrent(loop=True, gate=backwards_off(torch.sigmoid, 1.05)),
        "gru",
        "sigmoid",
    ),
    _fault("graph by a matrix, border", graph(), graph(dense=True, border=off(_again)), "mul", "matmul", "index_add"),
    _fault("graph by a matrix, behind", graph(), graph(dense=True, act=F.selu), "elu"),
    _fault("graph by a matrix, clipped", graph(), graph(dense=True, border=_clipped), "clamp", "matmul", "index_add"),
    _fault("experts at once, shares", experts(), experts(dense=True, slip=1.01), "scatter", "mul", "index_add", "sum"),
    _fault(
        "experts at once, activation", experts(), experts(dense=True, act=F.gelu), "gelu", "silu", "linear", "stack"
    ),
    _fault(
        "RMSprop on lists, alpha",
        experts(optimizer=rmsprop(foreach=False)),
        experts(optimizer=rmsprop(foreach=True, alpha=0.98)),
        "addcmul",
        "addcdiv",
        "mul",
    ),
    _fault(
        "encoder by hand, scale",
        encoder(),
        encoder(by_hand=True, scale=1.02),
        "multi_head_attention_forward",
        "softmax",
        "matmul",
    ),
    _fault(
        "encoder by hand, border",
        encoder(),
        encoder(by_hand=True, border=off(_again)),
        "mul",
        "multi_head_attention_forward",
        "linear",
    ),
    _fault(
        "encoder by hand, gradient at the border",
        encoder(),
        encoder(by_hand=True, border=wrong_gradient),
        "linear",
        "multi_head_attention_forward",
        "add",
    ),
    _fault(
        "encoder, dropout, behind",
        encoder(drop=0.1),
        encoder(drop=0.1, by_hand=True, border=lambda x: x * 1.02),
        "mul",
        "linear",
    ),
    _fault("scan at once, rate", scan(), scan(at_once=True, rate=0.999), "einsum", "pow", "mul", "sigmoid"),
    _fault(
        "scan at once, AdamW eps",
        scan(optimizer=LOOP),
        scan(at_once=True, optimizer=adamw(fused=True, eps=1e-4)),
        "lerp_",
        "fused",
    ),
    _fault("Mistral, sdpa, eps", hf("mistral", "eager"), hf("mistral", "sdpa", rms_norm_eps=1e-3), "add", "rsqrt"),
    _fault(
        "Qwen2, sdpa, theta",
        hf("qwen2", "eager"),
        hf("qwen2", "sdpa", rope_parameters=THETA),
        "inv_freq",
        "matmul",
        "rotary",
    ),
    _fault(
        "Roberta, sdpa, activation",
        hf("roberta", "eager"),
        hf("roberta", "sdpa", hidden_act="gelu_new"),
        "gelu",
        "tanh",
        "pow",
        "mul",
    ),
    _fault(
        "Electra, sdpa, rate",
        hf("electra", "eager", optimizer=LOOP),
        hf("electra", "sdpa", optimizer=adamw(lr=1.02e-3, fused=True)),
        "lerp_",
        "fused",
    ),
    _fault(
        "graph, step 30",
        graph(**MOMENTUM),
        graph(dense=True, **MOMENTUM, border=_late(_again, 30, 3)),
        "mul",
        "matmul",
        "index_add",
        step=30,
    ),
    _fault(
        "scan on the second device, step 30",
        scan(optimizer=adamw(foreach=False), steps=32),
        scan(optimizer=adamw(foreach=False), **LATE),
        "mul_",
        "down.weight",
        step=30,
    ),
    _fault(
        "scan on the second device, step 30, summary",
        scan(optimizer=sgd(), steps=32) | SUMMARY,
        scan(optimizer=sgd(), **LATE) | SUMMARY,
        "mul_",
        "down.weight",
        step=30,
    ),
]

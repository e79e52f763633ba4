# CLOSED: held out. Whoever changes how runs are compared or judged does not read this file.
"""Families of the closed part: small models with a real optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heldout.training import Entry, Setup, Training


class Accumulating(Training):
    """Four small batches, then one update with clipped gradients."""

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for part in range(4):
            with self.setup.autocast():
                value = self.loss(part) / 4
            value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.update()


def accumulate(setup: Setup) -> Training:
    body = [nn.Linear(9, 32), nn.SELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.SELU(), nn.Linear(32, 4)]
    model = setup.place(nn.Sequential(*body))
    x, classes = setup.randn(4, 6, 9), setup.ids(4, 4, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    return Accumulating(setup, model, lambda part: F.cross_entropy(model(x[part]).float(), classes[part]), optimizer)


class Painter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 16, 3, padding=1)
        self.norm = nn.InstanceNorm2d(16, affine=True)
        self.grow = nn.ConvTranspose2d(16, 12, 3, stride=2, padding=1, output_padding=1)
        self.slope = nn.PReLU(12)
        self.last = nn.Conv2d(12, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        held = self.slope(self.grow(F.leaky_relu(self.norm(self.first(x)), 0.1)))
        return F.pixel_shuffle(self.last(held), 2)


def deconv(setup: Setup) -> Training:
    """An image made larger: transposed convolution, pixel shuffle, and differences of neighbours."""
    model = setup.place(Painter())
    x, y = setup.randn(3, 2, 7, 7), setup.randn(3, 2, 28, 28)

    def loss(_: int) -> Tensor:
        image = model(x)
        rough = image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()
        return torch.sqrt((image - y).square() + 1e-3).mean() + 0.1 * rough

    return Training(setup, model, loss, torch.optim.RAdam(model.parameters(), lr=4e-3))


class FakeQuantized(nn.Module):
    """Weights and activations on a grid of eight bits; the gradient passes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 12, 3, bias=False), nn.Linear(12, 4)
        self.register_buffer("widest", torch.tensor(4.0))

    @staticmethod
    def grid(x: Tensor, widest: Tensor) -> Tensor:
        step = widest / 127
        return x + ((x / step).round().clamp(-127, 127) * step - x).detach()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.widest.mul_(0.9).add_(x.abs().amax(), alpha=0.1)
        held = F.conv2d(self.grid(x, self.widest), self.grid(self.one.weight, self.one.weight.detach().abs().amax()))
        held = F.adaptive_avg_pool2d(F.relu6(held), 1).flatten(1)
        return F.linear(held, self.grid(self.two.weight, self.two.weight.detach().abs().amax()), self.two.bias)


def fakequant(setup: Setup) -> Training:
    model = setup.place(FakeQuantized())
    x, classes = setup.randn(6, 3, 10, 10), setup.ids(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(setup, model, lambda _: F.multi_margin_loss(model(x), classes), optimizer)


class GraphAttention(nn.Module):
    """Messages along edges, weighted by a softmax over the edges that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.send = nn.Linear(8, 16, bias=False)
        self.of_source, self.of_target = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(2, 8))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        held = self.send(x).view(-1, 2, 8)
        score = (held * self.of_source).sum(-1)[source] + (held * self.of_target).sum(-1)[target]
        score = F.leaky_relu(score, 0.2)
        index = target[:, None].expand_as(score)
        top = score.new_full((x.shape[0], 2), -1e4).scatter_reduce(0, index, score, "amax")
        weight = (score - top[target]).exp()
        total = torch.zeros_like(top).scatter_add(0, index, weight)
        weight = weight / (total[target] + 1e-9)
        out = held.new_zeros(held.shape).index_add(0, target, (weight[..., None] * held[source]).to(held.dtype))
        return self.head(F.elu(out.flatten(1)))


def gat(setup: Setup) -> Training:
    model = setup.place(GraphAttention())
    x, edges, classes = setup.randn(20, 8), setup.ids(20, 2, 70), setup.ids(3, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    return Training(setup, model, lambda _: F.cross_entropy(model(x, edges), classes), optimizer)


class SpatialGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate_norm = nn.LayerNorm(16), nn.LayerNorm(24)
        self.enter, self.leave = nn.Linear(16, 48), nn.Linear(24, 16)
        self.mix = nn.Conv1d(10, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.gelu(self.enter(self.norm(x))).chunk(2, -1)
        return x + self.leave(one * (self.mix(self.gate_norm(other)) + 1))


def gmlp(setup: Setup) -> Training:
    model = setup.place(nn.Sequential(SpatialGate(), SpatialGate(), nn.Flatten(), nn.Linear(160, 7)))
    x, classes = setup.randn(5, 10, 16), setup.ids(7, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, amsgrad=True)
    return Training(setup, model, lambda _: F.cross_entropy(model(x).float(), classes), optimizer)


class Scaled(Training):
    """Float16 autocast with a scaled loss."""

    scaler: torch.amp.GradScaler

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        with self.setup.autocast():
            value = self.loss(number)
        self.scaler.scale(value).backward()
        for each in self.after_backward:
            each()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for each in self.after_step:
            each()


def halfscaler(setup: Setup) -> Training:
    body = [nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 48), nn.Sigmoid(), nn.LayerNorm(48), nn.Linear(48, 6)]
    model = setup.place(nn.Sequential(*body))
    x, y = setup.randn(12, 14), setup.randn(12, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = Scaled(setup, model, lambda _: F.l1_loss(model(x).float(), y), optimizer)
    training.scaler = torch.amp.GradScaler(setup.device, init_scale=1024.0)
    return training


class Mobile(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12)
        self.deep, self.deep_norm = nn.Conv2d(12, 12, 5, 1, 2, groups=12, bias=False), nn.BatchNorm2d(12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.head = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        held = F.hardswish(self.norm(self.stem(x)))
        deep = F.relu6(self.deep_norm(self.deep(held)))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(deep, 1)))))
        return self.head((held + deep * gate).mean((2, 3)))


def mobile(setup: Setup) -> Training:
    model = setup.place(Mobile())
    x, classes = setup.randn(6, 3, 16, 16), setup.ids(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return Training(setup, model, lambda _: F.cross_entropy(model(x), classes), optimizer)


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.action, self.value = nn.Linear(24, 4), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = self.body(x)
        return self.action(held), self.value(held).squeeze(1)


def policy(setup: Setup) -> Training:
    """A clipped policy gradient with an entropy bonus, and clipped gradients."""
    model = setup.place(Actor())
    seen, taken, gain, before = setup.randn(20, 7), setup.ids(4, 20), setup.randn(20), setup.randn(20) * 0.1 - 1.4

    def loss(_: int) -> Tensor:
        logits, value = model(seen)
        chances = logits.log_softmax(-1)
        ratio = (chances.gather(1, taken[:, None]).squeeze(1) - before).exp()
        better = (gain - value).detach()
        better = (better - better.mean()) / (better.std() + 1e-8)
        chosen = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
        return -chosen + 0.5 * F.mse_loss(value, gain) + 0.01 * (chances.exp() * chances).sum(-1).mean()

    training = Training(setup, model, loss, torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5))
    training.after_backward.append(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5) and None)
    return training


def simclr(setup: Setup) -> Training:
    """Two views of each image must be nearest to each other."""
    body = [nn.Conv2d(3, 12, 3, 2), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = setup.place(nn.Sequential(*body, nn.Linear(48, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10)))
    one, other = setup.randn(7, 3, 9, 9), setup.randn(7, 3, 9, 9)

    def loss(_: int) -> Tensor:
        found = F.normalize(model(torch.cat([one, other])), dim=1)
        near = (found @ found.T / 0.2).float()
        near = near - torch.diag_embed(near.new_full((14,), 1e9))
        partner = torch.arange(14, device=near.device).roll(7)
        return F.cross_entropy(near, partner)

    return Training(setup, model, loss, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))


class SoftMixture(nn.Module):
    """Every expert sees a weighted mean of all tokens, and every token one of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(16, 3, 2) * 0.3)
        self.wide = nn.Parameter(torch.randn(3, 16, 32) * 0.2)
        self.thin = nn.Parameter(torch.randn(3, 32, 16) * 0.2)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        held = self.norm(x)
        logits = torch.einsum("btd,des->btes", held, self.slots)
        send = logits.softmax(1)
        collect = logits.flatten(2).softmax(-1).view_as(logits)
        given = torch.einsum("btd,btes->besd", held, send)
        made = torch.baddbmm(given.new_zeros(()), given.transpose(0, 1).flatten(1, 2), self.wide)
        made = torch.bmm(F.gelu(made), self.thin).unflatten(1, (x.shape[0], 2)).transpose(0, 1)
        return x + torch.einsum("besd,btes->btd", made, collect)


def softmoe(setup: Setup) -> Training:
    model = setup.place(nn.Sequential(SoftMixture(), SoftMixture(), nn.Linear(16, 5)))
    x, y = setup.randn(4, 8, 16), setup.randn(4, 8, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Training(setup, model, lambda _: F.mse_loss(model(x).float(), y.float()), optimizer)


def triplet(setup: Setup) -> Training:
    """The hardest positive and the hardest negative of each image, found by distance."""
    model = setup.place(nn.Sequential(nn.Linear(20, 40), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(40, 12)))
    x, kind = setup.randn(12, 20), torch.arange(12).to(setup.device) % 4

    def loss(_: int) -> Tensor:
        found = F.normalize(model(x), dim=1)
        apart = torch.cdist(found, found)
        same = kind[:, None] == kind
        far = apart.masked_fill(~same, -1).argmax(1)
        near = apart.masked_fill(same, 10).argmin(1)
        return F.triplet_margin_loss(found, found[far], found[near], margin=0.3)

    return Training(setup, model, loss, torch.optim.Adadelta(model.parameters(), lr=1.0))


class Level(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.GroupNorm(4, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.two(F.silu(self.one(x)))))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = Level(3, 16), Level(16, 24), Level(24, 32)
        self.up1, self.up2 = nn.ConvTranspose2d(32, 24, 2, 2), nn.Conv2d(24, 16, 1)
        self.back1, self.back2, self.head = Level(48, 24), Level(32, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        middle = self.middle(F.max_pool2d(top, 2))
        held = self.up1(self.bottom(F.avg_pool2d(middle, 2)))
        held = self.back1(torch.cat([middle, held], 1))
        held = self.up2(F.interpolate(held, scale_factor=2, mode="bilinear", align_corners=False))
        return self.head(self.back2(torch.cat([top, held], 1)))


def unet(setup: Setup) -> Training:
    model = setup.place(UNet())
    x, classes = setup.randn(2, 3, 16, 16), setup.ids(4, 2, 16, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Training(setup, model, lambda _: F.cross_entropy(model(x).float(), classes), optimizer)


FAMILIES: dict[str, Entry] = {
    "accumulate": Entry(accumulate, "fp32 bf16"),
    "deconv": Entry(deconv, "fp32 autocast"),
    "fakequant": Entry(fakequant),
    "gat": Entry(gat),
    "gmlp": Entry(gmlp, "fp32 autocast"),
    "halfscaler": Entry(halfscaler, "half-autocast"),
    "mobile": Entry(mobile, "fp32 autocast"),
    "policy": Entry(policy),
    "simclr": Entry(simclr),
    "softmoe": Entry(softmoe, "fp32 autocast"),
    "triplet": Entry(triplet),
    "unet": Entry(unet, "fp32 autocast"),
}

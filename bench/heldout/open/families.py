"""Families of the open part: small models with a real optimizer. They may be read and used for tuning."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heldout.training import Entry, Setup, Training


class Capsules(nn.Module):
    """Capsules with three rounds of routing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 5, stride=2)
        self.votes = nn.Parameter(torch.randn(4, 36, 8, 4) * 0.2)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        size = x.square().sum(-1, keepdim=True)
        return size / (1 + size) * x / (size + 1e-6).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        held = F.relu(self.first(x)).view(x.shape[0], 8, -1).transpose(1, 2)
        votes = torch.einsum("bni,cnio->bcno", self.squash(held)[:, :36], self.votes)
        logits = torch.zeros_like(votes[..., :1])
        for _ in range(3):
            found = self.squash((logits.softmax(1) * votes).sum(2, keepdim=True))
            logits = logits + (votes * found).sum(-1, keepdim=True)
        return found.squeeze(2).norm(dim=-1)


def capsule(setup: Setup) -> Training:
    model = setup.place(Capsules())
    x, wanted = setup.randn(4, 1, 16, 16), setup.place(torch.eye(4))

    def loss(_: int) -> Tensor:
        sizes = model(x)
        return (wanted * F.relu(0.9 - sizes) ** 2 + 0.5 * (1 - wanted) * F.relu(sizes - 0.1) ** 2).sum(1).mean()

    return Training(setup, model, loss, torch.optim.Adam(model.parameters(), lr=3e-3))


class ConvVAE(nn.Module):
    """Convolutions down, a bottleneck with fixed noise, transposed convolutions up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ELU(), nn.Flatten())
        self.mean, self.spread = nn.Linear(256, 12), nn.Linear(256, 12)
        self.up = nn.Linear(12, 256)
        self.paint = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ELU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        held = self.down(x)
        mean, spread = self.mean(held), F.softplus(self.spread(held)) + 1e-3
        code = torch.addcmul(mean, spread, noise)
        lost = (mean.square() + spread.square() - 1 - 2 * spread.log()).sum(1) / 2
        return self.paint(F.elu(self.up(code)).unflatten(1, (16, 4, 4))), lost


def convvae(setup: Setup) -> Training:
    model = setup.place(ConvVAE())
    x, noise = setup.rand(4, 3, 16, 16), setup.randn(4, 12)

    def loss(_: int) -> Tensor:
        image, lost = model(x, noise)
        return F.binary_cross_entropy_with_logits(image, x) + 1e-2 * lost.mean()

    return Training(setup, model, loss, torch.optim.AdamW(model.parameters(), lr=2e-3))


class ClickRate(nn.Module):
    """Embedding bags, dense features, and their dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(40, 8, mode=mode) for mode in ("sum", "mean", "sum"))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        below = self.bottom(dense)
        parts = torch.stack([below, *(bag(ids) for bag, ids in zip(self.bags, sparse, strict=True))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1, device=dense.device)
        return self.top(torch.cat([below, products[:, rows, columns]], 1)).squeeze(1)


def dlrm(setup: Setup) -> Training:
    model = setup.place(ClickRate())
    dense, sparse, clicks = setup.randn(16, 5), setup.ids(40, 3, 16, 4), setup.rand(16).round()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=5e-2)
    return Training(setup, model, lambda _: F.binary_cross_entropy_with_logits(model(dense, sparse), clicks), optimizer)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 10), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(10, 24), nn.LeakyReLU(0.2), nn.LayerNorm(24), nn.Linear(24, 1))


class TwoOptimizers(Training):
    """One step of the critic, one of the generator."""

    def step(self, number: int) -> None:
        model, (real, noise) = self.model, self.data
        with self.setup.autocast():
            made = model.generator(noise)
            scores = model.critic(real), model.critic(made.detach())
            lost = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        self.second.zero_grad()
        lost.backward()
        self.second.step()
        self.optimizer.zero_grad()
        with self.setup.autocast():
            lost = F.softplus(-model.critic(made)).mean()
        lost.backward()
        self.update()

    data: tuple[Tensor, Tensor]
    second: torch.optim.Optimizer


def gan(setup: Setup) -> Training:
    model = setup.place(Adversaries())
    optimizers = [torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.9)) for part in model.children()]
    training = TwoOptimizers(setup, model, lambda _: torch.zeros(()), optimizers[0])
    training.second, training.data = optimizers[1], (setup.randn(12, 10), setup.randn(12, 6))
    return training


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank change."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 4, bias=False), nn.Linear(4, size, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.drop(x)))


def lora(setup: Setup) -> Training:
    body = [Adapted(24), nn.GELU("tanh"), nn.RMSNorm(24), Adapted(24), nn.GELU("tanh"), Adapted(24)]
    model = setup.place(nn.Sequential(*body))
    x, y = setup.randn(10, 24), setup.randn(10, 24)
    trained = [each for each in model.parameters() if each.requires_grad]
    return Training(setup, model, lambda _: F.mse_loss(model(x), y), torch.optim.AdamW(trained, lr=5e-3))


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 20), nn.Linear(20, 6)

    def forward(self, time: float, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(torch.cat([x, torch.full_like(x[:, :1], time)], 1))))


def ode(setup: Setup) -> Training:
    """A neural differential equation, integrated by the classic method of four stages."""
    model = setup.place(Field())
    x, y = setup.randn(9, 6), setup.randn(9, 6)

    def loss(_: int) -> Tensor:
        state, width = x, 0.25
        for at in range(4):
            time = at * width
            one = model(time, state)
            two = model(time + width / 2, state + width / 2 * one)
            three = model(time + width / 2, state + width / 2 * two)
            four = model(time + width, state + width * three)
            state = state + width / 6 * (one + 2 * two + 2 * three + four)
        return (state - y).abs().mean()

    return Training(setup, model, loss, torch.optim.NAdam(model.parameters(), lr=4e-3))


def penalty(setup: Setup) -> Training:
    """A critic with a penalty on its gradient: a backward through a backward."""
    model = setup.place(
        nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))
    )
    real, made = setup.randn(12, 8), setup.randn(12, 8)

    def loss(_: int) -> Tensor:
        middle = (0.3 * real + 0.7 * made).requires_grad_()
        (slope,) = torch.autograd.grad(model(middle).sum(), middle, create_graph=True)
        return model(made).mean() - model(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    return Training(setup, model, loss, torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.9)))


class Points(nn.Module):
    """The same small network for each point, then the maximum over all."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.each(x).max(2).values)))


def pointnet(setup: Setup) -> Training:
    model = setup.place(Points())
    x, classes = setup.randn(8, 3, 20), setup.ids(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return Training(setup, model, lambda _: F.cross_entropy(model(x), classes), optimizer)


def sparsemax_of(x: Tensor) -> Tensor:
    """The projection onto the simplex, by sorting."""
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    total = ordered.cumsum(-1)
    size = (1 + count * ordered > total).sum(-1, keepdim=True)
    threshold = (total.gather(-1, size - 1) - 1) / size.to(x.dtype)
    return F.relu(x - threshold)


class SparseSteps(nn.Module):
    """Steps that choose features with a sparse mask."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.use = nn.Linear(12, 16), nn.Linear(16, 24)
        self.norm, self.head = nn.BatchNorm1d(16, momentum=0.3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        prior, held, total = torch.ones_like(x), x[:, :12], 0
        for _ in range(2):
            mask = sparsemax_of(self.norm(self.choose(held)) * prior)
            prior = prior * (1.3 - mask)
            held = F.glu(self.use(mask * x))
            total = total + held
        return self.head(total)


def sparsemax(setup: Setup) -> Training:
    model = setup.place(SparseSteps())
    x, classes = setup.randn(20, 16), setup.ids(3, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
    return Training(setup, model, lambda _: F.nll_loss(F.log_softmax(model(x), 1), classes), optimizer)


class Switch(nn.Module):
    """Each token goes to one expert; what experts give is put back by position."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 12)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chance = F.softmax(self.gate(x).float(), -1)
        best, which = chance.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, (expert(x[rows]) * best[rows, None]).to(out.dtype))
        balance = 3 * (chance.mean(0) * F.one_hot(which, 3).float().mean(0)).sum()
        return out, balance


def switchmoe(setup: Setup) -> Training:
    model = setup.place(Switch())
    x, y = setup.randn(30, 12), setup.randn(30, 12)

    def loss(_: int) -> Tensor:
        out, balance = model(x)
        return F.mse_loss(out.float(), y.float()) + 0.01 * balance

    return Training(setup, model, loss, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1))


class WithTeacher(Training):
    """After each step the teacher moves a little towards the student."""

    teacher: nn.Module

    def step(self, number: int) -> None:
        super().step(number)
        with torch.no_grad():
            for mean, new in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(new, 0.1)


def teacher(setup: Setup) -> Training:
    model = setup.place(nn.Sequential(nn.Linear(10, 20), nn.Mish(), nn.GroupNorm(4, 20), nn.Linear(20, 4)))
    older = copy.deepcopy(model).requires_grad_(False)
    x, noisy, classes = setup.randn(16, 10), setup.randn(16, 10), setup.ids(4, 16)

    def loss(_: int) -> Tensor:
        with torch.no_grad():
            wanted = older(x).softmax(1)
        distance = F.kl_div(model(x + 0.1 * noisy).log_softmax(1), wanted, reduction="batchmean")
        return F.cross_entropy(model(x), classes) + distance

    training = WithTeacher(setup, model, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True))
    training.teacher = older
    return training


class Windows(nn.Module):
    """Attention inside shifted windows of an image, with relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 16, 2, 2), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(49, 2) * 0.1)
        rows = torch.arange(16)
        down, right = rows[:, None] // 4 - rows // 4 + 3, rows[:, None] % 4 - rows % 4 + 3
        self.register_buffer("places", down * 7 + right)
        self.head = nn.Linear(16, 5)

    def attend(self, x: Tensor, shift: int) -> Tensor:
        batch = x.shape[0]
        held = torch.roll(self.norm(x), (-shift, -shift), (1, 2))
        held = held.view(batch, 2, 4, 2, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 16)
        q, k, v = self.qkv(held).view(-1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = (q * 8**-0.5) @ k.transpose(-2, -1) + self.table[self.places].permute(2, 0, 1)
        held = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, 16))
        held = held.view(batch, 2, 2, 4, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(batch, 8, 8, 16)
        return x + torch.roll(held, (shift, shift), (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        held = self.patch(x).permute(0, 2, 3, 1)
        return self.head(self.attend(self.attend(held, 0), 2).mean((1, 2)))


def window(setup: Setup) -> Training:
    model = setup.place(Windows())
    x, classes = setup.randn(3, 3, 16, 16), setup.ids(5, 3)
    return Training(setup, model, lambda _: F.cross_entropy(model(x), classes), torch.optim.AdamW(model.parameters()))


FAMILIES: dict[str, Entry] = {
    "capsule": Entry(capsule),
    "convvae": Entry(convvae, "fp32 autocast"),
    "dlrm": Entry(dlrm),
    "gan": Entry(gan, "fp32 bf16"),
    "lora": Entry(lora, "bf16 fp32"),
    "ode": Entry(ode),
    "penalty": Entry(penalty),
    "pointnet": Entry(pointnet, "fp32 autocast"),
    "sparsemax": Entry(sparsemax),
    "switchmoe": Entry(switchmoe, "fp32 autocast"),
    "teacher": Entry(teacher, "fp32 fp16"),
    "window": Entry(window, "fp32 autocast"),
}

"""The reader's own program: two small nets and their training. It knows nothing of any tool; tests copy it beside a script.

Both nets make each call that the guide's examples name: a second `permute`, a third and fourth `transpose`, a second `abs`
before the fourth `transpose`, a fourth `relu`, a second `conv2d`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kept = dict[str, Tensor]
WORDS = 11


class ConvNet(nn.Module):
    """Two convolutions, then an LSTM over the places of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.rows = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, WORDS)

    def forward(self, images: Tensor, kept: Kept) -> Tensor:
        x = images.permute(0, 3, 1, 2)
        x = torch.relu(self.norm1(self.conv1(x)))
        x = kept["Functional_conv2d_1"] = self.conv2(x)
        x = torch.relu(self.norm2(x))
        x = x.permute(0, 2, 3, 1).flatten(1, 2)
        x = x * torch.sigmoid(x.to(torch.bfloat16)).float()
        x = x.transpose(1, 2).abs().transpose(1, 2)
        x = torch.relu(x - 0.01)
        x, _ = self.rows(x, (x.new_zeros(1, len(x), 4), x.new_zeros(1, len(x), 4)))
        x = kept["Tensor_transpose_2"] = x.abs().transpose(1, 2)
        x = x.mul(2).transpose(1, 2)
        x = kept["Functional_linear_0"] = self.head(x.mean(1))
        x = kept["Torch_relu_3"] = torch.relu(x)
        return x


class Block(nn.Module):
    """A short convolution along the text, attention that fades with the distance, a feed-forward with two activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, (3, 1), padding=(1, 0))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.parts, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, future: Tensor, kept: Kept) -> Tensor:
        batch, length, width = x.shape
        kept["conv"] = self.mix(x.mT.unsqueeze(-1))
        x = x + kept["conv"].squeeze(-1).mT
        parts = self.parts(self.norm1(x)).view(batch, length, 3, 2, width // 2)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.arange(float(length), device=x.device)
        distance = (places[:, None] - places).abs()
        kept["transposed"] = key.transpose(-2, -1)
        scores = query @ kept["transposed"] - 0.1 * distance
        weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        weights = weights * (torch.rand(weights.shape) > 0.1).to(x.device)  # dropout that is the same on every device
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        hidden = torch.relu(self.up(self.norm2(x)))
        kept["relu"] = torch.relu(hidden - 0.1)
        return x + self.down(kept["relu"]).bfloat16().float()


class GPT(nn.Module):
    """Two blocks between an embedding and a linear head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor, kept: Kept) -> Tensor:
        length = tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, future, kept)
        # What the second block kept: its convolution is the second call, its first transpose the third.
        kept["Functional_conv2d_1"], kept["Torch_relu_3"] = kept.pop("conv"), kept.pop("relu")
        kept["Tensor_transpose_2"] = kept.pop("transposed")
        return self.head(x)


class Trainer:
    """A net on a device, with batches that are the same whatever the device is."""

    def __init__(self, net: str, device: str = "cpu", rank: int = 0) -> None:
        torch.manual_seed(7)
        self.net = ConvNet() if net == "conv" else GPT()
        self.model: nn.Module = self.net.to(device)
        self.device = device
        self.random = torch.Generator().manual_seed(rank)
        self.losses: list[float] = []

    def batch(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.net, ConvNet):
            inputs = torch.randn(2, 4, 4, 3, generator=self.random)
            return inputs.to(self.device), torch.randint(WORDS, (2,), generator=self.random).to(self.device)
        text = torch.randint(WORDS, (2, 6), generator=self.random).to(self.device)
        return text[:, :-1], text[:, 1:]

    def step(self, save_to: Path | None = None) -> None:
        """Train once."""
        self.find_gradients(save_to)
        self.update()

    def find_gradients(self, save_to: Path | None = None) -> None:
        """Forward and backward. With a folder: save what is known by name in it, as torch itself gives it."""
        kept: Kept = {}
        inputs, targets = self.batch()
        logits = self.model(inputs, kept)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        for value in kept.values() if save_to is not None else ():
            value.retain_grad()
        loss.backward()
        self.losses.append(loss.item())
        if save_to is not None:
            self._save(kept, save_to)

    def update(self) -> None:
        """By hand: the first optimizer of a process costs it more than a second."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    def report(self) -> None:
        """Everything that training has made, on one line."""
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        print(json.dumps({"losses": self.losses, "weights": digest.hexdigest()}))

    def _save(self, kept: Kept, folder: Path) -> None:
        weight = self.net.conv2.weight if isinstance(self.net, ConvNet) else self.net.blocks[1].mix.weight
        known = {f"{name}_forward_output": value for name, value in kept.items()}
        known |= {f"{name}_backward_input.0": value.grad for name, value in kept.items()}
        known |= {"Functional_conv2d_1_forward_input.1": weight, "Functional_conv2d_1_backward_output.1": weight.grad}
        folder.mkdir()
        for name, value in known.items():
            numpy.save(folder / f"{name}.npy", value.detach().cpu().numpy())

"""The reader's own program: a small conv net and its data. It knows nothing of any tool; tests copy it beside a script.

Images and weights are positive, and what is in bfloat16 is exact: where sums cancel, and for the rounding of bfloat16
itself, the older tool's standard fails healthy ops too, and these tests are about a planted fault.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.1, 0.3)
        self.offset = nn.Parameter(torch.full((4, 1, 1), 0.5, dtype=torch.bfloat16))

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv(images), inplace=True)
        x = F.dropout(x, 0.25, self.training)
        x = x + F.relu6(self.offset).detach().float()
        x = F.gelu(x[:, :, 1:].half()).float()
        return self.head(x.mean((2, 3)))


class Training:
    """A model on a device, and one step of its training."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(1)
        self.device = device
        self.data = TensorDataset(torch.rand(40, 1, 6, 6) + 0.5, torch.arange(40) % 3)
        self.model = Net().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, images: Tensor, classes: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images.to(self.device)), classes.to(self.device))
        loss.backward()
        self.optimizer.step()

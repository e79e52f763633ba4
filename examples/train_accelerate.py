"""Three steps of two micro-batches with Accelerate: pip install '.[hf]', then

tensorprobe capture -o runs/accelerate -- accelerate launch --cpu --num_processes 1 examples/train_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
x = torch.randn(48, 4)
model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

model.eval()
with torch.no_grad():
    accelerator.print(f"loss {nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)):.4f}")

"""Record three steps of a Lightning Trainer: pip install '.[lightning]', then python examples/lightning_trainer.py runs/lit."""

import sys
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tensorprobe.integrations.lightning import TensorprobeCallback

out = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"


class Regression(lightning.LightningModule):
    """A small network."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch, index):
        self.training_step(batch, index)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
x = torch.randn(48, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
with tempfile.TemporaryDirectory() as folder:
    lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0,
        callbacks=[TensorprobeCallback(out, overwrite=True)],
    ).fit(Regression(), loader, loader)  # fmt: skip
print(f"tensorprobe inspect {out}")

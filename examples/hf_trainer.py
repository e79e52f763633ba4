"""Record three steps of a Hugging Face Trainer: pip install '.[hf]', then python examples/hf_trainer.py runs/hf."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from tensorprobe.integrations.hf import TensorprobeCallback

out = sys.argv[1] if len(sys.argv) > 1 else "runs/hf"
set_seed(0)
config = GPT2Config(
    n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
)  # fmt: skip
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 50, (24, 8))
data = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[], save_strategy="no",
        eval_strategy="steps", eval_steps=1, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    callbacks = [TensorprobeCallback(out, overwrite=True)]
    Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks).train()
print(f"tensorprobe inspect {out}")

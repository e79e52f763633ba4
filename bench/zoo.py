"""Clean pairs of real architectures with random weights, for bench.compare.detection: the same training in other roundings.

Each model of the zoo trains three steps of AdamW on the CPU: with one thread, with two, without oneDNN, and the same under bfloat16
autocast. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tensorprobe

STEPS = 3
Made = tuple[nn.Module, Callable[[], Tensor]]

WAYS: dict[str, dict[str, Any]] = {
    "1 thread": {},
    "2 threads": {"threads": 2},
    "no oneDNN": {"onednn": False},
    "bf16, 1 thread": {"narrow": True},
    "bf16, 2 threads": {"narrow": True, "threads": 2},
}
PAIRS = (("1 thread", "2 threads"), ("1 thread", "no oneDNN"), ("bf16, 1 thread", "bf16, 2 threads"))


def language_model(config: Any, length: int) -> Made:
    model = transformers.AutoModelForMaskedLM if config.model_type == "bert" else transformers.AutoModelForCausalLM
    made = model.from_config(config)
    ids = torch.randint(config.vocab_size, (2, length))
    return made, lambda: made(input_ids=ids, labels=ids).loss


def image_model(config: Any) -> Made:
    made = transformers.AutoModelForImageClassification.from_config(config)
    images, classes = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    return made, lambda: made(pixel_values=images, labels=classes).loss


def bert() -> Made:
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 1000}
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8}
    return language_model(transformers.BertConfig(**settings, **sizes), 96)


def llama() -> Made:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8}
    return language_model(transformers.LlamaConfig(num_key_value_heads=4, vocab_size=1000, **sizes), 96)


def qwen_moe() -> Made:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 8}
    config = transformers.Qwen2MoeConfig(
        num_key_value_heads=4, num_experts_per_tok=2, vocab_size=1000, **sizes, **experts
    )
    return language_model(config, 64)


def mamba() -> Made:
    config = transformers.MambaConfig(hidden_size=128, num_hidden_layers=2, vocab_size=1000, state_size=8)
    return language_model(config, 32)


def resnet() -> Made:
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], "layer_type": "basic"}
    return image_model(transformers.ResNetConfig(num_labels=10, **sizes))


def vit() -> Made:
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 6}
    return image_model(transformers.ViTConfig(image_size=64, patch_size=8, num_labels=10, **sizes))


MODELS = {"bert": bert, "llama": llama, "qwen-moe": qwen_moe, "mamba": mamba, "resnet": resnet, "vit": vit}


def record(folder: Path, name: str, *, threads: int = 1, onednn: bool = True, narrow: bool = False) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    model, loss = MODELS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        torch.backends.mkldnn.flags(enabled=onednn),
        tensorprobe.capture(folder, model=model, level="api", mode="tensor", overwrite=True) as probe,
    ):
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
                value = loss()
            value.backward()
            optimizer.step()
            probe.step()
    torch.set_num_threads(1)


def clean_pairs(work: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    """Every model in every pair of ways."""
    transformers.logging.set_verbosity_error()
    for name in MODELS:
        for number, settings in enumerate(WAYS.values()):
            record(work / f"zoo-{name}-{number}", name, **settings)
        numbers = list(WAYS)
        for one, other in PAIRS:
            runs = (work / f"zoo-{name}-{numbers.index(one)}", work / f"zoo-{name}-{numbers.index(other)}")
            yield f"{name}: {one} / {other}", runs

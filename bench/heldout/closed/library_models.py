# CLOSED: held out. Whoever changes how runs are compared or judged does not read this file.
"""Families of the closed part from transformers, with random weights. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    ElectraConfig,
    ElectraForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    logging,
)

from bench.heldout.training import Entry, Setup, Training

logging.set_verbosity_error()


def language_model(setup: Setup, model: Any, optimizer: Any = torch.optim.AdamW) -> Training:
    """A language model that learns its own input."""
    placed = setup.place(model.train())
    ids = setup.ids(model.config.vocab_size, 2, 9)

    def loss(_: int) -> Tensor:
        value: Tensor = placed(input_ids=ids, labels=ids).loss
        return value

    return Training(setup, placed, loss, optimizer(placed.parameters(), lr=1e-3))


def clip(setup: Setup) -> Training:
    text = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1} | {
        "bos_token_id": 58,
        "eos_token_id": 59,
    }
    image = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 12, "patch_size": 4}
    heads = {"num_attention_heads": 2, "projection_dim": 12}
    config = CLIPConfig(text_config=text | heads, vision_config=image | heads, projection_dim=12)
    model = setup.place(CLIPModel(config).train())
    ids, images = setup.ids(59, 3, 6), setup.randn(3, 3, 12, 12)
    ids[:, -1] = 59
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.2)
    return Training(setup, model, lambda _: model(input_ids=ids, pixel_values=images, return_loss=True).loss, optimizer)


def convnext(setup: Setup) -> Training:
    config = ConvNextConfig(
        num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[12, 24], depths=[1, 1], image_size=16, num_labels=5,
        layer_scale_init_value=0.1,
    )  # fmt: skip
    model = setup.place(ConvNextForImageClassification(config).train())
    images, classes = setup.randn(4, 3, 16, 16), setup.ids(5, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return Training(setup, model, lambda _: model(pixel_values=images, labels=classes).loss, optimizer)


def electra(setup: Setup) -> Training:
    config = ElectraConfig(
        vocab_size=60, embedding_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return language_model(setup, ElectraForMaskedLM(config))


def gemma2(setup: Setup) -> Training:
    config = Gemma2Config(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, attn_implementation="eager",
    )  # fmt: skip
    return language_model(setup, Gemma2ForCausalLM(config), torch.optim.RMSprop)


def mistral(setup: Setup) -> Training:
    config = MistralConfig(
        vocab_size=80, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5,
    )  # fmt: skip
    return language_model(setup, MistralForCausalLM(config))


def mixtral(setup: Setup) -> Training:
    config = MixtralConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    )  # fmt: skip
    return language_model(setup, MixtralForCausalLM(config))


FAMILIES: dict[str, Entry] = {
    "clip": Entry(clip),
    "convnext": Entry(convnext, "fp32 autocast"),
    "electra": Entry(electra, "fp32 autocast"),
    "gemma2": Entry(gemma2, "fp32 bf16"),
    "mistral": Entry(mistral, "fp32 autocast bf16"),
    "mixtral": Entry(mixtral),
}

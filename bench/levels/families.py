"""Families from transformers, with random weights, small; each trains on data of its own. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from bench.heldout.training import Family, Setup, Training

hf.logging.set_verbosity_error()

TEXT = {"vocab_size": 96}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**TEXT, **SIZES, "intermediate_size": 64}


def _train(setup: Setup, model: Any, inputs: dict[str, Tensor]) -> Training:
    placed = setup.place(model.train())

    def loss(_: int) -> Tensor:
        value: Tensor = placed(**inputs).loss
        return value

    return Training(setup, placed, loss, torch.optim.AdamW(placed.parameters(), lr=1e-3))


def _text(model: Callable[[], Any]) -> Family:
    def build(setup: Setup) -> Training:
        ids = setup.ids(96, 2, 12)
        return _train(setup, model(), {"input_ids": ids, "labels": ids})

    return build


def _image(model: Callable[[], Any]) -> Family:
    def build(setup: Setup) -> Training:
        inputs = {"pixel_values": setup.randn(4, 3, 32, 32), "labels": setup.ids(10, 4)}
        return _train(setup, model(), inputs)

    return build


def _sound(setup: Setup) -> Training:
    config = hf.Wav2Vec2Config(
        **WIDE, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, num_labels=6, classifier_proj_size=16,
    )  # fmt: skip
    inputs = {"input_values": setup.randn(2, 800), "labels": setup.ids(6, 2)}
    return _train(setup, hf.Wav2Vec2ForSequenceClassification(config), inputs)


def _pairs(setup: Setup) -> Training:
    tower = {**SIZES, "intermediate_size": 64}
    config = hf.CLIPConfig(
        text_config={**tower, **TEXT, "eos_token_id": 1, "max_position_embeddings": 16},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    model = hf.CLIPModel(config)
    inputs = {"input_ids": setup.ids(96, 4, 8), "pixel_values": setup.randn(4, 3, 32, 32)}
    training = _train(setup, model, inputs)
    training.loss = lambda _: training.model(**inputs, return_loss=True).loss
    return training


QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, Family] = {
    "bert": _text(lambda: hf.BertForMaskedLM(hf.BertConfig(**WIDE, **QUIET))),
    "clip": _pairs,
    "convnext": _image(
        lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, num_labels=10))
    ),
    "deberta": _text(
        lambda: hf.DebertaV2ForMaskedLM(
            hf.DebertaV2Config(**WIDE, **QUIET, relative_attention=True, pos_att_type=["c2p", "p2c"], max_position_embeddings=24)
        )
    ),
    "falcon": _text(
        lambda: hf.FalconForCausalLM(hf.FalconConfig(**TEXT, **SIZES, multi_query=True, new_decoder_architecture=False))
    ),
    "gemma": _text(lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**WIDE, num_key_value_heads=2, head_dim=8))),
    "gpt2": _text(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=24, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        )
    ),
    "llama": _text(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**WIDE, num_key_value_heads=2))),
    "mamba": _text(lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8))),
    "mixtral": _text(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**WIDE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))
    ),
    "phi": _text(lambda: hf.PhiForCausalLM(hf.PhiConfig(**WIDE, partial_rotary_factor=0.5))),
    "qwen3": _text(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**WIDE, num_key_value_heads=2, head_dim=8))),
    "resnet": _image(
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_labels=10)
        )
    ),
    "swin": _image(
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4, num_labels=10)
        )
    ),
    "vit": _image(
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**SIZES, intermediate_size=64, image_size=32, patch_size=8, num_labels=10)
        )
    ),
    "wav2vec2": _sound,
}  # fmt: skip

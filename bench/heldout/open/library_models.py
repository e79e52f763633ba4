"""Families of the open part from transformers, with random weights. Nothing is downloaded. They may be read and used for tuning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
    logging,
)

from bench.heldout.training import Entry, Setup, Training

logging.set_verbosity_error()


def language_model(setup: Setup, model: Any, *, lr: float = 1e-3) -> Training:
    """A causal language model that learns its own input, with some padding."""
    placed = setup.place(model.train())
    ids = setup.ids(model.config.vocab_size, 2, 10)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def loss(_: int) -> Tensor:
        value: Tensor = placed(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        return value

    return Training(setup, placed, loss, torch.optim.AdamW(placed.parameters(), lr=lr))


def bloom(setup: Setup) -> Training:
    config = BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
    return language_model(setup, BloomForCausalLM(config))


def gptneox(setup: Setup) -> Training:
    config = GPTNeoXConfig(
        vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        attn_implementation="eager",
    )  # fmt: skip
    return language_model(setup, GPTNeoXForCausalLM(config))


def mamba2(setup: Setup) -> Training:
    config = Mamba2Config(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=8, n_groups=1,
        chunk_size=8, conv_kernel=3,
    )  # fmt: skip
    return language_model(setup, Mamba2ForCausalLM(config))


def opt(setup: Setup) -> Training:
    config = OPTConfig(
        vocab_size=60, hidden_size=48, num_hidden_layers=2, num_attention_heads=2, ffn_dim=96, word_embed_proj_dim=48,
        dropout=0.0, max_position_embeddings=32,
    )  # fmt: skip
    return language_model(setup, OPTForCausalLM(config))


def t5(setup: Setup) -> Training:
    config = T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    model = setup.place(T5ForConditionalGeneration(config).train())
    ids, labels = setup.ids(60, 2, 9), setup.ids(60, 2, 6)
    return Training(
        setup,
        model,
        lambda _: model(input_ids=ids, labels=labels).loss,
        torch.optim.Adafactor(model.parameters(), lr=1e-2),
    )


def whisper(setup: Setup) -> Training:
    config = WhisperConfig(
        vocab_size=60, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = setup.place(WhisperForConditionalGeneration(config).train())
    sound, labels = setup.randn(2, 8, 20), setup.ids(60, 2, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Training(setup, model, lambda _: model(input_features=sound, labels=labels).loss, optimizer)


FAMILIES: dict[str, Entry] = {
    "bloom": Entry(bloom, "fp32 bf16"),
    "gptneox": Entry(gptneox, "fp32 autocast"),
    "mamba2": Entry(mamba2),
    "opt": Entry(opt, "fp32 bf16"),
    "t5": Entry(t5, "fp32 bf16"),
    "whisper": Entry(whisper, "fp32 autocast"),
}

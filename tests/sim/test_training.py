"""Whole models train on the device as they do on the CPU, within the noise of another order of summation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers

from bench.sim.models import workload
from tensorprobe import sim

STEPS = 3
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, max_position_embeddings=32))


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    )


def qwen_moe() -> torch.nn.Module:
    config = transformers.Qwen2MoeConfig(
        **SMALL, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, output_router_logits=True,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


def train_transformer(make: Callable[[], torch.nn.Module], device: str) -> list[float]:
    torch.manual_seed(0)
    model = make().train()
    ids = torch.randint(64, (2, 12))
    model, ids = model.to(device), ids.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        # Both devices start each step with an equal random state, so that dropout drops the same elements.
        torch.manual_seed(len(losses))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [bert, llama, qwen_moe], ids=lambda make: make.__name__)
def test_transformers_train_alike(npu: str, make: Callable[[], torch.nn.Module]) -> None:
    on_cpu = train_transformer(make, "cpu")
    assert train_transformer(make, npu) == pytest.approx(on_cpu, rel=2e-4)
    assert on_cpu[-1] < on_cpu[0]


@pytest.mark.parametrize("name", ["gpt", "gpt-fused", "cnn", "router"])
def test_workloads_train_alike(npu: str, name: str) -> None:
    on_cpu, on_device = workload(name, "cpu"), workload(name, npu)
    for _ in range(STEPS):
        assert on_device.step().item() == pytest.approx(on_cpu.step().item(), rel=1e-5)


def test_weights_and_running_statistics_agree_after_training(npu: str) -> None:
    on_cpu, on_device = workload("cnn", "cpu"), workload("cnn", npu)
    for _ in range(STEPS):
        on_cpu.step(), on_device.step()
    for wanted, got in zip(on_cpu.model.state_dict().values(), on_device.model.state_dict().values(), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_low_precision_training_stays_near_single_precision(npu: str) -> None:
    single, low = workload("gpt", npu), workload("gpt-bf16", npu)
    for _ in range(STEPS):
        assert low.step().item() == pytest.approx(single.step().item(), rel=2e-2)


def test_a_fault_shows_in_a_transformer(npu: str) -> None:
    right = train_transformer(bert, npu)
    with sim.installed(sim.read_faults("softmax-tail")):
        wrong = train_transformer(bert, npu)
    assert wrong[0] != pytest.approx(right[0], rel=1e-5)

"""A fast part of the sweep over torch's operator database: the families that once went wrong, and every twelfth entry
of the rest.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.sim import sweep
from tensorprobe import sim

DOCS = Path(__file__).parents[2] / "docs" / "sim.md"
DELICATE = re.compile(
    r"fft|conj|resize|index_put|scatter|masked_|dropout|scaled_dot|batch_norm|layer_norm|conv|lstm|_foreach|out$"
)


def chosen() -> list[object]:
    entries = sweep.entries()
    return [entry for number, entry in enumerate(entries) if number % 12 == 0 or DELICATE.search(entry.name)]


def test_chosen_entries_are_right_forward_and_backward(npu: str) -> None:
    outcomes = [sweep.check_entry(entry, most_samples=2) for entry in chosen()]
    assert len(outcomes) > 100
    wrong = [outcome for outcome in outcomes if outcome.status in ("wrong", "raised")]
    assert wrong == []
    right = [outcome for outcome in outcomes if outcome.status == "right"]
    assert len(right) > 0.95 * len(outcomes) and sum(outcome.backward for outcome in right) > 0.5 * len(right)


def test_the_sweep_notices_a_wrong_op_forward_and_backward(npu: str) -> None:
    entry = next(entry for entry in sweep.entries() if entry.name == "exp")
    with sim.fault("aten::exp", "scale", factor=1.01):
        assert sweep.check_entry(entry).status == "wrong"
    with sim.fault("aten::mul", "gradient", factor=1.01):
        assert sweep.check_entry(entry).status == "wrong"
    with sim.fault("aten::exp", "error"):
        assert "simulated device error" in sweep.check_entry(entry).detail
    assert sweep.check_entry(entry).status == "right"


def test_unsupported_entries_exist_and_are_documented() -> None:
    known = {sweep.label(entry) for entry in sweep.entries()}
    text = DOCS.read_text()
    for name, reason in sweep.UNSUPPORTED.items():
        assert name in known, name
        assert f"`{name}`" in text, name
        assert reason


def test_an_entry_that_the_cpu_refuses_too_counts_as_no_sample(npu: str) -> None:
    def refuse(*_args: object) -> object:
        raise ValueError("no")

    sample = SimpleNamespace(input=torch.ones(1), args=(), kwargs={}, output_process_fn_grad=None)
    entry = SimpleNamespace(
        name="refused", variant_test_name="", dtypes={torch.float32}, supports_autograd=False, op=refuse,
        sample_inputs=lambda *_args, **_kwargs: [sample],
    )  # fmt: skip
    assert sweep.check_entry(entry).status == "no samples"


@pytest.mark.parametrize("name", ["fft.hfft", "fft.ihfftn"])
def test_transforms_of_conjugated_tensors_do_not_crash(npu: str, name: str) -> None:
    entry = next(entry for entry in sweep.entries() if entry.name == name)
    assert sweep.check_entry(entry).status == "right"

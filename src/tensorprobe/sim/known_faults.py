"""Named faults over real ops, each with the small model of `bench/sim/models.py` that shows it. Data only, free of torch.

Where a fault first shows is not here but in `truth.py`, which `sim.catalog()` joins to these entries: code that
captures or compares runs never imports that module, so nothing can find a fault by looking it up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.sim.faults import Fault

if TYPE_CHECKING:
    from tensorprobe.sim.truth import Truth

_FIELDS = set(Fault.__struct_fields__)


@dataclass(frozen=True)
class Entry:
    """A named fault: what it does, which model shows it, and after how many training steps at most."""

    name: str
    about: str
    model: str
    fault: Fault
    steps: int = 1


@dataclass(frozen=True)
class CatalogFault(Entry):
    """An entry with the first call that differs."""

    truth: Truth | None = None


def _entry(name: str, about: str, model: str, op: str, kind: str, *, steps: int = 1, **settings: Any) -> Entry:
    fields = {key: value for key, value in settings.items() if key in _FIELDS}
    params = {key: value for key, value in settings.items() if key not in _FIELDS}
    return Entry(name, about, model, Fault(op=op, kind=kind, params=params, **fields), steps)


_ATTENTION = [
    _entry("softmax-tail", "The last four columns of every softmax come out as zero: a tail tile that is not handled.",
           "gpt", "aten::_softmax", "tail", block=4),
    _entry("softmax-bf16", "Softmax silently computed with bfloat16 inputs and results.",
           "gpt", "aten::_softmax", "compute-in", precision="bfloat16"),
    _entry("softmax-stale", "From the second softmax on, the buffer still holds the previous call's result.",
           "gpt", "aten::_softmax", "stale"),
    _entry("softmax-flush", "Small probabilities are flushed to zero.",
           "gpt", "aten::_softmax", "flush-subnormals", threshold=2e-2),
    _entry("softmax-swapped-rows", "Rows 3 and 4 of each attention matrix change places.",
           "gpt", "aten::_softmax", "swap-rows", dim=-2, first=3, second=4),
    _entry("softmax-nondeterministic", "Softmax with noise of 1e-3 that differs in every run.",
           "gpt", "aten::_softmax", "nondeterminism", relative=1e-3),
    _entry("softmax-gradient", "Softmax is right, its gradient is ten percent too small.",
           "gpt", "aten::_softmax_backward_data", "gradient", factor=0.9),
    _entry("attention-fused-tail", "Inside fused attention the last four softmax columns are lost.",
           "gpt-fused", "aten::_softmax", "tail", block=4),
    _entry("attention-fused-bf16", "The second block's attention scores are computed in bfloat16.",
           "gpt-fused", "aten::bmm", "compute-in", precision="bfloat16", module="blocks.1.attn", direction="forward"),
    _entry("attention-fused-gradient", "Fused attention is right, one of its gradient products is halved.",
           "gpt-fused", "aten::bmm", "gradient", factor=0.5, nth=0),
    _entry("attention-fused-overflow", "The largest attention score overflows to infinity.",
           "gpt-fused", "aten::bmm", "overflow", nth=0, direction="forward"),
    _entry("mask-leak", "One masked attention score is set to one instead of minus infinity.",
           "gpt", "aten::masked_fill_", "element", index=1, value=1.0, nth=1, direction="forward"),
]  # fmt: skip
_MATMUL = [
    _entry("matmul-bf16-accumulate", "Batched matrix products add up their terms in bfloat16.",
           "gpt", "aten::bmm", "accumulate", precision="bfloat16", block=2, direction="forward"),
    _entry("matmul-fp16-accumulate-late", "The fourth batched product adds up its terms in float16.",
           "gpt", "aten::bmm", "accumulate", precision="float16", block=1, nth=3),
    _entry("matmul-transposed-gradient", "The gradient of one product comes out with two batches swapped.",
           "gpt", "aten::bmm", "swap-rows", dim=0, first=0, second=1, direction="backward", nth=2),
    _entry("linear-scale", "The query-key-value projection of the second block is 0.1 % too large.",
           "gpt", "aten::addmm", "scale", factor=1.001, module="blocks.1.attn.qkv"),
    _entry("linear-last-column", "The last output column of the last down projection is not computed.",
           "gpt", "aten::addmm", "tail", block=1, nth=7),
    _entry("linear-fp16-accumulate", "Linear layers with bias add up their terms in float16.",
           "gpt", "aten::addmm", "accumulate", precision="float16", block=4),
    _entry("linear-intermittent", "About one linear layer in five is 5 % too large.",
           "gpt", "aten::addmm", "scale", factor=1.05, probability=0.2, seed=7),
    _entry("linear-input-gradient", "The second product in the backward of the last down projection is 10 % too small.",
           "gpt", "aten::mm", "gradient", factor=0.9, module="blocks.1.down", nth=1),
    _entry("linear-bias-gradient", "The bias gradient of a linear layer lacks its last eight entries.",
           "gpt", "aten::sum", "tail", block=8, direction="backward", nth=1),
    _entry("head-one-element", "One logit is wrong by a half.",
           "gpt", "aten::mm", "element", index=77, amount=0.5, direction="forward"),
    _entry("bf16-linear-scale", "Under bfloat16 autocast linear layers are 5 % too large.",
           "gpt-bf16", "aten::addmm", "scale", factor=1.05, dtype="bfloat16", since=2),
    _entry("bf16-matmul-accumulate", "Under bfloat16 autocast products are also accumulated in bfloat16.",
           "gpt-bf16", "aten::bmm", "accumulate", precision="bfloat16", block=1, direction="forward"),
]  # fmt: skip
_NORMS = [
    _entry("layer-norm-bias", "The third layer norm is shifted by 0.01.",
           "gpt", "aten::native_layer_norm", "bias", amount=0.01, nth=2),
    _entry("layer-norm-saved-scale", "Layer norm is right but saves a wrong reciprocal deviation for backward.",
           "gpt", "aten::native_layer_norm", "scale", output=2, factor=1.05, nth=0),
    _entry("layer-norm-gradient", "The gradient of layer norm is 1 % too small.",
           "gpt", "aten::native_layer_norm_backward", "gradient", factor=0.99),
    _entry("layer-norm-nan-third-step", "One NaN in a layer norm in the third step.",
           "gpt", "aten::native_layer_norm", "nan", index=40, nth=12, steps=3),
    _entry("batch-norm-scale", "The second batch norm is 2 % too large.",
           "cnn", "aten::native_batch_norm", "scale", factor=1.02, nth=1),
    _entry("batch-norm-saved-variance", "Batch norm is right but saves a wrong reciprocal deviation for backward.",
           "cnn", "aten::native_batch_norm", "scale", output=2, factor=1.1, nth=0),
    _entry("batch-norm-gradient", "The gradient of batch norm is 3 % too large.",
           "cnn", "aten::native_batch_norm_backward", "gradient", factor=1.03),
    _entry("group-norm-bf16", "Group norm works on bfloat16.",
           "cnn", "aten::native_group_norm", "compute-in", precision="bfloat16"),
    _entry("norm-truncated", "Vector norms are truncated to eight bits.",
           "router", "aten::linalg_vector_norm", "rounding", bits=8),
]  # fmt: skip
_POINTWISE = [
    _entry("gelu-truncated", "GELU is truncated to eight bits of mantissa instead of rounded.",
           "gpt", "aten::gelu", "rounding", bits=8),
    _entry("gelu-gradient", "The gradient of GELU in the first block is 5 % too large.",
           "gpt", "aten::gelu_backward", "gradient", factor=1.05, module="blocks.0"),
    _entry("silu-bf16", "SiLU is computed in bfloat16.", "cnn", "aten::silu", "compute-in", precision="bfloat16"),
    _entry("relu-leak", "ReLU adds a small constant everywhere.", "cnn", "aten::relu", "bias", amount=1e-3),
    _entry("residual-swapped", "Two positions change places in the second residual sum.",
           "gpt", "aten::add", "swap-rows", dim=1, first=5, second=6, nth=2, direction="forward"),
    _entry("copy-one-element", "One element is damaged when attention's result is made contiguous.",
           "gpt", "aten::_copy_from", "element", index=100, amount=0.25, nth=4,
           module="blocks.0.attn", direction="forward"),
]  # fmt: skip
_LOOKUP = [
    _entry("embedding-off-by-one", "Rows of the token embedding land one place too far.",
           "gpt", "aten::embedding", "roll", dim=1, by=1, nth=0),
    _entry("embedding-gradient", "The gradient of the token embedding is halved.",
           "gpt", "aten::embedding_dense_backward", "gradient", factor=0.5, nth=1),
    _entry("gather-off-by-one", "Gathered rows land one place too far.",
           "router", "aten::gather", "roll", dim=1, by=1, nth=0),
    _entry("scatter-add-lost", "One contribution to a scatter-add is lost.",
           "router", "aten::scatter_add", "element", index=2, amount=-0.4),
    _entry("scatter-gradient", "The scatter-add in the gradient of gather is 20 % too small.",
           "router", "aten::scatter_add_", "gradient", factor=0.8),
    _entry("index-add-tail", "The last two rows of an index-add are lost.",
           "router", "aten::index_add", "tail", dim=0, block=2),
    _entry("cumsum-tail", "The running sum does not reach its last rows.",
           "router", "aten::cumsum", "tail", dim=0, block=3),
    _entry("topk-values-swapped", "The values of top-k for two rows change places, the indices do not.",
           "router", "aten::topk", "swap-rows", dim=0, first=1, second=4),
]  # fmt: skip
_CONVOLUTION = [
    _entry("conv-fp16-accumulate", "The second convolution adds up its channels in float16.",
           "cnn", "aten::convolution_overrideable", "accumulate", precision="float16", block=1, nth=1),
    _entry("conv-last-channel", "The last output channel of the first convolution is not computed.",
           "cnn", "aten::convolution_overrideable", "tail", dim=1, block=1, nth=0),
    _entry("conv-border", "The last column of every convolution is halved, as with wrong padding.",
           "cnn", "aten::convolution_overrideable", "tail", dim=-1, block=1, factor=0.5, nth=1),
    _entry("conv-weight-gradient", "The weight gradient of the second convolution is 2 % too small.",
           "cnn", "aten::convolution_backward_overrideable", "gradient", output=1, factor=0.98, nth=0),
    _entry("max-pool-one-element", "One element of a max pool is wrong.",
           "cnn", "aten::max_pool2d_with_indices", "element", index=9, amount=0.1),
    _entry("mean-bf16-accumulate", "A mean adds up its terms in bfloat16.",
           "cnn", "aten::mean", "accumulate", precision="bfloat16", block=1, direction="forward"),
    _entry("lstm-cell-truncated", "From the third time step on, the LSTM cell is truncated to ten bits.",
           "cnn", "aten::_thnn_fused_lstm_cell", "rounding", bits=10, since=2),
]  # fmt: skip
_LOSS_AND_OPTIMIZER = [
    _entry("cross-entropy-log-softmax", "The logarithm of softmax inside cross entropy is shifted by 0.001.",
           "gpt", "aten::_log_softmax", "bias", amount=1e-3),
    _entry("cross-entropy-scale", "The loss is 1 % too large.", "gpt", "aten::nll_loss_forward", "scale", factor=1.01),
    _entry("cross-entropy-gradient-nan", "One NaN in the gradient of the loss.",
           "gpt", "aten::nll_loss_backward", "nan", index=5),
    _entry("mse-scale", "The squared error is 2 % too large.", "router", "aten::mse_loss", "scale", factor=1.02),
    _entry("adam-momentum", "Adam's running mean of the first parameter is 10 % too large.",
           "gpt", "aten::_foreach_lerp_", "scale", factor=1.1),
    _entry("adam-root-bf16", "Adam's square roots are rounded to bfloat16.",
           "gpt", "aten::_foreach_sqrt", "compute-in", precision="bfloat16"),
    _entry("adam-update-second-step", "The second Adam update of the first parameter is 1 % too large.",
           "gpt", "aten::_foreach_addcdiv_", "scale", factor=1.01, nth=1, steps=2),
    _entry("sgd-momentum", "From the second step on SGD's momentum of the first parameter is halved.",
           "cnn", "aten::_foreach_mul_", "scale", factor=0.5, steps=2),
]  # fmt: skip
_ERRORS = [
    _entry("error-in-forward", "The second softmax raises a device error.", "gpt", "aten::_softmax", "error", nth=1),
    _entry("error-in-backward", "The gradient of GELU raises a device error in the thread that runs backward.",
           "gpt", "aten::gelu_backward", "error", nth=1),
]  # fmt: skip
_COLLECTIVES = [
    _entry("all-reduce-dropped", "What rank 1 adds to the second all-reduce is lost.",
           "parallel", "c10d::allreduce_", "drop-contribution", rank=1, nth=1),
    _entry("all-reduce-scale", "All-reduced gradients are 1 % too large on rank 0.",
           "parallel", "c10d::allreduce_", "scale", factor=1.01, rank=0),
    _entry("all-gather-shifted", "What was gathered from rank 0 is shifted.",
           "parallel", "c10d::allgather_", "bias", amount=0.5),
    _entry("broadcast-truncated", "Broadcast values are truncated to six bits on rank 1.",
           "parallel", "c10d::broadcast_", "rounding", bits=6, rank=1),
]  # fmt: skip

ENTRIES: tuple[Entry, ...] = (
    *_ATTENTION,
    *_MATMUL,
    *_NORMS,
    *_POINTWISE,
    *_LOOKUP,
    *_CONVOLUTION,
    *_LOSS_AND_OPTIMIZER,
    *_ERRORS,
    *_COLLECTIVES,
)


_OTHERWISE = {
    "aten::addmm": "aten::mm",
    "aten::_foreach_lerp_": "aten::lerp_",
    "aten::_foreach_sqrt": "aten::sqrt",
    "aten::_foreach_addcdiv_": "aten::addcdiv_",
    "aten::_foreach_mul_": "aten::mul_",
    "aten::scatter_add": "aten::scatter_add_",
    "aten::index_add": "aten::index_add_",
    "aten::masked_fill_": "aten::masked_fill",
}
"""Op → what other programs use in its place: linear layers without bias, optimizers without `foreach`."""


def named_fault(name: str) -> Fault:
    """Return the fault with this name, for any program: if the program has no such module or call, another one is affected.

    Raises `SettingsError` with the nearest name if there is none.
    """
    for entry in ENTRIES:
        if entry.name == name:
            fault = entry.fault
            otherwise = _OTHERWISE.get(fault.op, "")
            is_picky = fault.module is not None or fault.nth is not None or fault.since or otherwise
            return msgspec.structs.replace(
                fault, name=name, elsewhere=entry.steps if is_picky else 0, otherwise=otherwise
            )
    raise SettingsError(
        f"unknown fault {name!r}; it is not in the catalog.{did_you_mean(name, [e.name for e in ENTRIES])}"
    )


def joined() -> list[CatalogFault]:
    """Return the entries with their truth."""
    from tensorprobe.sim.truth import TRUTH

    return [
        CatalogFault(entry.name, entry.about, entry.model, entry.fault, entry.steps, TRUTH[entry.name])
        for entry in ENTRIES
    ]

"""Where each fault of the catalog first shows: the ground truth against which detection is measured.

Never imported by code that captures, compares or judges. Found by running every fault beside a right run and
comparing all bits (tests/sim/test_catalog.py does it again): nothing differs before the stated place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Truth:
    """The first difference, at the two levels.

    `aten` and `number`: the first op of the device with other results, the index of the call of that op within its
    step, from 0. `api`: the first API call whose outputs (or, in backward, gradients) differ. `step` counts training
    steps from 0.
    """

    aten: str
    number: int
    api: str
    step: int = 0
    raises: bool = False


TRUTH: dict[str, Truth] = {
    "softmax-tail": Truth("aten::_softmax", 0, "Functional.softmax.0.forward"),
    "softmax-bf16": Truth("aten::_softmax", 0, "Functional.softmax.0.forward"),
    "softmax-stale": Truth("aten::_softmax", 1, "Functional.softmax.1.forward"),
    "softmax-flush": Truth("aten::_softmax", 0, "Functional.softmax.0.forward"),
    "softmax-swapped-rows": Truth("aten::_softmax", 0, "Functional.softmax.0.forward"),
    "softmax-nondeterministic": Truth("aten::_softmax", 0, "Functional.softmax.0.forward"),
    "softmax-gradient": Truth("aten::_softmax_backward_data", 0, "Functional.softmax.1.backward"),
    "attention-fused-tail": Truth("aten::_softmax", 0, "Functional.scaled_dot_product_attention.0.forward"),
    "attention-fused-bf16": Truth("aten::bmm", 2, "Functional.scaled_dot_product_attention.1.forward"),
    "attention-fused-gradient": Truth("aten::bmm", 4, "Functional.scaled_dot_product_attention.1.backward"),
    "attention-fused-overflow": Truth("aten::bmm", 0, "Functional.scaled_dot_product_attention.0.forward"),
    "mask-leak": Truth("aten::masked_fill_", 1, "Tensor.masked_fill.1.forward"),
    "matmul-bf16-accumulate": Truth("aten::bmm", 0, "Torch.matmul.0.forward"),
    "matmul-fp16-accumulate-late": Truth("aten::bmm", 3, "Torch.matmul.3.forward"),
    "matmul-transposed-gradient": Truth("aten::bmm", 6, "Torch.matmul.2.backward"),
    "linear-scale": Truth("aten::addmm", 4, "Functional.linear.4.forward"),
    "linear-last-column": Truth("aten::addmm", 7, "Functional.linear.7.forward"),
    "linear-fp16-accumulate": Truth("aten::addmm", 0, "Functional.linear.0.forward"),
    "linear-intermittent": Truth("aten::addmm", 1, "Functional.linear.1.forward"),
    "linear-input-gradient": Truth("aten::mm", 4, "Functional.linear.7.backward"),
    "linear-bias-gradient": Truth("aten::sum", 1, "Functional.linear.6.backward"),
    "head-one-element": Truth("aten::mm", 0, "Functional.linear.8.forward"),
    "bf16-linear-scale": Truth("aten::addmm", 2, "Functional.linear.2.forward"),
    "bf16-matmul-accumulate": Truth("aten::bmm", 0, "Torch.matmul.0.forward"),
    "layer-norm-bias": Truth("aten::native_layer_norm", 2, "Functional.layer_norm.2.forward"),
    "layer-norm-saved-scale": Truth("aten::native_layer_norm", 0, "Functional.layer_norm.0.backward"),
    "layer-norm-gradient": Truth("aten::native_layer_norm_backward", 0, "Functional.layer_norm.4.backward"),
    "layer-norm-nan-third-step": Truth("aten::native_layer_norm", 2, "Functional.layer_norm.2.forward", step=2),
    "batch-norm-scale": Truth("aten::native_batch_norm", 1, "Functional.batch_norm.1.forward"),
    "batch-norm-saved-variance": Truth("aten::native_batch_norm", 0, "Functional.batch_norm.0.backward"),
    "batch-norm-gradient": Truth("aten::native_batch_norm_backward", 0, "Functional.batch_norm.1.backward"),
    "group-norm-bf16": Truth("aten::native_group_norm", 0, "Functional.group_norm.0.forward"),
    "norm-truncated": Truth("aten::linalg_vector_norm", 0, "Functional.normalize.0.forward"),
    "gelu-truncated": Truth("aten::gelu", 0, "Functional.gelu.0.forward"),
    "gelu-gradient": Truth("aten::gelu_backward", 1, "Functional.gelu.0.backward"),
    "silu-bf16": Truth("aten::silu", 0, "Functional.silu.0.forward"),
    "relu-leak": Truth("aten::relu", 0, "Functional.relu.0.forward"),
    "residual-swapped": Truth("aten::add", 2, "Tensor.add.2.forward"),
    "copy-one-element": Truth("aten::_copy_from", 4, "Tensor.reshape.0.forward"),
    "embedding-off-by-one": Truth("aten::embedding", 0, "Functional.embedding.0.forward"),
    "embedding-gradient": Truth("aten::embedding_dense_backward", 1, "Functional.embedding.0.backward"),
    "gather-off-by-one": Truth("aten::gather", 0, "Torch.gather.0.forward"),
    "scatter-add-lost": Truth("aten::scatter_add", 0, "Tensor.scatter_add.0.forward"),
    "scatter-gradient": Truth("aten::scatter_add_", 0, "Torch.gather.0.backward"),
    "index-add-tail": Truth("aten::index_add", 0, "Tensor.index_add.0.forward"),
    "cumsum-tail": Truth("aten::cumsum", 0, "Torch.cumsum.0.forward"),
    "topk-values-swapped": Truth("aten::topk", 0, "Torch.topk.0.forward"),
    "conv-fp16-accumulate": Truth("aten::convolution_overrideable", 1, "Functional.conv2d.1.forward"),
    "conv-last-channel": Truth("aten::convolution_overrideable", 0, "Functional.conv2d.0.forward"),
    "conv-border": Truth("aten::convolution_overrideable", 1, "Functional.conv2d.1.forward"),
    "conv-weight-gradient": Truth("aten::convolution_backward_overrideable", 0, "Functional.conv2d.1.backward"),
    "max-pool-one-element": Truth("aten::max_pool2d_with_indices", 0, "Functional.max_pool2d.0.forward"),
    "mean-bf16-accumulate": Truth("aten::mean", 0, "Tensor.mean.0.forward"),
    "lstm-cell-truncated": Truth("aten::_thnn_fused_lstm_cell", 2, "VF.lstm.0.forward"),
    "cross-entropy-log-softmax": Truth("aten::_log_softmax", 0, "Functional.cross_entropy.0.forward"),
    "cross-entropy-scale": Truth("aten::nll_loss_forward", 0, "Functional.cross_entropy.0.forward"),
    "cross-entropy-gradient-nan": Truth("aten::nll_loss_backward", 0, "Functional.cross_entropy.0.backward"),
    "mse-scale": Truth("aten::mse_loss", 0, "Functional.mse_loss.0.forward"),
    "adam-momentum": Truth("aten::_foreach_lerp_", 0, "Torch._foreach_lerp_.0.forward"),
    "adam-root-bf16": Truth("aten::_foreach_sqrt", 0, "Torch._foreach_sqrt.0.forward"),
    "adam-update-second-step": Truth("aten::_foreach_addcdiv_", 0, "Torch._foreach_addcdiv_.0.forward", step=1),
    "sgd-momentum": Truth("aten::_foreach_mul_", 0, "Torch._foreach_mul_.0.forward", step=1),
    "error-in-forward": Truth("aten::_softmax", 1, "Functional.softmax.1.forward", raises=True),
    "error-in-backward": Truth("aten::gelu_backward", 1, "Functional.gelu.0.backward", raises=True),
    "all-reduce-dropped": Truth("c10d::allreduce_", 1, "Distributed.all_reduce.1.forward"),
    "all-reduce-scale": Truth("c10d::allreduce_", 0, "Distributed.all_reduce.0.forward"),
    "all-gather-shifted": Truth("c10d::allgather_", 0, "Distributed.all_gather.0.forward"),
    "broadcast-truncated": Truth("c10d::broadcast_", 0, "Distributed.broadcast.0.forward"),
}

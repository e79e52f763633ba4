# CLOSED: held out. Whoever changes how runs are compared or judged does not read this file.
"""Faults of the closed part."""

from __future__ import annotations

from operator import iadd, imul
from typing import Any

import numpy
import torch

from bench.heldout import kinds
from bench.heldout.cases import Fault as F
from bench.heldout.plant import (
    call,
    gradient_kernel,
    kernel,
    keyword,
    optimizer,
    other_module,
    other_stream,
    position,
    skipped,
    stale_tensor,
    tensor,
    unseen_gradient,
    unseen_update,
)


def add_noise(gradient: Any) -> None:
    """Two percent of noise."""
    gradient *= 1 + 0.02 * numpy.random.default_rng(3).standard_normal(gradient.shape).astype(gradient.dtype)


EVERY = ("*",)
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
FAULTS: list[F] = [
    # wrong results of kernels: all elements
    F("accumulate", "value", "selu of the third micro-batch 0.4 % too large", kernel("elu", kinds.scaled(1.004), 4)),
    F("ctc", "value", "hardtanh shifted", kernel("hardtanh", kinds.shifted(0.01), 1)),
    F("deconv", "value", "second convolution 0.1 % too small", kernel("convolution", kinds.scaled(0.999), 2)),
    F("dit", "value", "cosine of the time 0.3 % too large", kernel("cos", kinds.scaled(1.003))),
    F("dit", "value", "gelu 5 % too large", kernel("gelu", kinds.scaled(1.05), 0), "bf16"),
    F("fakequant", "value", "convolution 1 % too large", kernel("convolution", kinds.scaled(1.01))),
    F("gat", "value", "exponential of scores 0.2 % too large", kernel("exp", kinds.scaled(1.002))),
    F("gmlp", "value", "spatial mixing with noise of 0.2 %", kernel("convolution", kinds.noisy(2e-3), 1)),
    F("halfscaler", "value", "sigmoid 2 % too large", kernel("sigmoid", kinds.scaled(1.02)), "half-autocast"),
    F("linearattention", "value", "running sum 0.5 % too large", kernel("cumsum", kinds.scaled(1.005), 2)),
    F("mobile", "value", "hardswish shifted", kernel("hardswish", kinds.shifted(0.01))),
    F("policy", "value", "standard deviation 1 % too small", kernel("std.correction", kinds.scaled(0.99))),
    F("rotarymask", "value", "softmax behind the mask 0.5 % too large", kernel("_softmax", kinds.scaled(1.005), 1)),
    F("seq2seq", "value", "attention to the source 0.3 % too small", kernel(FLASH, kinds.scaled(0.997), 2)),
    F("triplet", "value", "distances shifted", kernel("_cdist_forward", kinds.shifted(0.005))),
    F("unet", "value", "bilinear interpolation 0.5 % too large", kernel("upsample_bilinear2d", kinds.scaled(1.005))),
    F("convnext", "value", "depthwise convolution 0.2 % too large", kernel("convolution", kinds.scaled(1.002), 2)),
    F("mistral", "value", "silu of the second layer 0.1 % too large", kernel("silu", kinds.scaled(1.001), 1)),
    F("mistral", "value", "projection 5 % too small", kernel("mm", kinds.scaled(0.95), 6), "bf16"),
    F("gemma2", "value", "tanh of the logits 1 % too small", kernel("tanh", kinds.scaled(0.99), 2)),
    # one element, one tile
    F("accumulate", "element", "one element of a product in the last micro-batch", kernel("addmm", kinds.one_element(0.4), 10)),
    F("gat", "element", "one element of scatter-add", kernel("scatter_add", kinds.one_element(0.1, 0.3))),
    F("generate", "element", "one logit of the third new token", kernel("mm", kinds.one_element(0.3), 3)),
    F("rotarymask", "element", "one score behind the mask", kernel("bmm", kinds.one_element(0.2, 0.0), 2)),
    F("softmoe", "element", "one tile of an expert", kernel("baddbmm", kinds.one_tile(1.3), 0), "autocast"),
    F("unet", "element", "one tile of a convolution", kernel("convolution", kinds.one_tile(0.8), 6)),
    F("clip", "element", "one element of a class embedding", kernel("embedding", kinds.one_element(0.5), 1)),
    F("electra", "element", "one element of layer norm", kernel("native_layer_norm", kinds.one_element(0.2), 2)),
    # parts that are not computed
    F("ctc", "part", "input product of the recurrent layer without its last term", kernel("mm", kinds.short_sum(1), 0)),
    F("deconv", "part", "last column of the transposed convolution", kernel("convolution", kinds.last_columns(0.0), 1)),
    F("generate", "part", "attention of a cached step without the oldest key", kernel("_softmax", kinds.first_row(), 3)),
    F("mobile", "part", "mean without its last column", kernel("mean.dim", kinds.short_reduction(1), 1)),
    F("simclr", "part", "similarities without their last term", kernel("mm", kinds.short_sum(1), 0)),
    F("softmoe", "part", "last column of the collecting softmax", kernel("_softmax", kinds.last_columns(), 1)),
    F("mixtral", "part", "first row of a grouped product", kernel("_grouped_mm", kinds.first_row(), 1)),
    F("gemma2", "part", "norm without its last three elements", kernel("mean.dim", kinds.short_reduction(3), 4)),
    # narrower arithmetic
    F("dit", "precision", "modulation rounded to bfloat16", kernel("addcmul", kinds.rounded(), 0)),
    F("halfscaler", "precision", "second product added up in bfloat16", kernel("addmm", kinds.accumulated(block=4), 1),
      "half-autocast"),
    F("linearattention", "precision", "einsum with bfloat16 operands", kernel("bmm", kinds.narrow_inputs(), 1)),
    F("policy", "precision", "log softmax rounded to float16", kernel("_log_softmax", kinds.rounded(torch.float16))),
    F("seq2seq", "precision", "sixth linear layer with bfloat16 operands", kernel("addmm", kinds.narrow_inputs(), 5)),
    F("convnext", "precision", "layer norm rounded to float16", kernel("native_layer_norm", kinds.rounded(torch.float16), 2)),
    F("electra", "precision", "linear layer added up in float16", kernel("addmm", kinds.accumulated(torch.float16, 4), 7)),
    # norms with another eps
    F("ctc", "norm", "instance norm with a larger eps", kernel("native_batch_norm", kinds.argument(7, 1e-2))),
    F("gmlp", "norm", "gate norm with a larger eps", kernel("native_layer_norm", kinds.argument(4, 1e-3), 1)),
    F("unet", "norm", "group norm with a larger eps", kernel("native_group_norm", kinds.argument(7, 1e-3), 3)),
    F("simclr", "norm", "batch norm with a larger eps", kernel("native_batch_norm", kinds.argument(7, 1e-3), 1)),
    # old or misplaced data
    F("dit", "moved", "patches of two columns swapped", kernel("im2col", kinds.swapped_rows(1, 2, 2))),
    F("generate", "moved", "concatenated keys are stale", kernel("cat", kinds.stale(), 2)),
    F("rotarymask", "moved", "concatenation rolled by one", kernel("cat", kinds.rolled(1, -1), 1)),
    F("unet", "moved", "max pool: two rows swapped", kernel("max_pool2d_with_indices", kinds.swapped_rows(0, 1, 2))),
    F("mixtral", "moved", "sorted tokens: two swapped", kernel("index.Tensor", kinds.swapped_rows(3, 4), 1)),
    F("electra", "moved", "token embedding one row too far",
      kernel("embedding", kinds.index_off(1, lambda w, *_: len(w)), 0)),
    # gradients only
    F("accumulate", "gradient", "gradient of layer norm 1 % too large",
      gradient_kernel("native_layer_norm_backward", kinds.scaled(1.01), 2)),
    F("ctc", "gradient", "gradient of hardtanh 1 % too large", gradient_kernel("hardtanh_backward", kinds.scaled(1.01), 0)),
    F("deconv", "gradient", "gradient of the slopes", gradient_kernel("_prelu_kernel_backward", kinds.scaled(0.97, 1))),
    F("gat", "gradient", "gradient of a gather loses a row", gradient_kernel("_index_put_impl_", kinds.first_row(), 1)),
    F("linearattention", "gradient", "gradient of the running sum", gradient_kernel("cumsum", kinds.last_columns(0.9), 1)),
    F("mobile", "gradient", "gradient of the depthwise convolution",
      gradient_kernel("convolution_backward", kinds.scaled(1.01, 1), 2)),
    F("seq2seq", "gradient", "gradient of relu, one element", gradient_kernel("threshold_backward", kinds.one_element(1.0, 0.2))),
    F("softmoe", "gradient", "gradient of softmax rounded to bfloat16",
      gradient_kernel("_softmax_backward_data", kinds.rounded(), 2)),
    F("mistral", "gradient", "gradient of silu 0.5 % too small", gradient_kernel("silu_backward", kinds.scaled(0.995), 0)),
    F("clip", "gradient", "gradient of attention", gradient_kernel(f"{FLASH}_backward", kinds.scaled(1.02, 2), 1)),
    # wiring
    F("dit", "wiring", "query and key exchanged", call("F.scaled_dot_product_attention", lambda q, k, v, **kw: ((k, q, v), kw), 1)),
    F("rotarymask", "wiring", "output weight without .T", call("F.linear", tensor(1, lambda w: w.T), 3)),
    F("rotarymask", "wiring", "value projection uses the key's weight", other_module("blocks.1.v", "blocks.1.k")),
    F("generate", "wiring", "heads of the value reversed", call("t.__matmul__", tensor(1, lambda x: x.flip(1)), 1)),
    F("gmlp", "wiring", "gate scaled by 1.04 between calls", call("F.conv1d", tensor(0, lambda x: x * 1.04), 1)),
    F("seq2seq", "wiring", "memory rolled by one", call("F.layer_norm", tensor(0, lambda x: x.roll(1, 1)), 2)),
    F("unet", "wiring", "skip connection of another sample", call("F.conv2d", tensor(0, lambda x: x.flip(0)), 7)),
    F("mistral", "wiring", "up projection of the other layer",
      other_module("model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj")),
    F("clip", "wiring", "weight of a square projection without .T", call("F.linear", tensor(1, lambda w: w.T), 2)),
    F("policy", "wiring", "hidden state of the step before", call("F.linear", stale_tensor(0), 2)),
    # arguments
    F("accumulate", "arguments", "eps of layer norm in micro-batch 2", call("F.layer_norm", position(4, 1e-2), 2)),
    F("generate", "arguments", "a mask that is too weak", call("t.masked_fill", position(2, -1.0), 1)),
    F("softmoe", "arguments", "softmax over experts instead of tokens", call("t.softmax", position(1, 2), 0)),
    F("triplet", "arguments", "normalised over samples", call("F.normalize", keyword(dim=0))),
    F("simclr", "arguments", "momentum of batch norm", call("F.batch_norm", lambda *a, **k: ((*a[:6], 0.2, *a[7:]), k), 0)),
    F("seq2seq", "arguments", "no label smoothing", call("F.cross_entropy", keyword(label_smoothing=0.0))),
    # optimizers that are recorded
    F("gmlp", "optimizer", "AdamW update of one parameter 1 % too large",
      kernel("addcdiv_", kinds.keyword_argument(value=lambda v: v * 1.01), 7)),
    F("deconv", "optimizer", "RAdam's running mean 1 % too large", kernel("lerp_.Scalar", kinds.scaled(1.01), 3)),
    F("triplet", "optimizer", "Adadelta with another rho", optimizer(rho=0.89), modules=True, parameters=EVERY),
    F("mobile", "optimizer", "other weight decay", optimizer(weight_decay=5e-3), modules=True, parameters=EVERY),
    F("unet", "optimizer", "a parameter is skipped", skipped("up2.weight"), parameters=("up2.weight",), modules=True),
    F("electra", "optimizer", "AdamW's root rounded to bfloat16", kernel("sqrt", kinds.rounded(), 11)),
    # updates that are not recorded
    F("dit", "unseen update", "update of a weight 1 % too large", unseen_update("blocks.1.qkv.weight", 1.01),
      parameters=("blocks.1.qkv.weight",), modules=True),
    F("rotarymask", "unseen update", "learning rate 1 % too large", optimizer(lr=lambda lr: lr * 1.01), parameters=EVERY,
      modules=True),
    F("mistral", "unseen update", "update of a weight 2 % too small", unseen_update("model.layers.0.mlp.gate_proj.weight", 0.98),
      parameters=("*gate_proj.weight",), modules=True),
    F("simclr", "unseen update", "learning rate 1 % too small", optimizer(lr=lambda lr: lr * 0.99), parameters=EVERY, modules=True),
    # gradients changed by nobody who is recorded
    F("fakequant", "unseen gradient", "gradient of a weight 1 % too large", unseen_gradient("two.weight", lambda g: imul(g, 1.01)),
      parameters=("two.weight",), modules=True),
    F("mobile", "unseen gradient", "noise of 2 % on all gradients", unseen_gradient("*", add_noise), parameters=EVERY, modules=True),
    F("halfscaler", "unseen gradient", "one gradient shifted, in a hook",
      unseen_gradient("2.weight", lambda g: iadd(g, 0.01 * abs(g).max()), hook=True), "half-autocast",
      parameters=("2.weight",), modules=True),
    F("ddpconv", "unseen gradient", "all-reduce 1 % too large on both ranks", unseen_gradient("*", lambda g: imul(g, 1.01)),
      parameters=EVERY, modules=True),
    F("ddpconv", "unseen gradient", "noise of 2 % on rank 0", unseen_gradient("*", add_noise, rank=0), parameters=EVERY,
      modules=True),
    # random ops with another stream
    F("triplet", "random", "dropout draws from another stream", other_stream()),
    # one rank only
    F("ddpconv", "rank", "group norm 1 % too large on rank 0", kernel("native_group_norm", kinds.scaled(1.01), rank=0)),
    F("gathered", "rank", "second tower on rank 1, one element", kernel("addmm", kinds.one_element(0.3), 1, rank=1)),
    F("gathered", "rank", "division after the average on rank 1", kernel("div_.Tensor", kinds.scaled(1.002), 2, rank=1)),
    # one step of several
    F("accumulate", "one step", "step 3 of 5: loss of a micro-batch 1 % too large",
      kernel("nll_loss_forward", kinds.scaled(1.01), 2, step=3), steps=5),
    F("gat", "one step", "step 3 of 5: elu 1 % too large", kernel("elu", kinds.scaled(1.01), step=3), steps=5),
    F("mobile", "one step", "step 3 of 5: gradient of hardswish 2 % too large",
      gradient_kernel("hardswish_backward", kinds.scaled(1.02), step=3), steps=5),
    F("generate", "one step", "step 3 of 5: learning rate's update doubled",
      kernel("addcdiv_", kinds.keyword_argument(value=lambda v: 2 * v), 4, step=3), steps=5, modules=True, parameters=EVERY),
]  # fmt: skip

"""What is known of each op, once: how its result is rounded, where its values come from, what it does besides computing.

An op is looked up by its name without its family and, at the ATen level, without its overload. In-place and `_foreach_`
forms have the traits of the plain op, except for those in `_OF_ONE_SPELLING`. An op that is not listed has no traits: it
is pointwise, rounded a few times, and no worse conditioned than its size says.
"""

from __future__ import annotations

from enum import IntFlag
from functools import cache

from tensorprobe.ops.names import canonical_op


class Trait(IntFlag):
    """One thing that is known of an op. An op may have several."""

    NONE = 0
    MOVES = 1
    """Moves or selects values: equal inputs give equal bits."""
    MULTIPLIES = 2
    """Sums of products of two operands."""
    REDUCES = 4
    """Adds up along a dimension that its shapes do not show: softmax, norms."""
    COMPOSITE = 8
    """Rounds intermediate results to the dtype of the result."""
    EXPONENTIAL = 16
    """Turns an absolute error of the input into a relative error of the output."""
    DIVIDES = 32
    """Amplifies small operands: errors carry over relative to single elements."""
    DECIDES = 64
    """Is not continuous: a small error of the input may change a decision."""
    RANDOM = 128
    """Draws random numbers."""
    CANCELS = 256
    """Subtracts numbers of the size of its input, or adds up such with either sign, whatever the size of the result."""
    AVERAGES = 512
    """Divides its sum by the number of terms, or by what they add up to."""
    ROUNDED_ONCE = 1024
    """Gives for each element the exact result, rounded once."""
    ELEMENTWISE = 1 << 11
    """Computes each element of the result from the elements of the inputs at the same place."""
    CASTS = 1 << 12
    """Converts to another dtype."""
    MAKES_MASKS = 1 << 13
    """May produce -inf as a step on the way to a mask."""
    CHOOSES = 1 << 14
    """Returns indices, or values that indices choose; which of several equal values is left open."""
    RANDOM_EACH = 1 << 15
    """Draws a number of its own for each element."""
    INDEXES = 1 << 16
    """Python's indexing: the second argument is an index."""
    COORDINATES = 1 << 17
    """Uses its numbers as positions in memory: torch's kernels read out of bounds when a number is beyond all integers."""
    DTYPE_TOLERANCE = 1 << 18
    """Has a default tolerance that is the rounding of its dtype."""
    VIEW = 1 << 19
    """Returns only what it was given, in its results and in its gradients."""
    WRITES_PART = 1 << 20
    """Writes a part of its first argument and leaves the rest."""
    ALLOCATES = 1 << 21
    """Returns memory that is not initialised."""
    STORAGE = 1 << 22
    """Changes the storage of a tensor, not its numbers."""
    QUESTION = 1 << 23
    """Asks a tensor about itself, and computes nothing."""
    MAY_DO_NOTHING = 1 << 24
    """Returns its argument itself when that has the layout, dtype and device already; then it has no backward."""
    COPIES = 1 << 25
    """Returns the numbers that it was given, or a constant."""


_OF_ONE_SPELLING = Trait.VIEW | Trait.WRITES_PART | Trait.ALLOCATES | Trait.STORAGE | Trait.QUESTION
"""Traits that hold for the listed name only: `index_put_` writes a part of its argument, `index_put` does not."""

_ATTENTION = """scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu
    scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention scaled_dot_product_attention_math
    scaled_dot_product_fused_attention_overrideable"""
"""What scaled_dot_product_attention is below the API."""
_NAMES: dict[Trait, str] = {
    Trait.MOVES: """view view_as reshape reshape_as permute transpose swapaxes movedim t T mT contiguous clone copy detach
        __getitem__ getitem __setitem__ setitem expand expand_as squeeze unsqueeze flatten unflatten narrow chunk
        split tensor_split unbind stack cat concat hstack vstack embedding gather index_select select slice scatter
        as_strided masked_fill masked_select where relu relu6 max_pool1d max_pool2d max_pool3d pad roll flip tril
        triu repeat repeat_interleave tile ones zeros full tensor arange zeros_like ones_like full_like zero fill
        neg abs sign maximum minimum max min amax amin clamp topk sort argsort argmax argmin one_hot eq ne lt
        gt le ge logical_not logical_and logical_or isnan isinf isfinite to type_as cpu cuda npu float double half
        bfloat16 long int bool pixel_shuffle unfold diagonal to_copy adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices""",
    Trait.MULTIPLIES: """linear matmul mm bmm addmm baddbmm addbmm addmv mv dot inner outer einsum tensordot bilinear
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
        scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell mul
        multiply addcmul addr ger chain_matmul npu_linear npu_fusion_attention
        """
    + _ATTENTION,
    Trait.REDUCES: """softmax safe_softmax log_softmax softmin layer_norm rms_norm batch_norm group_norm instance_norm local_response_norm
        normalize cross_entropy nll_loss logsumexp cumsum cumprod var std norm vector_norm matrix_norm
        linalg_vector_norm kl_div cosine_similarity native_layer_norm native_batch_norm native_group_norm
        scaled_dot_product_attention multi_head_attention_forward lstm gru mse_loss l1_loss smooth_l1_loss
        huber_loss binary_cross_entropy binary_cross_entropy_with_logits npu_rms_norm index_add scatter_add put
        index_put embedding_dense_backward """
    + _ATTENTION,
    Trait.ROUNDED_ONCE: "add sub subtract rsub mul multiply div divide true_divide sqrt reciprocal square",
    Trait.AVERAGES: """mean cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
        binary_cross_entropy_with_logits softmax safe_softmax log_softmax softmin layer_norm rms_norm batch_norm group_norm
        instance_norm normalize native_layer_norm native_batch_norm native_group_norm var std cosine_similarity
        avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d npu_rms_norm""",
    Trait.COMPOSITE: """scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
        cross_entropy normalize einsum cosine_similarity gumbel_softmax npu_fusion_attention rotary_embedding
        local_response_norm binary_cross_entropy_with_logits log_softmax pow mish """
    + _ATTENTION,
    Trait.EXPONENTIAL: """softmax safe_softmax log_softmax softmin cross_entropy exp expm1 sigmoid logsigmoid logsumexp
        scaled_dot_product_attention softplus multi_head_attention_forward gumbel_softmax
        binary_cross_entropy_with_logits kl_div npu_fusion_attention """
    + _ATTENTION,
    Trait.DIVIDES: """div divide true_divide truediv rtruediv rdiv reciprocal rsqrt sqrt log log2 log10 log1p pow
        addcdiv normalize layer_norm rms_norm batch_norm group_norm instance_norm native_layer_norm
        native_batch_norm native_group_norm atan2 norm vector_norm std linalg_vector_norm cosine_similarity
        local_response_norm acos asin clip_grad_norm npu_rms_norm""",
    Trait.DECIDES: """threshold_backward leaky_relu_backward hardtanh_backward hardswish_backward
        relu relu6 leaky_relu hardtanh hardswish max_pool1d max_pool2d max_pool3d topk sort argsort argmax argmin
        sign round floor ceil trunc eq ne lt gt le ge where clamp maximum minimum max min amax amin fmod remainder
        multinomial unique searchsorted bucketize nonzero masked_select one_hot isnan isinf isfinite dropout
        threshold prelu elu abs celu selu hardsigmoid hardshrink softshrink median nanmedian mode kthvalue cummax cummin
        msort adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices""",
    Trait.CANCELS: """gelu silu mish softplus erf erfc expm1 log1p tanh sigmoid hardswish sin cos add sub rsub subtract lerp var
        std sum nansum mean nanmean""",
    Trait.RANDOM: """dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout
        rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal uniform exponential
        random_ poisson binomial cauchy_ geometric_ log_normal_ gumbel_softmax rrelu rrelu_with_noise _standard_gamma
        _sample_dirichlet fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices
        fractional_max_pool3d_with_indices svd_lowrank pca_lowrank""",
    Trait.RANDOM_EACH: """rand randn randint rand_like randn_like randint_like bernoulli normal uniform_ exponential_
        random_ poisson binomial cauchy_ geometric_ log_normal_ alpha_dropout dropout rrelu native_dropout multinomial
        _standard_gamma randperm""",
    Trait.ELEMENTWISE: """add sub mul div neg abs maximum minimum where masked_fill clamp clip rsub subtract multiply divide
        true_divide __setitem__ copy exp relu to to_copy type half float bfloat16 double fill masked_scatter addcmul addcdiv
        lerp""",
    Trait.CASTS: "half bfloat16 float double type_as to to_copy type",
    Trait.MAKES_MASKS: """log log2 log10 log1p logit to to_copy type type_as half bfloat16 float add sub mul multiply subtract rsub
        masked_fill""",
    Trait.CHOOSES: """max min sort topk argmax argmin argsort msort cummax cummin kthvalue median nanmedian mode""",
    Trait.INDEXES: "__getitem__ __setitem__",
    Trait.COORDINATES: "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d",
    Trait.DTYPE_TOLERANCE: "pinv pinverse matrix_rank lstsq",
    Trait.VIEW: """view view_as transpose swapaxes swapdims permute movedim t squeeze unsqueeze narrow select slice unbind chunk split
        tensor_split diagonal detach alias unflatten""",
    Trait.WRITES_PART: """__setitem__ index_copy_ index_put_ index_fill_ index_add_ scatter_ scatter_add_ masked_scatter_
        masked_fill_ put_""",
    Trait.COPIES: """clone detach copy contiguous ones zeros full tensor scalar_tensor zeros_like ones_like full_like new_zeros
        new_ones new_full new_tensor to_copy""",
    Trait.ALLOCATES: "empty empty_like empty_strided empty_permuted new_empty new_empty_strided empty_with_format empty_quantized",
    Trait.STORAGE: """set_ resize_ resize resize_as_ _resize_output_ set_data storage_resize_ detach alias lift
        lift_fresh _has_same_storage_numel""",
    Trait.MAY_DO_NOTHING: "contiguous to type type_as cpu cuda npu xpu float double half bfloat16",
    Trait.QUESTION: """size dim ndimension numel nelement stride storage_offset is_contiguous data_ptr const_data_ptr
        element_size storage untyped_storage typed_storage _typed_storage is_floating_point is_complex is_signed
        is_conj is_neg is_inference is_pinned is_shared is_set_to is_coalesced get_device item tolist numpy
        register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ has_names dense_dim sparse_dim
        dim_order __repr__ __str__ __format__ __len__ __hash__ __bool__ __int__ __float__ __index__ __complex__
        __contains__ __reduce_ex__ __reduce__ __setstate__ __deepcopy__ __dir__ __dlpack__ __dlpack_device__
        __array__ _is_view _is_all_true _has_symbolic_sizes_strides _make_subclass share_memory_ set_default_device
        __get__ __set__ __delete__""",
}  # fmt: skip

_OF_MODULES = (
    Trait.COMPOSITE | Trait.REDUCES | Trait.MULTIPLIES | Trait.EXPONENTIAL | Trait.DIVIDES | Trait.DECIDES
)  # a module may hold any op
_CLASSES = {
    name: op
    for op, names in {
        "linear": "Linear NonDynamicallyQuantizableLinear LazyLinear",
        "bilinear": "Bilinear",
        "conv2d": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
        "layer_norm": "LayerNorm",
        "rms_norm": "RMSNorm",
        "group_norm": "GroupNorm",
        "batch_norm": "BatchNorm1d BatchNorm2d BatchNorm3d",
        "gelu": "GELU",
        "silu": "SiLU",
        "mish": "Mish",
        "relu": "ReLU ReLU6 LeakyReLU PReLU",
        "tanh": "Tanh",
        "softplus": "Softplus",
        "elu": "ELU CELU SELU",
        "softmax": "Softmax",
        "avg_pool2d": "AvgPool1d AvgPool2d AvgPool3d",
    }.items()
    for name in names.split()
}
"""Classes of torch that compute one op. A class of the program may have such a name too: it computes the like."""
_TRAITS: dict[str, Trait] = {}
for _trait, _names in _NAMES.items():
    for _name in _names.split():
        _TRAITS[_name] = _TRAITS.get(_name, Trait.NONE) | _trait

_REFUSED: dict[str, str] = {
    name: reason
    for reason, names in {
        "returns memory that is not initialised": _NAMES[Trait.ALLOCATES],
        "is about devices, not about values": """cuda npu xpu mps ipu hpu mtia is_shared is_pinned pin_memory _pin_memory
            record_stream""",
        "manages memory and computes no values": """set_ set_data resize resize_ resize_as_ resize_as_sparse_ _resize_output
            _resize_output_ storage untyped_storage storage_type share_memory_ data_ptr const_data_ptr _from_blob
            frombuffer from_numpy _typed_storage typed_storage numpy tolist __array__ __array_wrap__ __dlpack__
            __dlpack_device__""",
        "reads or writes files": "from_file save load tofile read_file write_file",
        "is about objects of Python, not about values": """apply_ map_ map2_ register_hook
            register_post_accumulate_grad_hook module_load __reduce_ex__ __reduce__ __setstate__ __deepcopy__
            _clear_non_serializable_cached_data __format__ __repr__ backward _backward""",
        "changes the state of the process and computes no values": """seed initial_seed manual_seed get_rng_state set_rng_state
            _use_cudnn_ctc_loss _cufft_set_plan_cache_max_size _cufft_clear_plan_cache""",
    }.items()
    for name in names.split()
}
"""Parts of names that are not replayed → why not."""

_MOVING_COLLECTIVES = ("broadcast", "all_gather", "recv", "irecv", "scatter", "all_to_all", "gather", "send", "isend")
"""Beginnings of the names of collectives that add up nothing."""
_RECEIVING_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "recv", "irecv", "scatter")
_RECEIVING_KEYWORDS = tuple(f"input.kwargs.{name}" for name in ("tensor_list", "output", "gather_list"))

MOVING_NODES = frozenset(
    f"{name}Backward{number}"
    for name in "View UnsafeView ReshapeAlias Alias T Transpose Permute Squeeze Unsqueeze Clone Unbind Split Slice Select".split()
    for number in range(3)
)
"""Names of autograd nodes whose gradients hold nothing that they were not given."""


@cache
def short_name(op: str) -> str:
    """Return the name without family and overload: `add_` for `Tensor.add_`, `mm` for `Aten.mm.default`.

    A compiled program calls `Ops.aten.mm.default`.
    """
    family, _, rest = (f"Aten.{op[9:]}" if op.startswith("Ops.aten.") else op).partition(".")
    return rest.split(".")[0] if family == "Aten" else rest.rpartition(".")[2]


@cache
def plain_name(op: str) -> str:
    """Return the name of the op that is not in place: `add` for `Tensor.add_`, `Torch._foreach_add_`, `Tensor.__iadd__`."""
    name = short_name(canonical_op(op))
    return name if name.startswith("__") else name.removeprefix("_foreach_").rstrip("_")


@cache
def traits_of(op: str) -> Trait:
    """Return the traits of `Functional.conv2d`, `Torch._foreach_add_`, `Aten.mm.default`, `Module.layers.0.Linear`."""
    if has_parts(op):
        known = _CLASSES.get(op.rpartition(".")[2]) if op.startswith("Module.") else None
        if known is None or _TRAITS[known] & Trait.MOVES:  # no name promises that nothing is computed
            return _OF_MODULES
        return _TRAITS[known] | Trait.COMPOSITE
    name = short_name(canonical_op(op))
    if is_collective(op):
        moves = name.startswith(_MOVING_COLLECTIVES)
        return Trait.MOVES if moves else Trait.REDUCES if "reduce" in name else Trait.NONE
    found = _TRAITS.get(name, Trait.NONE)
    for spelling in (plain_name(op), name.strip("_")):
        found |= _TRAITS.get(spelling, Trait.NONE) & ~_OF_ONE_SPELLING
    return found


def has(op: str, trait: Trait) -> bool:
    """Return whether an op has at least one of these traits."""
    return bool(traits_of(op) & trait)


def breaks_ties(op: str) -> bool:
    """Return whether the op may choose any of several equal values, and so decide which of them gets the gradient."""
    return has(op, Trait.CHOOSES) or "max_pool" in short_name(op)


def has_parts(op: str) -> bool:
    """Return whether an op is code of the program: a module, or a `torch.autograd.Function`. The calls in it are recorded too."""
    return op.startswith(("Module.", "Function."))


def is_collective(name: str) -> bool:
    """Return whether an op, or a call, is a collective of torch.distributed."""
    return name.startswith("Distributed.")


def received_slots(op: str) -> tuple[str, ...]:
    """Return the beginnings of the slots that a collective only writes to: their contents before the call do not matter."""
    if not is_collective(op):
        return ()
    name = short_name(op)
    if name.startswith(_RECEIVING_COLLECTIVES):
        return (*_RECEIVING_KEYWORDS, "input.0")
    return (*_RECEIVING_KEYWORDS, "input.1") if name == "gather" else _RECEIVING_KEYWORDS


def why_not_replayed(op: str) -> str | None:
    """Return why a call of this op says nothing when it is run alone; None when it can be run."""
    if is_collective(op):
        return "a collective needs the other ranks"
    if op.startswith("Module."):
        return "a module is not run as a whole: the calls in it are"
    refused = [part for part in op.split(".")[1:] if part in _REFUSED]
    return f"{refused[0]} {_REFUSED[refused[0]]}" if refused else None


_IMAGES = ("conv", "pool", "batch_norm", "group_norm", "instance_norm", "interpolate", "pixel")
_HEADS = ("softmax", "matmul", "bmm", "attention", "masked_fill", "dropout", "div", "einsum", "baddbmm")


def axis_names(op: str, dimensions: int) -> list[str]:
    """Return what people call each axis: `["heads", "rows", "columns"]`. A guess from the op and the number of axes."""
    short = plain_name(op)
    inner = ["rows", "columns"][-dimensions:] if dimensions > 1 else ["elements"][:dimensions]
    outer = dimensions - len(inner)
    if outer <= 0:
        return inner
    if any(part in short for part in _IMAGES) and outer < 3:
        return [*["images", "channels"][:outer], *inner] if outer == 2 else ["images", "channels", "columns"]
    if outer == 2 and any(part in short for part in _HEADS):
        return ["batches", "heads", *inner]
    return [*(f"axis-{axis} slices" for axis in range(outer)), *inner] if outer > 1 else ["batches", *inner]

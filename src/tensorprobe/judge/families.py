"""What kind of arithmetic an op does, by its name: how its result is rounded and how it passes on errors of its inputs.

Data only. An op that is not listed counts as pointwise: rounded a few times, no worse conditioned than its size says.
"""

from __future__ import annotations

from enum import IntFlag
from functools import cache


class Family(IntFlag):
    """Traits of an op; it may have several."""

    POINTWISE = 0
    EXACT = 1
    """Moves or selects values: equal inputs give equal bits."""
    PRODUCT = 2
    """Sums of products of two operands."""
    REDUCES = 4
    """Adds up along a dimension without saying so in its shapes: softmax, norms."""
    COMPOSITE = 8
    """Several roundings to the result's own dtype on the way."""
    EXPONENTIAL = 16
    """An absolute error of the input becomes a relative one of the output."""
    DIVIDES = 32
    """Small operands are blown up: an error is passed on relative to single elements."""
    JUMPS = 64
    """Not continuous: a noisy input may turn a decision."""
    RANDOM = 128
    """Draws random numbers."""
    ROUNDED_ONCE = 1024
    """Each element is the exact result, rounded once."""
    AVERAGES = 512
    """Divides its sum by the number of terms, or by what they add up to."""
    CANCELS = 256
    """Subtracts numbers of the size of its input, whatever the size of the result."""


_MEMBERS: dict[Family, str] = {
    Family.EXACT: """view view_as reshape reshape_as permute transpose swapaxes movedim t T mT contiguous clone copy copy_ detach
        __getitem__ getitem __setitem__ setitem expand expand_as squeeze unsqueeze flatten unflatten narrow chunk
        split tensor_split unbind stack cat concat hstack vstack embedding gather index_select select slice
        as_strided masked_fill masked_select where relu relu6 max_pool1d max_pool2d max_pool3d pad roll flip tril
        triu repeat repeat_interleave tile ones zeros full arange zeros_like ones_like full_like zero_ zero fill_
        fill neg abs sign maximum minimum max min amax amin clamp topk sort argsort argmax argmin one_hot eq ne lt
        gt le ge logical_not logical_and logical_or isnan isinf isfinite to type_as cpu cuda npu float double half
        bfloat16 long int bool all_gather all_gather_into_tensor broadcast scatter gather_object send recv
        pixel_shuffle unfold diagonal""",
    Family.PRODUCT: """linear matmul __matmul__ mm bmm addmm baddbmm addbmm addmv mv dot inner outer einsum tensordot bilinear
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
        scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell mul
        multiply addcmul addr ger chain_matmul npu_linear npu_fusion_attention""",
    Family.REDUCES: """softmax log_softmax softmin layer_norm rms_norm batch_norm group_norm instance_norm local_response_norm
        normalize cross_entropy nll_loss logsumexp cumsum cumprod var std norm vector_norm matrix_norm
        linalg_vector_norm kl_div cosine_similarity native_layer_norm native_batch_norm native_group_norm
        scaled_dot_product_attention multi_head_attention_forward lstm gru mse_loss l1_loss smooth_l1_loss
        huber_loss binary_cross_entropy binary_cross_entropy_with_logits npu_rms_norm all_reduce reduce_scatter
        reduce index_add scatter_add put index_put""",
    Family.ROUNDED_ONCE: "add sub subtract rsub mul multiply div divide true_divide sqrt reciprocal square",
    Family.AVERAGES: """mean cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
        binary_cross_entropy_with_logits softmax log_softmax softmin layer_norm rms_norm batch_norm group_norm
        instance_norm normalize native_layer_norm native_batch_norm native_group_norm var std cosine_similarity
        avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d npu_rms_norm""",
    Family.COMPOSITE: """scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
        cross_entropy normalize einsum cosine_similarity gumbel_softmax npu_fusion_attention rotary_embedding
        local_response_norm binary_cross_entropy_with_logits""",
    Family.EXPONENTIAL: """softmax log_softmax softmin cross_entropy exp expm1 sigmoid logsigmoid logsumexp
        scaled_dot_product_attention softplus multi_head_attention_forward gumbel_softmax
        binary_cross_entropy_with_logits kl_div npu_fusion_attention""",
    Family.DIVIDES: """div divide true_divide __truediv__ __rtruediv__ rdiv reciprocal rsqrt sqrt log log2 log10 log1p pow __pow__
        addcdiv normalize layer_norm rms_norm batch_norm group_norm instance_norm native_layer_norm
        native_batch_norm native_group_norm atan2 norm vector_norm std linalg_vector_norm cosine_similarity
        local_response_norm acos asin clip_grad_norm npu_rms_norm""",
    Family.JUMPS: """relu relu6 leaky_relu hardtanh hardswish max_pool1d max_pool2d max_pool3d topk sort argsort argmax argmin
        sign round floor ceil trunc eq ne lt gt le ge where clamp maximum minimum max min amax amin fmod remainder
        multinomial unique searchsorted bucketize nonzero masked_select one_hot isnan isinf isfinite dropout
        threshold prelu elu abs""",
    Family.RANDOM: """dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rand randn randint randperm
        rand_like randn_like bernoulli multinomial normal normal_ uniform_ exponential_ random_ gumbel_softmax rrelu
        native_dropout""",
    Family.CANCELS: """gelu silu mish softplus erf erfc expm1 log1p tanh sigmoid hardswish sin cos add sub rsub subtract lerp var
        std""",
}  # fmt: skip

_TRAITS: dict[str, Family] = {}
for _family, _names in _MEMBERS.items():
    for _name in _names.split():
        _TRAITS[_name] = _TRAITS.get(_name, Family.POINTWISE) | _family


@cache
def family_of(op: str) -> Family:
    """The traits of `Functional.conv2d`, `Torch._foreach_add_`, `Aten.mm.default`; modules have none that are known."""
    home, _, rest = op.partition(".")
    if home == "Module":
        return Family.COMPOSITE | Family.REDUCES | Family.PRODUCT | Family.EXPONENTIAL | Family.DIVIDES | Family.JUMPS
    name = rest.split(".")[0] if home == "Aten" else rest.rpartition(".")[2]
    for shape in (name, name.rstrip("_"), name.removeprefix("_foreach_").rstrip("_"), name.strip("_")):
        if shape in _TRAITS:
            return _TRAITS[shape]
    return Family.POINTWISE

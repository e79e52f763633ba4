"""Which APIs the older tools record: their list of wrapped functions, its levels of risk, and files that change the list.

A dump under an old name holds these and no others, so that it has the rows that the older tool's dump of the same training
has. Families that the list does not close (torch_npu, ATen) are recorded whole. `support_wrap_ops.yaml` is the same list as
a file, for users to edit: a line that is commented out or taken away leaves its API out, a line that is added brings one in.
The file's form is flat (groups, items, comments); anything else is an error with its line. Imports no torch.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.files import read_settings
from tensorprobe.legacy import msprobe
from tensorprobe.model.sink import CallRules
from tensorprobe.text import plain

GROUPS = {
    "functional": "Functional",
    "tensor": "Tensor",
    "torch": "Torch",
    "_VF": "VF",
    "torch_npu": "NPU",
    "distributed": "Distributed",
    "aten": "Aten",
    "npu_distributed": "Distributed",
    "mindspeed": "MindSpeed",
}
"""Group of the file → what the names of its ops begin with. The last two stand in newer files of msprobe itself."""
OPEN = ("NPU", "Aten", "MindSpeed")
"""Families that are recorded whole; a line that is commented out leaves its op out."""
_CLOSED = frozenset(f"{family}." for family in GROUPS.values() if family not in OPEN)
"""Stand in a set of ops, so that a family of which the set has no op is closed all the same."""

_FUNCTIONAL = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d
    adaptive_max_pool3d_with_indices affine_grid alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm
    bilinear binary_cross_entropy binary_cross_entropy_with_logits celu celu_ channel_shuffle conv1d conv2d conv3d
    conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity
    cross_entropy ctc_loss dropout dropout1d dropout2d dropout3d elu elu_ embedding embedding_bag
    feature_alpha_dropout fold fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices gaussian_nll_loss gelu glu grid_sample group_norm gumbel_softmax hardshrink
    hardsigmoid hardswish hardtanh hardtanh_ hinge_embedding_loss huber_loss instance_norm interpolate kl_div
    l1_loss layer_norm leaky_relu leaky_relu_ linear local_response_norm log_softmax logsigmoid lp_pool1d
    lp_pool2d lp_pool3d margin_ranking_loss max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices
    max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mish mse_loss
    multi_head_attention_forward multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
    normalize one_hot pad pairwise_distance pdist pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu relu6
    relu_ rrelu rrelu_ scaled_dot_product_attention selu selu_ sigmoid silu smooth_l1_loss soft_margin_loss
    softmax softmin softplus softshrink softsign tanh tanhshrink threshold threshold_ triplet_margin_loss
    triplet_margin_with_distance_loss unfold upsample upsample_bilinear upsample_nearest
"""
_TENSOR_AND_TORCH = """
    abs abs_ absolute acos acos_ acosh acosh_ add addbmm addcdiv addcmul addmm addmv addmv_ addr all amax amin
    aminmax angle any arccos arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan_
    arctanh arctanh_ argmax argmin argsort argwhere asin asin_ asinh asinh_ atan atan2 atan_ atanh atanh_ baddbmm
    bernoulli bincount bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to ceil ceil_ cholesky
    cholesky_inverse cholesky_solve chunk clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_
    copysign cos cos_ cosh cosh_ count_nonzero cov cummax cummin cumprod cumsum deg2rad deg2rad_ det diag
    diag_embed diagflat diagonal diagonal_scatter diff digamma dist div divide dot dsplit eig eq equal erf erf_
    erfc erfc_ erfinv exp exp2 exp2_ exp_ expm1 expm1_ fill_ fix fix_ flatten flip fliplr flipud float_power floor
    floor_ floor_divide fmax fmin fmod frac frac_ frexp gather gcd gcd_ ge geqrf ger greater greater_equal gt
    hardshrink heaviside histc histogram hsplit hypot i0 i0_ igamma igammac index_add index_copy index_fill
    index_put index_put_ index_select inner inverse isclose isfinite isinf isnan isneginf isposinf kron kthvalue
    lcm lcm_ ldexp ldexp_ le lerp less less_equal lgamma log log10 log10_ log1p log1p_ log2 log2_ log_ log_softmax
    logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logit_ logsumexp
    lstsq lt lu_solve masked_fill masked_scatter masked_select matmul matrix_exp matrix_power max maximum mean
    median min minimum mm mode moveaxis movedim msort mul multinomial multiply mv mvlgamma nan_to_num nan_to_num_
    nanmean nanmedian nanquantile nansum narrow narrow_copy ne neg neg_ negative negative_ nextafter nonzero norm
    not_equal outer permute pinverse polygamma pow prelu prod qr quantile rad2deg rad2deg_ ravel reciprocal
    reciprocal_ relu relu_ remainder renorm repeat_interleave reshape resize_as_ resolve_neg roll rot90 round
    round_ rsqrt rsqrt_ scatter scatter_add select sgn sigmoid sigmoid_ sign signbit sin sin_ sinc sinc_ sinh
    sinh_ slogdet smm softmax solve sort split split_with_sizes sqrt sqrt_ square square_ squeeze sspaddmm std
    stft sub subtract sum svd swapaxes swapdims symeig t take take_along_dim tan tan_ tanh tanh_ tensor_split tile
    topk transpose triangular_solve tril triu true_divide trunc trunc_ unbind unflatten unique_consecutive
    unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze var vdot vsplit where xlogy xlogy_
"""
_TENSOR = """
    __add__ __and__ __bool__ __div__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__ __iand__ __idiv__
    __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__ __irshift__ __isub__ __ixor__ __le__ __lshift__
    __lt__ __matmul__ __mod__ __mul__ __ne__ __nonzero__ __or__ __pow__ __radd__ __rdiv__ __rmod__ __rmul__
    __ror__ __rpow__ __rshift__ __rsub__ __rxor__ __setitem__ __sub__ __truediv__ __xor__ absolute_ add_ addbmm_
    addcdiv_ addcmul_ addmm_ addr_ adjoint align_as align_to allclose arctan2_ atan2_ baddbmm_ bernoulli_ bfloat16
    bitwise_and_ bitwise_left_shift bitwise_left_shift_ bitwise_not_ bitwise_or_ bitwise_right_shift
    bitwise_right_shift_ bitwise_xor_ bool byte cauchy_ cfloat char conj_physical copysign_ corrcoef cumprod_
    cumsum_ digamma_ div_ divide_ double eq_ erfinv_ expand expand_as exponential_ fill_diagonal_ float
    float_power_ floor_divide_ fmod_ ge_ geometric_ greater_ greater_equal_ gt_ half heaviside_ hypot_ igamma_
    igammac_ index_add_ index_copy_ index_fill_ int isreal le_ lerp_ less_ less_equal_ lgamma_ log_normal_
    logical_and_ logical_not_ logical_or_ logical_xor_ long lt_ lu map2_ map_ masked_fill_ masked_scatter_ mul_
    multiply_ mvlgamma_ ne_ nextafter_ normal_ not_equal_ numpy orgqr ormqr polygamma_ pow_ put_ q_zero_point
    remainder_ renorm_ repeat reshape_as resize_ scatter_ scatter_add_ sgn_ short sign_ slice_scatter squeeze_
    stride sub_ sum_to_size swapdims_ t_ to transpose_ tril_ triu_ true_divide_ type_as unfold unique unsqueeze_
    view_as
"""
_TORCH = """
    _adaptive_avg_pool2d _add_relu _add_relu_ _aminmax _batch_norm_impl_index _convolution _foreach_norm
    _softmax_backward_data adaptive_avg_pool1d adaptive_max_pool1d affine_grid_generator align_tensors
    alpha_dropout alpha_dropout_ arange atleast_1d atleast_2d atleast_3d avg_pool1d bartlett_window
    batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats bilinear
    binary_cross_entropy_with_logits binomial blackman_window block_diag broadcast_tensors bucketize
    cartesian_prod cat cdist celu celu_ chain_matmul channel_shuffle choose_qparams_optimized clone column_stack
    combinations concat concatenate constant_pad_nd conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution cosine_embedding_loss cosine_similarity cross ctc_loss
    cumulative_trapezoid dropout dropout_ dsmm dstack einsum embedding embedding_bag embedding_renorm_ eye
    feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ frobenius_norm full full_like
    grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell hamming_window hann_window
    hinge_embedding_loss histogramdd hsmm hspmm hstack instance_norm isin istft kaiser_window kl_div layer_norm
    linspace logspace lstm lstm_cell lu_unpack margin_ranking_loss matrix_rank max_pool1d max_pool1d_with_indices
    max_pool2d max_pool3d native_batch_norm native_group_norm native_layer_norm native_norm norm_except_dim normal
    nuclear_norm ones_like pairwise_distance pdist pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar
    range real row_stack rrelu rrelu_ rsub saddmm scalar_tensor searchsorted selu selu_ sparse_coo_tensor spmm
    stack std_mean tensordot threshold threshold_ trapz tril_indices triplet_margin_loss triu_indices vander
    var_mean vstack
"""
_LINEAR_ALGEBRA = """
    cholesky_ex cond cross det diagonal householder_product inv inv_ex ldl_factor ldl_factor_ex lstsq lu lu_factor
    lu_factor_ex matmul matrix_exp matrix_norm matrix_power matrix_rank multi_dot norm pinv qr slogdet solve
    solve_ex svd svdvals tensorsolve vander vecdot vector_norm
"""
_DISTRIBUTED = """
    _all_gather_base _reduce_scatter_base all_gather all_gather_into_tensor all_reduce all_to_all
    all_to_all_single batch_isend_irecv broadcast gather irecv isend recv reduce reduce_scatter
    reduce_scatter_tensor scatter send
"""
_NPU = """
    _npu_dropout empty_with_format fast_gelu npu_alloc_float_status npu_anchor_response_flags npu_batch_nms
    npu_bert_apply_adam npu_bmmV2 npu_bounding_box_decode npu_bounding_box_encode npu_broadcast npu_ciou
    npu_ciou_backward npu_clear_float_status npu_confusion_transpose npu_deformable_conv2d npu_diou
    npu_diou_backward npu_dtype_cast npu_fusion_attention npu_get_float_status npu_giou npu_grid_assign_positive
    npu_ifmr npu_indexing npu_iou npu_layer_norm_eval npu_linear npu_masked_fill_range npu_max npu_mish npu_nms_v4
    npu_nms_with_mask npu_normalize_batch npu_one_hot npu_pad npu_ps_roi_pooling npu_rms_norm npu_roi_align
    npu_rotary_mul npu_scaled_masked_softmax npu_scatter npu_sign_bits_pack npu_sign_bits_unpack npu_slice
    npu_sort_v2 npu_stride_add npu_sub_sample npu_swiglu npu_transpose npu_yolo_boxes_encode one_
"""
NAMES = {
    "functional": (*_FUNCTIONAL.split(),),
    "tensor": (*_TENSOR_AND_TORCH.split(), *_TENSOR.split()),
    "torch": (*_TENSOR_AND_TORCH.split(), *_TORCH.split(), *(f"linalg.{name}" for name in _LINEAR_ALGEBRA.split())),
    "_VF": ("lstm",),
    "torch_npu": (*_NPU.split(),),
    "distributed": (*_DISTRIBUTED.split(),),
    "aten": (),
}
"""Group → the names in it, as facts of the older tools. They name `linalg.norm` in the list, and `Torch.norm` in a dump."""

_LOW_RISK = frozenset(
    """
    __bool__ __getitem__ align_as align_to arange atleast_1d atleast_2d atleast_3d bfloat16 bool byte cat cfloat
    char chunk clamp clone column_stack concat concatenate diag diag_embed diagflat double dsplit dstack empty
    empty_like expand expand_as eye flatten float full full_like half hsplit hstack identity int linspace logspace
    long moveaxis movedim numpy ones ones_like permute ravel repeat repeat_interleave reshape reshape_as row_stack
    split split_with_sizes squeeze stack stride swapaxes swapdims tensor_split tile to transpose tril tril_indices
    triu triu_indices type_as unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
    view view_as vsplit vstack zeros zeros_like
""".split()
)
"""What only moves or makes values; `risk_level` FOCUS, the default, leaves it out."""
_CORE = frozenset(
    """
    __matmul__ _batch_norm_impl_index _convolution addbmm addbmm_ addmm addmm_ addmv addmv_ addr addr_ baddbmm
    baddbmm_ batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
    batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats bilinear
    bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution embedding
    embedding_bag group_norm instance_norm layer_norm linear local_response_norm matmul mm multi_head_attention_forward
    mv scaled_dot_product_attention
""".split()
)
RISK_LEVELS = ("CORE", "FOCUS", "ALL")

_GROUP = re.compile(r"(\w+)\s*:\s*(?:\[\s*\]\s*)?(?:#.*)?")
_ITEM = re.compile(r"""\s*(?P<off>#?)\s*-\s+(?P<quote>["']?)(?P<name>[A-Za-z_][\w.]*)(?P=quote)\s*(?:#.*)?""", re.ASCII)
_KNOWN = {group.lower(): family for group, family in GROUPS.items()}


def _op(family: str, name: str) -> str:
    return f"{family}.{name.removeprefix('linalg.')}"


@cache
def shipped_ops() -> frozenset[str]:
    """Return the ops of the list, as a dump names them: `Functional.gelu`, `Tensor.__add__`."""
    return frozenset(_op(GROUPS[group], name) for group, names in NAMES.items() for name in names)


def closed(ops: frozenset[str]) -> frozenset[str]:
    """Return the ops of closed families, and what closes those: `only` of CallRules."""
    return frozenset(op for op in ops if not op.startswith(OPEN)) | _CLOSED


RULES = CallRules(operators=True, only_given=True, inner=False, only=closed(shipped_ops()))
"""Calls are named, numbered and chosen as by the older tools."""


def at_risk(ops: frozenset[str], level: str) -> frozenset[str]:
    """Return the ops of a level of risk: CORE, FOCUS (all but what only moves or makes values) or ALL."""
    if level == "FOCUS":
        return frozenset(op for op in ops if not is_low_risk(op))
    if level == "CORE":
        return _CLOSED | {op for op in ops if op.rpartition(".")[2] in _CORE or op.startswith("Distributed.")}
    return ops


def is_low_risk(op: str) -> bool:
    """Return whether the op only moves or makes values."""
    return op.rpartition(".")[2] in _LOW_RISK


def read_list(path: str | os.PathLike[str] | None = None) -> tuple[frozenset[str], frozenset[str]]:
    """Return the ops to record, and the ops of open families to leave out; from this file, the edited one, or our own list."""
    file = msprobe.LIST_OF_APIS if path is None else Path(path)
    if file is None:
        return closed(shipped_ops()), frozenset()
    on: set[str] = set()
    off: set[str] = set()
    family = ""
    for number, line in enumerate(_read_lines(file), start=1):
        if match := _ITEM.fullmatch(line):
            if not match["off"] and not family:
                raise SettingsError(f"'{plain(file)}', line {number}: {plain(line.strip())!r} stands in no group.")
            if family:
                (off if match["off"] else on).add(_op(family, match["name"]))
        elif match := _GROUP.fullmatch(line):
            family = _family(match[1], file, number)
        elif line.strip() and not line.lstrip().startswith("#"):
            raise SettingsError(
                f"'{plain(file)}', line {number}: {plain(line.strip())!r} is neither a group ('tensor:') nor an API ('  - add')."
            )
    return closed(frozenset(on)), frozenset(off - on)


def _read_lines(path: Path) -> list[str]:
    try:
        return read_settings(path).decode("utf-8").splitlines()
    except OSError as error:
        raise SettingsError(f"'{plain(path)}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"'{plain(path)}' is no text: {error}.") from None


def _family(group: str, path: Path, number: int) -> str:
    if group.lower() not in _KNOWN:
        raise SettingsError(
            f"'{plain(path)}', line {number}: there is no group {group!r}.{did_you_mean(group, GROUPS)}\n"
            f"  There are {', '.join(GROUPS)}."
        )
    return _KNOWN[group.lower()]

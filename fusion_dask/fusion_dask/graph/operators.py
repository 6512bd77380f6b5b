"""The operators that a graph may contain, and how their names and tags become torch objects.

A stage program arrives as data from another machine. A target in it means something only if it is
listed here, so this table is what a stranger's program can make a worker do: pure arithmetic on
tensors. Nothing listed writes to its arguments, reads a file, takes a callable or an arbitrary
storage, or has a result whose size depends on data.

Invariant: `resolve` returns functional `aten` overloads of listed names, and nothing else.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion_dask.errors import ProgramError
from fusion_dask.graph.ir import Argument, Operator, Tag

__all__ = [
    "ALLOWED",
    "TAG_NAMES",
    "bound_arguments",
    "draws_random_numbers",
    "is_allowed",
    "resolve",
    "schema",
    "tag_value",
]

_FAMILIES: Mapping[str, str] = {
    "pointwise": """
        abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not
        bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clone copy copysign cos cosh
        deg2rad fill
        detach digamma div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod
        frac ge gelu glu gt hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le
        leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and
        logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num
        ne neg pow prelu reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu
        sin sinc sinh softplus softshrink sqrt square sub tan tanh threshold trunc where
        xlogy _to_copy to type_as contiguous positive hardshrink real imag view_as_real
        view_as_complex polar complex conj _conj resolve_conj alias lift_fresh_copy
    """,
    "reductions": """
        all amax amin any argmax argmin argsort cummax cummin cumprod cumsum linalg_vector_norm
        logcumsumexp logsumexp max mean median min mode nanmean nansum norm prod sort std std_mean
        sum topk var var_mean cosine_similarity count_nonzero diff dist pairwise_distance cdist
    """,
    "matrix": """
        addbmm addmm addmv addr baddbmm bilinear bmm dot einsum inner linear matmul mm mv outer
        scaled_dot_product_attention tensordot ger kron linalg_cross cross trace vdot
    """,
    "shape": """
        as_strided atleast_1d broadcast_tensors meshgrid atleast_2d broadcast_to cat chunk column_stack concat diagonal
        diag_embed expand expand_as flatten flip hstack vstack movedim narrow permute pixel_shuffle
        pixel_unshuffle repeat repeat_interleave reshape roll rot90 select slice split
        split_with_sizes squeeze stack swapaxes t tile transpose tril triu unbind unflatten unfold
        unsqueeze view_as numpy_T unsafe_split unsafe_chunk channel_shuffle
    """,
    "indexing": """
        embedding embedding_bag gather index index_add index_copy index_fill index_put index_select
        masked_scatter one_hot scatter scatter_add scatter_reduce searchsorted bucketize select_scatter
        slice_scatter take take_along_dim isin diagonal_scatter
    """,
    "factories": """
        arange eye full full_like linspace new_full new_ones new_zeros ones ones_like
        scalar_tensor tril_indices triu_indices zeros zeros_like logspace
    """,
    "layers": """
        _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d avg_pool1d avg_pool2d avg_pool3d batch_norm constant_pad_nd conv1d conv2d
        conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution group_norm grid_sampler
        grid_sampler_2d affine_grid_generator gru instance_norm layer_norm log_softmax lstm max_pool1d
        max_pool2d max_pool2d_with_indices max_pool3d native_batch_norm native_group_norm
        native_layer_norm pad reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        rms_norm rnn_relu rnn_tanh softmax _softmax _log_softmax upsample_bicubic2d
        upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_trilinear3d im2col col2im _safe_softmax
    """,
    "losses": """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
        hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss nll_loss
        nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss multilabel_margin_loss
    """,
    "random": """
        alpha_dropout bernoulli dropout feature_dropout multinomial native_dropout normal_functional
        rand rand_like randint randint_like randn randn_like randperm rrelu uniform normal
        exponential
    """,
}

ALLOWED: frozenset[str] = frozenset(" ".join(_FAMILIES.values()).split())
"""Names of the allowed operators, without overload."""

_DTYPES = {
    name: getattr(torch, name)
    for name in [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
    ]
}
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
TAG_NAMES: Mapping[str, Mapping[str, Any]] = {
    "dtype": _DTYPES,
    "layout": _LAYOUTS,
    "memory_format": _MEMORY_FORMATS,
    "device": {"self": None},
}
"""For each kind of tag, the names it may have."""


def _functional(overload: torch._ops.OpOverload) -> bool:
    """The overload writes to none of its arguments and returns tensors only."""
    found = overload._schema
    return (
        not found.is_mutable
        and len(found.returns) > 0
        and all(str(r.type) in ("Tensor", "List[Tensor]") for r in found.returns)
        and not any(str(a.type) in ("Storage", "Any", "Stream") for a in found.arguments)
    )


@functools.cache
def _lookup(target: str) -> torch._ops.OpOverload | None:
    parts = target.split(".")
    if len(parts) != 3 or parts[0] != "aten" or parts[1] not in ALLOWED:
        return None
    packet = getattr(torch.ops.aten, parts[1], None)
    if packet is None or parts[2] not in packet.overloads():
        return None
    overload: torch._ops.OpOverload = getattr(packet, parts[2])
    return overload if _functional(overload) else None


def is_allowed(target: str) -> bool:
    """Whether a graph may contain this operator.

    >>> is_allowed("aten.linear.default"), is_allowed("aten.from_file.default")
    (True, False)
    """
    return _lookup(target) is not None


def resolve(target: str) -> Callable[..., Any]:
    """The torch operator of a target such as `aten.linear.default`.

    Raises:
        ProgramError: The target is not in the table.
    """
    found = _lookup(target)
    if found is None:
        raise ProgramError(
            f"operator {target[:80]!r} is not allowed in a program: it was made by a newer version "
            "or tampered with; capture the model again with this version"
        )
    return found


def schema(target: str) -> torch.FunctionSchema:
    """The torch schema of an allowed operator."""
    found = _lookup(target)
    if found is None:
        resolve(target)
    assert found is not None
    return found._schema


def tag_value(tag: Tag, device: torch.device | str) -> Any:  # noqa: ANN401 - four torch types
    """The torch object that a tag stands for; the tag `device` means the given device.

    >>> tag_value(Tag("dtype", "bfloat16"), "cpu")
    torch.bfloat16

    Raises:
        ProgramError: The tag is not one of `TAG_NAMES`.
    """
    names = TAG_NAMES.get(tag.kind)
    if names is None or tag.name not in names:
        raise ProgramError(f"{tag.kind[:40]} {tag.name[:40]!r} is not allowed in a program")
    return torch.device(device) if tag.kind == "device" else names[tag.name]


def bound_arguments(operator: Operator) -> dict[str, Argument]:
    """The arguments of a call by their names in the schema, defaults included."""
    arguments = schema(operator.target).arguments
    bound: dict[str, Argument] = {
        a.name: a.default_value for a in arguments if a.has_default_value()
    }
    bound.update(zip((a.name for a in arguments), operator.args, strict=False))
    bound.update(operator.kwargs)
    return bound


def draws_random_numbers(operator: Operator) -> bool:
    """Whether the operator draws random numbers with these arguments.

    Attention draws only with `dropout_p` > 0, dropout only when it trains and p > 0.
    """
    name = operator.target.split(".")[1]
    if name == "scaled_dot_product_attention":
        p = bound_arguments(operator).get("dropout_p", 0.0)
        return isinstance(p, int | float) and p > 0
    found = _lookup(operator.target)
    if found is None or torch.Tag.nondeterministic_seeded not in found.tags:
        return False
    bound = bound_arguments(operator)
    if "dropout" in name or name == "rrelu":
        training = bound.get("train", bound.get("training", True))
        return training is not False and bound.get("p", bound.get("dropout", 1.0)) != 0
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(bound.get("train")) and bound.get("dropout") != 0
    return True

"""Operators and samples of torch's own database, as this project runs them."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch

from tests.device import test_device

# Operators whose results hold whatever was in memory: all but the values is compared.
UNDEFINED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split()
)
# Results that do where nothing is dropped: the seed and the offset of the random numbers.
SEEDS = {f"torch.ops.aten._{name}_attention_forward": (2, 3) for name in ("flash", "efficient")}
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def operators() -> list[Any]:
    """The database's entries."""
    # torch imports it for its own tests; the database needs none.
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # For each sample it walks the stack, with all source files, to find torch's own test: most of a sample's time.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return list(op_db)


def some(of: int) -> list[Any]:
    """One of so many of the database's entries; all with FUSER_TEST_ALL=1 (`make sweeps`)."""
    return operators()[:: 1 if os.environ.get("FUSER_TEST_ALL") else of]


def full_name(op: Any) -> str:
    """The operator's name, with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def undefined(op: Any, sample: Any) -> tuple[int, ...] | None:
    """Which results of a sample hold whatever was in memory; None: all, and the inputs afterwards."""
    if op.name in UNDEFINED:
        return None
    return () if sample.kwargs.get("dropout_p") else SEEDS.get(op.name, ())


def dtypes_of(op: Any) -> list[torch.dtype]:
    """The dtypes that it supports on the device that is tested, of those that are run."""
    supported = op.supported_dtypes(test_device())
    return [d for d in DTYPES if d in supported]


def samples_of(op: Any, dtype: torch.dtype, most: int | None) -> Iterator[Any]:
    """Up to `most` samples, spread over all of them."""
    torch.manual_seed(3)
    with torch.no_grad():
        made = list(op.sample_inputs(test_device(), dtype, requires_grad=False))
    if most is None or len(made) <= most:
        return iter(made)
    step = len(made) / most
    return iter([made[int(i * step)] for i in range(most)])


FAMILY_CLASSES = {
    "UnaryUfuncInfo": "pointwise",
    "BinaryUfuncInfo": "pointwise",
    "ReductionOpInfo": "reduction",
}
# Families of the entries whose class does not say it.
FAMILIES = {
    "pointwise": """
        addcdiv addcmul clamp clamp_max clamp_min lerp where masked_fill nan_to_num nn.functional.relu
        nn.functional.gelu nn.functional.silu nn.functional.elu nn.functional.celu nn.functional.selu
        nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.leaky_relu
        nn.functional.logsigmoid nn.functional.mish nn.functional.prelu nn.functional.relu6 nn.functional.rrelu
        nn.functional.softplus nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink
        nn.functional.threshold nn.functional.hardshrink nn.functional.glu polygamma float half double int long short
        bool char byte bfloat16 to isclose _chunk_cat
    """,
    "reduction": """
        softmax log_softmax nn.functional.softmin var_mean std_mean var std logsumexp norm linalg.vector_norm
        nn.functional.layer_norm nn.functional.group_norm nn.functional.rms_norm nn.functional.batch_norm
        nn.functional.instance_norm nn.functional.normalize nn.functional.mse_loss nn.functional.l1_loss
        nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.cross_entropy nn.functional.nll_loss
        nn.functional.kl_div nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
        nn.functional.poisson_nll_loss nn.functional.gaussian_nll_loss nn.functional.hinge_embedding_loss
        nn.functional.margin_ranking_loss nn.functional.soft_margin_loss nn.functional.cosine_similarity
        nn.functional.cosine_embedding_loss nn.functional.triplet_margin_loss nn.functional.pairwise_distance aminmax
        trace cumsum cumprod logcumsumexp sum_to_size trapz trapezoid cov corrcoef masked.softmax masked.log_softmax
        native_layer_norm nn.functional.local_response_norm
    """,
    "view": """
        view view_as reshape reshape_as expand expand_as permute transpose t mT mH T H swapaxes swapdims movedim
        moveaxis
        squeeze unsqueeze select split split_with_sizes chunk unbind narrow diagonal unfold flatten unflatten ravel
        as_strided tensor_split hsplit vsplit dsplit adjoint atleast_1d atleast_2d atleast_3d broadcast_to
        broadcast_tensors contiguous unsafe_split unsafe_chunk linalg.diagonal slice alias_copy view_copy expand_copy
        permute_copy squeeze_copy unsqueeze_copy t_copy transpose_copy diagonal_copy as_strided_copy unbind_copy
        split_with_sizes_copy unfold_copy narrow_copy select_copy split_list_args nn.functional.pixel_shuffle
        nn.functional.pixel_unshuffle nn.functional.channel_shuffle nn.functional.unfold view_as_real resolve_conj
        resolve_neg positive
    """,
    "indexing": """
        index_select gather take take_along_dim __getitem__ nn.functional.embedding index_add index_copy index_fill
        index_put scatter scatter_add select_scatter slice_scatter diagonal_scatter masked_scatter searchsorted
        bucketize nn.functional.one_hot
    """,
    "creation": """
        arange full zeros ones eye linspace logspace zeros_like ones_like full_like new_full new_zeros new_ones tril
        triu tril_indices triu_indices scalar_tensor diag diag_embed diagflat cat stack hstack vstack dstack
        column_stack concat concatenate flip fliplr flipud roll rot90 repeat tile repeat_interleave
        nn.functional.pad meshgrid
        block_diag cartesian_prod vander clone ones_like rand_like nn.functional.pad constant_pad_nd as_strided_scatter
    """,
}
FAMILY_NAMES = ("pointwise", "reduction", "view", "indexing", "creation", "other")
_BY_NAME = {name: family for family, names in FAMILIES.items() for name in names.split()}


def family_of(op: Any) -> str:
    """ "pointwise", "reduction", "view", "indexing", "creation", or "" for others."""
    known = _BY_NAME.get(op.name) or _BY_NAME.get(full_name(op))
    if known:
        return known
    kinds = [c.__name__ for c in type(op).__mro__]
    return next((FAMILY_CLASSES[k] for k in kinds if k in FAMILY_CLASSES), "")

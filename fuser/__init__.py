"""Just-in-time fusion for PyTorch."""

from fuser.interface import (
    can_fuse_on_cpu,
    can_fuse_on_gpu,
    fusion_handle,
    has_fusion_backend,
    num_compiled_kernels,
    override_can_fuse_on_cpu,
    override_can_fuse_on_gpu,
    register_fusion,
    register_fusion_backend,
    run_fusion,
)

__version__ = "0.1.0"
__all__ = [
    "can_fuse_on_cpu",
    "can_fuse_on_gpu",
    "fusion_handle",
    "has_fusion_backend",
    "num_compiled_kernels",
    "override_can_fuse_on_cpu",
    "override_can_fuse_on_gpu",
    "register_fusion",
    "register_fusion_backend",
    "run_fusion",
]

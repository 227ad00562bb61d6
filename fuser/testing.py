"""Helpers for tests of programs that use fuser, and of their extensions of it."""

from fuser.debug.checking_ops import check_op, check_reduction
from fuser.debug.guaranteeing import assert_fused, require_fused

__all__ = ["assert_fused", "check_op", "check_reduction", "require_fused"]

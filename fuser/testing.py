"""For tests of programs that use fuser."""

from fuser.debug.guaranteeing import assert_fused, require_fused

__all__ = ["assert_fused", "require_fused"]

"""Rewrites of graphs, in stages; see docs/passes.md."""

from fuser.passes.registry import register, register_pattern, unregister

__all__ = ["register", "register_pattern", "unregister"]

"""Canonical graphs: the form in which fusion groups are compared, hashed, compiled and stored."""

from fuser.canonical.build import REQUIRED, Registered, Row, canonicalize, operators_of
from fuser.canonical.calls import HOST_OF_PACKET, HOST_OPS
from fuser.canonical.graph import CanonicalGraph, CanonicalNode, Opaque, Ref, map_refs, refs_of, text_of
from fuser.canonical.interpret import interpret
from fuser.canonical.lifting import skeleton
from fuser.canonical.schemas import Kind
from fuser.canonical.structure import Flattened

__all__ = [
    "HOST_OF_PACKET",
    "HOST_OPS",
    "REQUIRED",
    "CanonicalGraph",
    "CanonicalNode",
    "Flattened",
    "Kind",
    "Opaque",
    "Ref",
    "Registered",
    "Row",
    "canonicalize",
    "interpret",
    "map_refs",
    "operators_of",
    "refs_of",
    "skeleton",
    "text_of",
]

"""The resources that a binary takes of a multiprocessor, read from its ELF file without GPU or disassembler."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from fuser.lazy_dataclasses import dataclass

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info: (symbol, registers), (symbol, bytes of stack)
_SIZED = 0x04  # the format of an attribute that has a value behind it


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, and the bytes of its stack, to which registers spill."""

    registers: int
    stack: int


def usage(cubin: bytes) -> Usage:
    """The resources of a binary's kernel. Zeros if the file's format is unknown."""
    registers = stack = 0
    try:
        for attribute, value in _attributes(cubin):
            if attribute == _REGISTERS:
                registers = max(registers, struct.unpack_from("<II", value)[1])
            elif attribute == _FRAME:
                stack = max(stack, struct.unpack_from("<II", value)[1])
    except (struct.error, IndexError, OverflowError, ValueError):
        pass
    return Usage(registers, stack)


def _attributes(cubin: bytes) -> Iterator[tuple[int, bytes]]:
    """The (attribute, value) pairs of the section .nv.info."""
    if cubin[:5] != b"\x7fELF\x02":
        return
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + size * n) for n in range(count)]
    text = sections[names][4]
    for section in sections:
        at, length = section[4], section[5]
        name = text + section[0]
        if cubin[name : cubin.index(b"\0", name)] != b".nv.info":
            continue
        end = at + length
        while at + 4 <= end:
            form, attribute, n = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == _SIZED:
                yield attribute, cubin[at : at + n]
                at += n

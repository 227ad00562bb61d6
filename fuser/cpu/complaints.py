"""Compiler output: its most informative line, and what the operating system refused, with the cure."""

from __future__ import annotations

import os

from fuser import config

_TELLING = ("cannot write", "cannot", "undefined", "error")
_SUMMARY = "exit status"  # printed for a part of the compiler that has already given its reason
_ELSEWHERE = "free some, or set TMPDIR and FUSER_CACHE_DIR"
# Refusals of the operating system: words of a compiler's output, and the sentence for them, the same for all kernels.
_REFUSED = (
    ("No space left on device", "no space is left in {temporary} or {cache}: " + _ELSEWHERE),
    ("File too large", "files may not be large enough in {temporary} or {cache}: raise the limit (ulimit -f)"),
    ("Disk quota exceeded", "the quota of {temporary} or {cache} is used up: " + _ELSEWHERE),
    ("Too many open files", "no more files can be opened: raise the limit (ulimit -n)"),
    ("Resource temporarily unavailable", "no process can be started: raise the limit (ulimit -u, or the container's)"),
    ("Cannot fork", "no process can be started: raise the limit (ulimit -u, or the container's)"),
    ("Cannot allocate memory", "there is no memory for a compiler: free some, or raise the limit (ulimit -v)"),
    ("out of memory allocating", "there is no memory for a compiler: free some, or raise the limit (ulimit -v)"),
)  # fmt: skip


_FULL = ("No space left on device", "Disk quota exceeded")


def is_full(text: str) -> bool:
    """Whether a compiler found no space, so another folder may help."""
    return any(words in text for words in _FULL)


def refused(text: str) -> str | None:
    """A sentence on what the system refused, with the cure; None if `text` shows no refusal."""
    cache = config.cache_dir or "the temporary folder"
    for words, sentence in _REFUSED:
        if words in text:
            return sentence.format(temporary=os.environ.get("TMPDIR", "/tmp"), cache=cache)
    return None


def gist(log: str) -> str:
    """The most informative line of a compiler's output: a refusal of the system, else its first error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    why = refused(log)
    if why is not None:
        return why
    for word in _TELLING:
        for line in lines:
            if word in line and _SUMMARY not in line:
                return line
    return lines[0] if lines else "it said nothing"


__all__ = ["gist", "is_full", "refused"]

"""Contests: which of several ways to do the same is the fastest on this machine.

`trial`: whether a kernel is slower than what it replaces, beyond what noise explains. `race`: which of several calls on
the CPU is the fastest; `fuser.cuda.choices` has the clock for a GPU. `records`: what was decided, kept on disk and
listed by `fuser.debug.choices()`.
"""

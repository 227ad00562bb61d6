"""Contests: which of several implementations is the fastest on this machine.

`trial`: whether a kernel is slower than what it replaces, beyond noise. `race`: which of several calls on the CPU is
the fastest; `fuser.cuda.choices` has the clock for a GPU. `records`: the decisions, kept on disk and listed by
`fuser.debug.choices()`.
"""

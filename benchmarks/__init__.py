"""Benchmarks of fuser beside its rivals: `python -m benchmarks --help`."""

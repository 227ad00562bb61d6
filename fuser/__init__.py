"""Just-in-time fusion for PyTorch."""

__version__ = "0.1.0"

"""`python -m fuser doctor`: is everything here that is needed?"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuser", description="Just-in-time fusion for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what this machine has of all that is needed; exit code 1 if a cure is due")
    parser.parse_args(arguments)
    from fuser.debug.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())

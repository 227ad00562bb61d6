"""Commands: `python -m fuser doctor` (checks of this machine), `cache` (kernels on disk), `report`."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the process's exit code."""
    from fuser.debug import cache_commands, report_command
    from fuser.debug.doctor import doctor

    parser = argparse.ArgumentParser(prog="python -m fuser", description="Just-in-time fusion for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what this machine has of all that is needed; exit code 1 if a cure is due")
    cache_commands.add_to(commands)
    report_command.add_to(commands)
    asked = parser.parse_args(arguments)
    if asked.command == "doctor":
        return doctor()
    return report_command.run(asked) if asked.command == "report" else cache_commands.run(asked)


if __name__ == "__main__":
    sys.exit(main())

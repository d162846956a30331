"""The command ``cuda-prefetcher``: what this machine can do, and what prefetching gains on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from prefetch import __version__
from prefetch.cli._arguments import Parser
from prefetch.cli._output import CommandError
from prefetch.cli.bench import add_bench
from prefetch.cli.doctor import add_doctor

__all__ = ["main"]

_SUMMARY = "Find out what this machine can do, and what prefetching gains on it."
_INTERRUPTED = 130  # as a shell reports Ctrl-C
_CUT_OFF = 141  # and a command whose output nobody reads any more


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 0, 1 when the user's own code raised, 2 for what cannot be used, 130 after Ctrl-C,
        141 when nobody reads the output any more.

    Raises:
        SystemExit: As argparse does: the arguments are wrong (status 2), or help was asked for (0).
    """
    parser = Parser(prog="cuda-prefetcher", description=_SUMMARY)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_doctor(commands)
    add_bench(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except CommandError as error:
        error.show(f"{parser.prog} {args.command}")
        return error.status
    except KeyboardInterrupt:
        print(f"{parser.prog} {args.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # who reads the report has seen enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it ends
        return _CUT_OFF
    return 0

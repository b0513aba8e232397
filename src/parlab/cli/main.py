"""The entry point: reads the arguments, prints one answer, and keeps errors off standard output."""

import argparse
import json
import os
import sys

from parlab.cli import memory, plan, schedule

COMMANDS = {"plan": plan, "memory": memory, "schedule": schedule}


def main(arguments=None):
    """Answer one command and return its exit code: 0, or 2 for what it cannot answer."""
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has seen enough. Python flushes once more at its end, and must find no pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments):
    chosen = _parser().parse_args(arguments)
    try:
        answer = chosen.answer(chosen)
    except (ValueError, TypeError, OSError) as error:
        print(f"parlab {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        chosen.show(answer)
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="parlab",
        description="The arithmetic of parallel training. Each command has its own --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.set_defaults(answer=command.answer, show=command.show)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version  # slow, and nothing else asks

        try:
            print("parlab", version("parlab"))
        except PackageNotFoundError:
            print("parlab, run from its source without being installed")
        parser.exit()

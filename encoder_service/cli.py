"""The command line, `encoder-service COMMAND`. Each command is a file in commands/."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType

from rich.console import Console

from actors.errors import ServiceError
from encoder_service import __version__
from encoder_service.commands import fail

COMMANDS = (
    "check", "encode", "proxy", "sglang", "bench", "capture-plan", "calibrate", "simulate",
    "rayservice",
)  # fmt: skip


def terminated(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Exit status: 0 on success, 1 if it failed and said why, 2 for an invalid
    command line, 128 + signal number if it was terminated."""
    # SIGTERM raises SystemExit, so that servers and clusters started by the command are stopped.
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, terminated)
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        "encoder-service",
        description="Runs the vision and audio encoders of language models as a separate service.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Imports only the given subcommand: `bench engine` needs neither Ray nor a web server.
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        command = import_module(f"encoder_service.commands.{name.replace('-', '_')}")
        command.add(subcommands)
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace, Console], int] = options.run
    try:
        return run(options, Console())
    except (ServiceError, OSError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())

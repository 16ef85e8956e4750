"""The command line: `encoder-service COMMAND`, one file of commands/ for each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from actors.errors import ServiceError
from encoder_service.client import embedding
from encoder_service.commands import bench, capture_plan, check, encode, proxy, rayservice, simulate

COMMANDS = (check, encode, proxy, bench, capture_plan, simulate, rayservice)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. 0: done, 1: it failed and said why, 2: the command line is wrong."""
    parser = argparse.ArgumentParser(
        "encoder-service", description="Vision encoders apart from the models that use them."
    )
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subcommands)
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace, Console], int] = options.run
    try:
        return run(options, Console())
    except (ServiceError, embedding.ServiceError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]failed:[/] {escape(str(error))}")
        return 1


if __name__ == "__main__":
    sys.exit(main())

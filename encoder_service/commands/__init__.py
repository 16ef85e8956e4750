"""The subcommands of `encoder-service`, one file each, and the option types that they share."""

from __future__ import annotations

import argparse
import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from actors.errors import how_to_install


class DefaultsFormatter(argparse.HelpFormatter):
    """Appends an option's default to its help, if it has one that the help does not mention."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if "default" in (action.help or "") or not default or default == argparse.SUPPRESS:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{action.help} (default: {shown})"


def add_command(
    subcommands: Any,
    name: str,
    run: Callable[[Namespace, Console], int],
    help_text: str,
    epilog: str | None = None,
) -> ArgumentParser:
    """Adds a subcommand; returns its parser. `run` gets the options and returns the exit status."""
    parser: ArgumentParser = subcommands.add_parser(
        name,
        help=help_text,
        description=help_text,
        epilog=epilog,
        formatter_class=DefaultsFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results as JSON"
    )


def add_plot(parser: ArgumentParser) -> None:
    parser.add_argument("--plot", type=plot_file, metavar="FILE.png", help="also plot the results")


def plot_file(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise ArgumentTypeError(f"matplotlib is missing: {how_to_install('bench')}")
    return output_file(text)


def output_file(text: str) -> Path:
    """Checked before the command begins, because the file is written when it ends."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise ArgumentTypeError(f"{text!r} cannot be a file: no such folder, or itself a folder")
    return path


def fail(error: Exception) -> int:
    """Prints the error. Returns the exit status."""
    Console(stderr=True, soft_wrap=True).print(f"[red]failed:[/] {escape(str(error))}")
    return 1


def write_json(path: Path | None, report: Any) -> None:
    if path:
        path.write_text(json.dumps(report, indent=2) + "\n")

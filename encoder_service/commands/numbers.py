"""Numbers of a command line, for argparse, which prints the message of their errors alone."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def at_least_one(text: str) -> float:
    """A finite number from 1 up."""
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?", text):
        raise ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return float(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return number

"""Spans: what a request spent its time on, in every process that it passed.

Parent and child find each other by origin.ORIGIN, within a process and across calls. Switched off,
a span costs one call of an empty method, and OpenTelemetry is not imported.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol

from actors.errors import ConfigError
from actors.options import TracingOptions

Value = str | int | float
Kind = Literal["server", "client", "internal"]

NEEDED = {
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "file": ("opentelemetry.sdk",),
}


class Span(Protocol):
    """One piece of work, while it is done."""

    def set(self, **attributes: Value) -> None:
        """Says more of it."""

    def fail(self, reason: str) -> None:
        """It did not do what it was to do."""


class Spans(Protocol):
    """Where one part of the service leaves its spans."""

    def span(
        self, name: str, kind: Kind = "internal", **attributes: Value
    ) -> AbstractContextManager[Span]:
        """Around work. What happens inside belongs to it, calls to other processes too."""

    def past(
        self, name: str, seconds: float, *, ago_seconds: float = 0, **attributes: Value
    ) -> None:
        """Work that has ended, just now or some time ago, after so long."""


class Silent:
    """The span of those who do not trace."""

    def set(self, **attributes: Value) -> None:
        """Nothing."""

    def fail(self, reason: str) -> None:
        """Nothing."""


NOTHING = nullcontext(Silent())


class NoSpans:
    """Tracing that is off."""

    def span(
        self, name: str, kind: Kind = "internal", **attributes: Value
    ) -> AbstractContextManager[Span]:
        """Nothing."""
        return NOTHING

    def past(
        self, name: str, seconds: float, *, ago_seconds: float = 0, **attributes: Value
    ) -> None:
        """Nothing."""


def check_tracing(options: TracingOptions) -> None:
    """Raises ConfigError where what the spans are to be sent with is not installed."""
    for module in NEEDED.get(options.export, ()):
        if not there(module):
            raise ConfigError(
                f"tracing.export is {options.export}, but {module} is not installed: "
                "pip install 'encoder-service[otel]', or set it to off"
            )


def there(module: str) -> bool:
    """Whether it could be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


@cache
def open_spans(options: TracingOptions, part: str) -> Spans:
    """The spans of a part of the service in this process. Raises ConfigError."""
    if options.export == "off":
        return NoSpans()
    check_tracing(options)
    from actors.telemetry.otel import OtelSpans

    return OtelSpans(options, part)

"""The exceptions of the service. encoder_service/api/errors.py maps each to HTTP and gRPC codes.

Every message says what was wrong, where, and what to do.
"""

from __future__ import annotations


class ServiceError(Exception):
    """Base class of everything that this service raises on purpose. Can be pickled."""

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class InvalidRequest(ServiceError):
    """The request as a whole cannot be read."""


class InvalidOption(InvalidRequest):
    """An option is unknown or has an invalid value."""


class InvalidMedia(InvalidRequest):
    """An item is not what it claims to be: truncated, not an image, bad base64."""


class UnsupportedMedia(InvalidRequest):
    """A format or kind of media that this service or model does not support."""


class NotAcceptable(InvalidRequest):
    """The caller accepts no format that the service can answer in."""


class TooLarge(InvalidRequest):
    """Bytes, items, pixels or an aspect ratio beyond a limit."""


class Unauthorized(ServiceError):
    """No token, or a wrong one."""


class NotFound(ServiceError):
    """What was asked for does not exist."""


class Overloaded(ServiceError):
    """There is no room now, for patches in flight or for embeddings to keep. Retry later."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message, retry_after_seconds)

    @property
    def retry_after_seconds(self) -> float:
        return float(self.args[1])


class DeadlineExceeded(ServiceError):
    """There was no answer within the caller's time."""


class Unavailable(ServiceError):
    """No replica can take the work now."""


class EmbeddingLost(Unavailable):
    """An embedding was lost, usually with its replica, before it was read."""


class EncodeFailed(ServiceError):
    """The encoder failed on an item that seems valid. Not the client's fault."""


class StartError(ServiceError):
    """The service cannot start as configured."""


class ConfigError(StartError):
    """A key or a value of the configuration is wrong."""


class CheckpointError(StartError):
    """Files or weights of a checkpoint are missing, unexpected, misshapen or unavailable."""


def how_to_install(extra: str) -> str:
    """For messages: the command that installs an extra of this package, which is not on PyPI."""
    return f"pip install '.[{extra}]' (in a clone of this repository)"

"""Bearer tokens. Only their SHA-256 digests are stored, in the configuration and in a file."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from pathlib import Path

from actors.errors import ConfigError, Unauthorized
from actors.telemetry.tracing import LOG
from encoder_service.config import AuthOptions

log = logging.getLogger(LOG)

DIGEST = re.compile("[0-9a-f]{64}")


class Tokens:
    def __init__(self, options: AuthOptions) -> None:
        """Raises ConfigError for a file without tokens, because it is unclear who has access."""
        self._named = options.token_sha256
        self._file = Path(options.token_sha256_file) if options.token_sha256_file else None
        self._stamp = stamp(self._file) if self._file else None
        self._read = digests(self._file) if self._file else ()
        self._seen = self._stamp  # a file that cannot be read is tried again, but logged once

    @property
    def required(self) -> bool:
        return bool(self._file or self._named)

    def authorize(self, *given: str) -> None:
        """Checks the values of all `Authorization` headers. Raises Unauthorized."""
        if not self.required:
            return
        if len(given) > 1:  # a gateway may have checked another one
            raise Unauthorized(f"{len(given)} `Authorization` headers: send one")
        scheme, _, token = "".join(given).partition(" ")
        digest = hashlib.sha256(token.strip().encode(errors="replace")).hexdigest()
        # Every token is compared, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._known()]
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized("this service requires a token: send `Authorization: Bearer TOKEN`")
        if not any(matches):
            raise Unauthorized("the token is unknown to this service (auth.token_sha256)")

    def _known(self) -> tuple[str, ...]:
        """The current digests. If the file can no longer be read, they stay as they were."""
        if self._file:
            found, seen = stamp(self._file), self._seen
            self._seen = found
            if found != self._stamp:
                try:
                    self._read = digests(self._file)
                    self._stamp = found
                    log.info("auth.token_sha256_file: %d tokens", len(self._read))
                except ConfigError as error:
                    if found != seen:
                        log.error("the tokens stay as they were: %s", error)
        return self._named + self._read


def stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def digests(path: Path) -> tuple[str, ...]:
    """A hexadecimal SHA-256 per line; empty lines and # comments are skipped. Raises ConfigError.

    The message never quotes a line, because it may be the token itself.
    """
    try:
        lines = path.read_text(encoding="utf-8").lower().splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"auth.token_sha256_file: {path} cannot be read: {reason}") from None
    found = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not DIGEST.fullmatch(line):
            raise ConfigError(
                f"auth.token_sha256_file: line {number} of {path} is not the hexadecimal SHA-256 "
                "of a token: printf %s TOKEN | sha256sum"
            )
        found.append(line)
    if not found:
        raise ConfigError(f"auth.token_sha256_file: {path} has no token")
    return tuple(found)

"""Shim until the decode pool lands."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic

from actors.media.decoding import Decoding
from actors.types import Item, Media


@dataclass(eq=False)
class _Asked:
    media: Media
    answer: Future[Item] = field(default_factory=Future)

    @property
    def given_up(self) -> bool:
        return self.answer.cancelled()


class Decoder:
    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding

    def submit(self, media: Media) -> Future[Item]:
        asked, since = _Asked(media), monotonic()

        def done(started: float, made: Item | Exception) -> None:
            if not asked.answer.set_running_or_notify_cancel():
                return
            if isinstance(made, Exception):
                asked.answer.set_exception(made)
                return
            made.decode_queue_seconds = started - since
            made.preprocess_seconds = monotonic() - started
            asked.answer.set_result(made)

        self.decoding.begin(asked, done)
        return asked.answer

    def alive(self) -> bool:
        return self.decoding.alive()

    def close(self) -> None:
        self.decoding.close()

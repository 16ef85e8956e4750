"""Tokenizes texts with the model's own tokenizer, padded to the length of the text tower."""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np

from actors.errors import CheckpointError, InvalidRequest
from actors.options import ModelOptions
from actors.spec.checkpoint import VOCABULARIES, find
from actors.spec.model_spec import ModelSpec
from actors.types import Item, Media


class Texts:
    """The tokenizer of a model that takes texts. Thread-safe."""

    def __init__(self, spec: ModelSpec) -> None:
        """Raises CheckpointError."""
        self.spec = spec
        check_files(spec)
        self.tokenizer = read_tokenizer(spec.id, spec.revision)
        check_tokens(spec, len(self.tokenizer))
        self._lock = Lock()  # tokenizers keep their padding as state

    def item(self, media: Media) -> Item:
        """An item whose patches are the token ids, uint8 [tokens, 4]. Raises InvalidRequest if the
        text is too long."""
        most = media.plan.patches
        with self._lock:
            found = self.tokenizer(media.data.decode(), padding="max_length", max_length=most)
        ids = found["input_ids"]
        if len(ids) > most:
            raise InvalidRequest(
                f"the text is {len(ids)} tokens, over the {most} of {self.spec.id}: shorten it"
            )
        return Item(media.plan, np.array(ids, "<i4").view(np.uint8).reshape(most, -1))


def check_files(spec: ModelSpec) -> None:
    """Raises CheckpointError if there is no vocabulary: transformers would make an empty one."""
    files = find(ModelOptions(id=spec.id, revision=spec.revision))
    if not any(all(map(files.path, names)) for names in VOCABULARIES):
        rows = ", or ".join(" and ".join(names) for names in VOCABULARIES)
        raise CheckpointError(f"model.id {spec.id!r} has no tokenizer for its texts: add {rows}")


def check_tokens(spec: ModelSpec, tokens: int) -> None:
    """Raises CheckpointError if the text tower does not fit a tokenizer of `tokens` tokens."""
    assert spec.text is not None
    most, end = int(spec.text["vocab_size"]), spec.text.get("eos_token_id")
    # SigLIP's configuration may have CLIP's end token, which SigLIP's vocabulary does not have.
    least = end + 1 if isinstance(end, int) and end < most else 1
    if not least <= tokens <= most:
        raise CheckpointError(
            f"the tokenizer of {spec.id!r} has {tokens} tokens, where its text tower needs {least} "
            f"to {most} (text_config.vocab_size): take all files from one checkpoint"
        )


def read_tokenizer(id: str, revision: str | None) -> Any:
    """transformers' tokenizer of a checkpoint. Code from a repository is never run.

    Raises CheckpointError.
    """
    from transformers import AutoTokenizer  # not at the top, because few replicas need it

    try:
        return AutoTokenizer.from_pretrained(id, revision=revision, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise CheckpointError(f"the tokenizer of {id!r} cannot be read: {error}") from error

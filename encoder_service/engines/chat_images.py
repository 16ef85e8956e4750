"""A chat request with images -> the same request with their embeddings, for vLLM.

Nothing else of the request is touched; embeddings that a client made itself are refused. Data URLs
are decoded here; https URLs go to the encoder service, which has its own rules of what it fetches;
whatever else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.errors import EncodeFailed, InvalidRequest
from encoder_service.client.embedding import Embedding
from encoder_service.wire.formats import WireError, from_base64

Json = dict[str, Any]

READY_MADE = ("image_pil", "kwargs_data")
"""What else than ..._embeds holds tensors: kwargs_data does in /inference/v1/generate."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an image stands in a request."""

    where: str
    """For messages: messages[0].content[1]."""
    content: list[Any]
    index: int
    uuid: str | None
    """The client's name for the image, under which vLLM caches it."""
    source: bytes | str
    """A file, or an https URL."""


def places(request: Json) -> list[Place]:
    """Every image of a request, in order. Raises InvalidRequest."""
    messages = request.get("messages")
    found = []
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else []):
            where = f"messages[{i}].content[{j}]"
            kinds = named(part) if isinstance(part, dict) else set()
            if "video_url" in kinds:
                raise InvalidRequest(f"{where}: videos are not encoded by this proxy; send images")
            if "image_url" in kinds:
                assert isinstance(content, list)
                found.append(Place(where, content, j, part.get("uuid"), source(part, where)))
    return found


def named(part: Json) -> set[Any]:
    """What vLLM may take a part for: it goes by the keys where there is no type, or a uuid."""
    return {part.get("type") if isinstance(part.get("type"), str) else None} | part.keys()


def refuse_ready_made(request: Any) -> None:
    """Raises InvalidRequest for a client's own embeddings, wherever they stand.

    vLLM does not check them: wrong ones can end its process.
    """
    left = [("", request)]
    while left:
        where, one = left.pop()
        if isinstance(one, list):
            left += [(f"{where}[{i}]", each) for i, each in enumerate(one)]
        if not isinstance(one, dict):
            continue
        for kind in named(one) - {None}:
            if kind.endswith("_embeds") or kind in READY_MADE:
                raise InvalidRequest(
                    f"{where or 'the body'}: {kind} are not taken by this proxy; send images"
                )
        left += [(f"{where}.{key}".lstrip("."), each) for key, each in one.items()]


def source(part: Json, where: str) -> bytes | str:
    """The image that a part holds or names."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.image_url needs a url")
    if url.startswith("https://"):
        return url
    head, comma, data = url.partition(",")
    if not (head.lower().startswith("data:image/") and head.lower().endswith(";base64") and comma):
        raise InvalidRequest(f"{where}.image_url: send data:image/...;base64,... or an https URL")
    try:
        return from_base64(data, f"{where}.image_url")
    except WireError as error:
        raise InvalidRequest(str(error)) from None


def place(found: list[Place], embeddings: list[Embedding]) -> None:
    """Puts embeddings where the images were. Raises EncodeFailed for those that vLLM takes not."""
    for one, embedding in zip(found, embeddings, strict=True):
        try:
            part = embedding.to_vllm()
        except ValueError as error:
            raise EncodeFailed(f"{one.where}: {error}") from None
        one.content[one.index] = part if one.uuid is None else part | {"uuid": one.uuid}

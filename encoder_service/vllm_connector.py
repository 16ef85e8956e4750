"""An EC connector: a vLLM server gets embeddings by their ids from the encoder service.

    vllm serve MODEL --enable-mm-embeds --ec-transfer-config '{
        "ec_connector": "EncoderServiceConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "encoder_service.vllm_connector",
        "ec_connector_extra_config": {"url": "http://127.0.0.1:8000"}}'

A request then names an embedding by "uuid", with its grid and without its rows: what
`Embedding.to_vllm()` gives of a reference. Follows ECConnectorBase of vLLM 0.33; loaded by vLLM
alone. It has not run inside vLLM: only against a stand-in with the same abstract class.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata

from encoder_service.client import Client, Embedding
from encoder_service.over_http import path_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
"""Of a check, which holds up vLLM's scheduler, and of fetching, which holds up a step."""


@dataclass
class Loads(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """What the workers are to fetch for a step: the tokens of each id."""

    tokens: dict[str, int] = field(default_factory=dict)


class EncoderServiceConnector(ECConnectorBase):  # type: ignore[misc]
    """Both halves, as vLLM has it: one object in the scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        """Raises ValueError for a role or an address that it cannot have."""
        super().__init__(vllm_config=vllm_config, role=role)
        if self.is_producer:
            raise ValueError('ec_role must be "ec_consumer": this connector only reads embeddings')
        url = vllm_config.ec_transfer_config.get_from_extra_config("url", None)
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(f"ec_connector_extra_config.url is {url!r}: name the encoder service")
        token = os.environ.get("ENCODER_SERVICE_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.probe = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS)
        self.client = Client(url, token, TIMEOUT_SECONDS)
        self.needed = Loads()

    def shutdown(self) -> None:
        """Gives the connections back."""
        self.probe.close()
        self.client.close()

    # In the scheduler

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the service keeps an embedding under this id; vLLM's own hashes have no dot."""
        if "." not in identifier:
            return False
        try:
            return self.probe.head(path_of(identifier)).is_success
        except httpx.HTTPError as error:
            log.warning("the encoder service cannot be asked for %s: %r", identifier, error)
            return False

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Has item `index` of a request fetched for the next step, if it is one of ours."""
        identifier = request.mm_features[index].identifier
        if self.has_cache_item(identifier):
            self.needed.tokens[identifier] = request.get_num_encoder_embeds(index)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What this step needs; the next one begins with nothing."""
        built, self.needed = self.needed, Loads()
        return built

    # In a worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Puts [tokens, width] on this worker's device under each id, all fetched at once.

        Raises ServiceError where one is no longer kept, ValueError where it is not what the prompt
        has room for: a step cannot go on without it.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        names = [name for name in metadata.tokens if name not in encoder_cache]
        for name, embedding in zip(names, self.client.run(self.fetched(names)), strict=True):
            self.check(name, embedding, metadata.tokens[name])
            dtype = self._vllm_config.model_config.dtype
            encoder_cache[name] = embedding.torch().to(device(), dtype)

    async def fetched(self, names: list[str]) -> list[Embedding]:
        """The embeddings, in order."""
        return await asyncio.gather(*(self.client.client.fetch(name) for name in names))

    def check(self, name: str, embedding: Embedding, tokens: int) -> None:
        """vLLM checks neither: a wrong one would end it later, or answer nonsense."""
        hidden = self._vllm_config.model_config.get_inputs_embeds_size()
        expected = (tokens, hidden * (1 + embedding.deepstack))
        if embedding.shape != expected:
            raise ValueError(
                f"embedding {name} of {embedding.model} has the shape {embedding.shape}, the "
                f"prompt has room for {expected}: is the encoder service that of another model?"
            )

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Nothing: the service has what it encoded, and takes nothing."""


def device() -> str:
    """This worker's own: a bare "cuda" would be the first of all workers'."""
    from vllm.platforms import current_platform

    kind: str = current_platform.device_type
    return f"{kind}:{current_platform.current_device()}" if kind == "cuda" else kind

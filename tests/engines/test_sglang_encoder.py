"""SGLang's own receiver, fed by the service: `make sglang`.

Runs in an environment that has SGLang; the service runs in the project's own. No engine is started,
which needs a GPU.
"""

# ruff: noqa: E402  # SGLang is imported where there is one

from __future__ import annotations

import asyncio
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from encoder_service.client import Client, Embedding
from tests.engines import checkpoint
from tests.engines.servers import ROOT, running
from tests.images import jpeg
from tests.videos import video

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("sglang", reason="there is no SGLang here")

from sglang.srt.disaggregation.encoder.receiver import (
    MMReceiverHTTP,
    WaitingMMRequestStatus,
    WaitingZmqRequest,
    _ReceiveRegistrationRunner,
)
from sglang.srt.managers.io_struct import EncoderDispatchErrorReq
from sglang.srt.multimodal.modality import Modality
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

OWN_PYTHON = ROOT / ".venv" / "bin" / "python"
IMAGES = [jpeg(160, 256), jpeg(96, 96, "chelsea.png")]
CLIP = video(8, size=(96, 64), fps=4)
PAD = "<|vision_start|><|{}_pad|><|vision_end|>"
PROMPT = f"See {PAD.format('image')} and {PAD.format('image')} in {PAD.format('video')}!"


@dataclass(frozen=True)
class Served:
    """A checkpoint, its service and SGLang's processor of it."""

    family: str
    folder: Path
    url: str
    """Of SGLang's protocol."""
    images: list[Embedding]
    clip: Embedding
    processor: Any
    receiver: MMReceiverHTTP

    def prompt(self) -> list[int]:
        ids: list[int] = self.processor._processor.tokenizer(PROMPT).input_ids
        return ids


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint.write(folder, family)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(OWN_PYTHON), "-m", "tests.engines.encoder", str(folder), str(port)]
    with (
        pytest.MonkeyPatch.context() as patch,
        running(command, f"{url}/health", folder / "encoder.log"),
        Client((folder / "url").read_text()) as client,
    ):
        patch.setenv("SGLANG_HOST_IP", "127.0.0.1")
        args = ServerArgs(
            model_path=str(folder),
            device="cpu",
            mm_process_config={},
            language_only=True,
            encoder_urls=[url, url],  # two encoders, so that the images are two parts
            encoder_transfer_backend="zmq_to_tokenizer",
        )
        get_context().set_server_args(args)
        config, own = AutoConfig.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
        images = client.encode(IMAGES)
        yield Served(
            family,
            folder,
            url,
            images,
            client.encode([CLIP])[0],
            QwenVLImageProcessor(config, args, own, "default"),
            MMReceiverHTTP(args, hf_config=config, encode_urls=[url, url]),
        )


def data_url(file: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(file).decode()}"


def request(*, clip: bytes = CLIP) -> Any:
    """As SGLang's server parses one."""
    return SimpleNamespace(
        image_data=[data_url(file, "image/jpeg") for file in IMAGES],
        video_data=[data_url(clip, "video/mp4")],
        audio_data=None,
        mm_content_hashes=None,
    )


def check(served: Served, found: Any) -> None:
    """That SGLang has each item's rows, in their places, at the right positions."""
    items = {Modality.IMAGE: served.images, Modality.VIDEO: [served.clip]}
    for modality, embeddings in items.items():
        rows = [one.precomputed_embeddings for one in found.mm_items if one.modality == modality]
        assert torch.equal(torch.cat(rows), torch.cat([one.torch() for one in embeddings]))
    ids = torch.tensor([list(found.input_ids)])
    tokens = served.processor.mm_tokens
    kinds = (ids == tokens.image_token_id).int() + 2 * (ids == tokens.video_token_id).int()
    assert (kinds == 1).sum() == sum(one.tokens for one in served.images)
    assert (kinds == 2).sum() == served.clip.tokens
    more = {}
    if served.family == "qwen2_5_vl":
        assert served.clip.second_per_grid_ts
        more["second_per_grid_ts"] = torch.tensor([served.clip.second_per_grid_ts])
    else:
        text = served.processor._processor.tokenizer.decode(ids[0])
        assert all(f"<{seconds:.1f} seconds>" in text for seconds in served.clip.timestamps)
    model = AutoModelForImageTextToText.from_pretrained(served.folder)
    positions, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor([one.grid_thw for one in served.images]),
        video_grid_thw=torch.tensor([served.clip.grid_thw]),
        **more,
    )
    # SGLang and transformers disagree on text after a video of Qwen2.5-VL, which is not ours.
    end = int(kinds[0].nonzero().max()) + 1
    assert torch.equal(found.mrope_positions[:, :end], positions[:, 0, :end])


def test_its_tokenizer_receives_rows(served: Served) -> None:
    work = served.receiver.recv_mm_data(request(), served.processor, served.prompt())
    check(served, asyncio.run(work))


def test_its_schedulers_ranks_receive_rows(served: Served) -> None:
    receiver = served.receiver
    media = receiver._extract_url_data(request())
    assigned = receiver._assign_items_by_modality(media, 2)
    told = SimpleNamespace(
        rid="r", num_items_assigned=assigned, input_ids=served.prompt(), input_text=None
    )
    runner = _ReceiveRegistrationRunner("test")
    ranks = [
        WaitingZmqRequest(
            rid="r",
            recv_req=SimpleNamespace(**vars(told)),
            mm_processor=served.processor,
            encoder_urls=[served.url] * 2,
            model_type=receiver.model_type,
            host_name="127.0.0.1",
            receive_count=2,
            registration_runner=runner,
        )
        for _ in range(2)
    ]
    for rank in ranks:
        rank.send_encode_request()
    assert asyncio.run(receiver.encode("r", media, None, "encode", assigned)) is None
    end = time.monotonic() + 60
    for rank in ranks:
        while rank.status == WaitingMMRequestStatus.PENDING and time.monotonic() < end:
            rank._try_recv_mm_data()
        assert rank.status == WaitingMMRequestStatus.SUCCESS, rank.error_msg
        check(served, rank.recv_req.mm_inputs)


def test_what_cannot_be_encoded_is_said_at_once(served: Served) -> None:
    receiver = served.receiver
    broken = request(clip=b"no video")
    media = [one for one in receiver._extract_url_data(broken) if one["modality"] == Modality.VIDEO]
    answer = asyncio.run(receiver.encode("r", media, 50_000, "encode"))
    assert isinstance(answer, EncoderDispatchErrorReq)
    assert answer.error_code == 415
    assert "mm_items[0]: " in answer.error_msg
    work = receiver.recv_mm_data(broken, served.processor, served.prompt())
    assert asyncio.run(asyncio.wait_for(work, 30)) is None

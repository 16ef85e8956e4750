"""Preprocessing for the place "local": our JPEG decoder and patchifier in vLLM's API process.

That process never loads the connector, so this is a plugin of vLLM, which loads it in all of its
processes. It replaces vLLM's renderer, which knows the configuration, and changes nothing unless
place is local. Results equal those of vLLM's own code bit for bit: this is checked at start, and
vLLM's own code processes what ours does not. Follows vLLM 0.26 to 0.33 and transformers 5.15 to
5.24.
"""

from __future__ import annotations

import logging
from copy import copy
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from vllm import envs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from actors.media.patchify import contiguous, cut_blocks
from encoder_service.engines.vllm import CONNECTOR

log = logging.getLogger("vllm.encoder_service")  # below vLLM's logger, so that it is shown

RENDERER = ("vllm.renderers.hf", "HfRenderer")
NOISE = Image.merge("RGB", [Image.effect_noise((150, 100), 90) for _ in range(3)])
"""Shows at start whether our code gives the same bytes as vLLM's."""
SETTINGS = {"image_mode", "kwargs", "rgba_background_color", "decoded_budget"}
"""Attributes of vLLM's ImageMediaIO."""


def register() -> None:
    """The plugin's entry point. May be called several times. Raises nothing: it would end vLLM."""
    try:
        from vllm.renderers.registry import RENDERER_REGISTRY
    except ImportError:
        return
    # `register` would log a warning in every vLLM that has this package.
    if RENDERER_REGISTRY.renderers.get("hf") == RENDERER:
        RENDERER_REGISTRY.renderers["hf"] = (__name__, "renderer")


def renderer(config: Any, tokenizer: Any) -> Any:
    """vLLM's renderer. If place is local, it uses our decoder and patchifier."""
    from vllm.renderers.hf import HfRenderer

    made = HfRenderer(config, tokenizer)
    transfer = getattr(config, "ec_transfer_config", None)
    if (
        transfer is None
        or transfer.ec_connector != CONNECTOR["ec_connector"]
        or transfer.get_from_extra_config("place", None) != "local"
    ):
        return made
    for work, use in (("cuts images into patches", use_patchifier), ("decodes JPEGs", use_decoder)):
        try:
            use(made)
        except Exception as error:
            log.warning("vLLM itself %s: %r", work, error)
            break
        log.info("the encoder service's code %s", work)
    return made


def use_patchifier(renderer: Any) -> None:
    """Raises an error if our patchifier cannot replace that of transformers."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    # vLLM caches it, for this renderer. Requests with `mm_processor_kwargs` may get another one.
    processor = renderer.get_mm_processor().info.get_hf_processor()
    theirs = processor.image_processor
    if isinstance(theirs, OwnPatches):
        return
    if type(theirs) is not Qwen2VLImageProcessor:
        raise TypeError(f"the image processor is a {type(theirs).__name__}")
    if not hasattr(theirs, "patchify"):
        raise TypeError("transformers is older than 5.15")
    ours = copy(theirs)
    ours.__class__ = type("OwnImageProcessor", (OwnPatches, Qwen2VLImageProcessor), {})
    raw = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
    decoded: Any = NOISE.copy()
    decoded.rgb = np.array(NOISE)
    expected = theirs(images=[NOISE], **raw)
    for image in (NOISE, decoded):
        found = ours(images=[image], **raw)
        for key in ("pixel_values", "image_grid_thw"):
            if found[key].dtype != expected[key].dtype or not found[key].equal(expected[key]):
                raise ValueError(f"{key} differ from those of transformers")
    processor.image_processor = ours


def use_decoder(renderer: Any) -> None:
    """Raises an error if our decoder cannot replace Pillow."""
    import simplejpeg  # noqa: F401  # names it if it is not installed

    theirs, file = ImageMediaIO(), BytesIO()
    if type(jpeg_io(theirs)) is not JpegIO:
        raise ValueError(f"ImageMediaIO has the attributes {', '.join(vars(theirs))}")
    NOISE.save(file, "JPEG")
    image, expected = opened(file.getvalue()), theirs.load_bytes(file.getvalue()).media
    if image is None or not np.array_equal(image.rgb, np.asarray(expected)):
        raise ValueError("simplejpeg's pixels differ from Pillow's")
    if MEDIA_CONNECTOR_REGISTRY.name2class["http"] is MediaConnector:
        MEDIA_CONNECTOR_REGISTRY.register("http")(JpegConnector)


class OwnPatches:
    """Methods in place of those of transformers' Qwen2VLImageProcessor."""

    def process_image(self, image: Any, *args: Any, **options: Any) -> Tensor:
        """Returns [3, height, width] in the memory order of [height, width, 3], of which torch
        resizes bytes faster."""
        rgb = getattr(image, "rgb", None)
        if rgb is None or options.get("device") is not None:
            return super().process_image(image, *args, **options)  # type: ignore[misc,no-any-return]
        return torch.from_numpy(rgb).permute(2, 0, 1)

    def patchify(
        self, images: Tensor, patch_size: int, merge_size: int, temporal_patch_size: int
    ) -> tuple[Tensor, int, int]:
        """Returns uint8 [1, patches, 3 x temporal x patch x patch], and rows and columns."""
        height, width = images.shape[2:]
        block = patch_size * merge_size
        if (
            images.dtype != torch.uint8
            or images.device.type != "cpu"
            or images.shape[:2] != (1, 3)
            or height % block
            or width % block
        ):
            return super().patchify(  # type: ignore[misc,no-any-return]
                images,
                patch_size=patch_size,
                merge_size=merge_size,
                temporal_patch_size=temporal_patch_size,
            )
        patches = cut_blocks(images[0], patch_size, merge_size).view(-1, 3, 1, patch_size**2)
        repeated = contiguous(patches.expand(-1, -1, temporal_patch_size, -1))
        log.debug("cut an image into %d patches", len(patches))
        return repeated.view(1, len(patches), -1), height // patch_size, width // patch_size


class JpegConnector(MediaConnector):  # type: ignore[misc]
    """Fetches media as vLLM does, and decodes JPEGs with our decoder."""

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        return super().load_from_url(url, jpeg_io(media_io), **options)

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        return await super().load_from_url_async(url, jpeg_io(media_io), **options)


class JpegIO(ImageMediaIO):  # type: ignore[misc]
    def load_bytes(self, data: bytes) -> Any:
        """Called in vLLM's threads. The hash is that of `data`, as for every image."""
        image = opened(data)
        if image is None:
            return super().load_bytes(data)
        budget = getattr(self, "decoded_budget", None)  # of the request, from vLLM 0.33 on
        if budget is not None:
            budget.charge(image.width * image.height * 4)
        log.debug("decoded a JPEG of %d bytes", len(data))
        return MediaWithBytes(image, data)


def jpeg_io(media_io: Any) -> Any:
    """A JpegIO with the same settings, or vLLM's own if it has settings that JpegIO ignores."""
    plain = type(media_io) is ImageMediaIO and vars(media_io).keys() <= SETTINGS
    if not plain or media_io.image_mode != "RGB":
        return media_io
    ours = copy(media_io)
    ours.__class__ = JpegIO
    return ours


def opened(data: bytes) -> Any:
    """An upright RGB JPEG. Its attribute `rgb` is its pixels, uint8 [height, width, 3]. Pillow
    decodes it too if something reads it in another way. None: vLLM must decode it."""
    from actors.media.jpeg import plain_jpeg

    try:
        image: Any = Image.open(BytesIO(data), formats=("JPEG",))
        too_large = 0 < envs.VLLM_MAX_IMAGE_PIXELS < image.width * image.height
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
        if image.mode != "RGB" or too_large or turned:
            return None
        image.rgb = plain_jpeg(data, image)
    except Exception:  # vLLM raises its own
        return None
    return None if image.rgb is None else image

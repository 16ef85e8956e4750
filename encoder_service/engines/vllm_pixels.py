"""Our JPEG decoder in vLLM's API process, for the place "local"; see vllm_plugin.py.

It does not cut images into patches: see vllm_patches.py. Pixels equal those of vLLM's own code bit
for bit, and that code processes what ours does not. Follows vLLM 0.26 to 0.33 and transformers 5.15
to 5.24.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from hashlib import blake2b
from io import BytesIO
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from vllm import envs
from vllm.multimodal import parse
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from actors.media.jpeg import plain_jpeg
from encoder_service.engines import vllm_patches
from encoder_service.engines.vllm_patches import as_vllm_cuts, kept_whole

log = logging.getLogger("vllm.encoder_service")

SETTINGS = {"image_mode", "kwargs", "rgba_background_color", "decoded_budget"}
"""Attributes of vLLM's ImageMediaIO."""

used: Counter[str] = Counter()
"""How often vLLM and transformers have called each part of our code."""
OWNERS = {
    "normalize_image": parse,
    "process_image": Qwen2VLImageProcessor,
    "patchify": Qwen2VLImageProcessor,
}
"""Where the functions that ours replace are defined."""
THEIRS: dict[str, Any] = {name: getattr(owner, name, None) for name, owner in OWNERS.items()}


class Digests:
    """Of the files that were decoded last, at most `most`. Several threads may add some."""

    def __init__(self) -> None:
        self.most = 0
        self._digests: dict[bytes, None] = {}
        self._lock = Lock()

    def of(self, data: bytes) -> bytes:
        """Empty if none are kept: hashing takes a millisecond per MB."""
        return blake2b(data, digest_size=16).digest() if self.most else b""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        with self._lock:
            self._digests[digest] = None
            if len(self._digests) > self.most:
                del self._digests[next(iter(self._digests))]


decoded = Digests()
CACHED_IMAGES = 500
"""About as many images of 1920x1080 or A4 are in vLLM's cache of processed images (4 GB)."""


def use(renderer: Any) -> None:
    """Replaces vLLM's decoder and transformers' patchifier in this process. Raises an error, and
    changes nothing, if ours would not be called or gave other bytes for a noisy image."""
    registered = MEDIA_CONNECTOR_REGISTRY.name2class
    if registered["http"] is JpegConnector:
        return
    preprocessor = renderer.get_mm_processor()
    processor = preprocessor.info.get_hf_processor().image_processor
    if type(processor) is not Qwen2VLImageProcessor:
        raise TypeError(f"{type(processor).__name__} is not the image processor that we replace")
    if missing := [name for name, function in THEIRS.items() if function is None]:
        raise TypeError(f"vLLM or transformers has no {', '.join(missing)}")
    (expected, grid), before = preprocessed(processor), registered["http"]
    registered["http"] = JpegConnector
    replace_with(OURS)
    try:
        used.clear()
        found, found_grid = preprocessed(processor)
        if unused := {"load_bytes", "process_image", "patchify"} - used.keys():
            raise RuntimeError(f"vLLM or transformers does not call {', '.join(sorted(unused))}")
        patches = as_vllm_cuts(found, grid[0].tolist(), processor)
        same = patches.dtype == expected.dtype and patches.equal(expected)
        if not same or not grid.equal(found_grid):
            raise ValueError("vLLM's pixels or patches differ from ours")
    except Exception:
        registered["http"] = before
        replace_with(THEIRS)
        raise
    decoded.most = 0 if renderer.mm_processor_cache is None else CACHED_IMAGES
    if hasattr(preprocessor, "_get_hf_mm_text"):  # not in vLLM 0.26
        preprocessor._get_hf_mm_text = partial(text_of, preprocessor._get_hf_mm_text)


def replace_with(functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        setattr(OWNERS[name], name, function)


def text_of(theirs: Callable[[Mapping[str, int]], str | None], items: Mapping[str, int]) -> Any:
    """The text that transformers' processor gets with images and videos: none for images, because
    vLLM discards its tokens, of which a page of A4 has 3,796."""
    return theirs(items) if items.get("video") else None


def preprocessed(processor: Any) -> list[Tensor]:
    """The patches and the grid of a noisy JPEG that vLLM fetches from a data URL."""
    file, pixels = BytesIO(), np.random.default_rng(0).integers(0, 256, (100, 150, 3), np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    url = f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
    image = MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR).fetch_image(url)
    image = getattr(image, "media", image)
    raw = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
    made = processor(images=[image], **raw)
    return [made["pixel_values"], made["image_grid_thw"]]


def normalize_image(image: Any) -> Any:
    """Called for images that vLLM's cache of processed images lacks. Returns those that JpegIO
    opened as they are: they are upright, and vLLM would decode them once more to turn them."""
    return image if hasattr(image, "jpeg") else THEIRS["normalize_image"](image)


def process_image(self: Any, image: Any, *args: Any, **options: Any) -> Any:
    """Returns [3, height, width] in the memory order of [height, width, 3], of which torch resizes
    bytes faster."""
    rgb = None
    if hasattr(image, "jpeg") and options.get("device") is None:
        rgb = plain_jpeg(image.jpeg, image) if image.rgb is None else image.rgb
    if rgb is None or rgb.shape[1::-1] != image.size:
        return THEIRS["process_image"](self, image, *args, **options)
    used["process_image"] += 1
    return torch.from_numpy(rgb).permute(2, 0, 1)


def patchify(
    self: Any, images: Tensor, patch_size: int, merge_size: int, temporal_patch_size: int
) -> Any:
    """Returns images that are kept whole (vllm_patches.py), and their rows and columns of patches.

    All images of a request must be kept whole, or none, because transformers concatenates them.
    `images` may be several: transformers 5.15 groups equal sizes."""
    count, channels, height, width = images.shape
    block = patch_size * merge_size
    if (
        images.dtype != torch.uint8
        or images.device.type != "cpu"
        or channels != 3
        or height % block
        or width % block
        or temporal_patch_size != vllm_patches.TEMPORAL_PATCH_SIZE
        or vllm_patches.engine_is_here
    ):
        return THEIRS["patchify"](
            self,
            images,
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=temporal_patch_size,
        )
    used["patchify"] += 1
    log.debug("kept %d images of %dx%d whole", count, width, height)
    return kept_whole(images, patch_size), height // patch_size, width // patch_size


OURS = {"normalize_image": normalize_image, "process_image": process_image, "patchify": patchify}


class JpegConnector(MediaConnector):  # type: ignore[misc]
    """Fetches media as vLLM does, and decodes JPEGs with our decoder."""

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        return super().load_from_url(url, jpeg_io(media_io), **options)

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        return await super().load_from_url_async(url, jpeg_io(media_io), **options)


class JpegIO(ImageMediaIO):  # type: ignore[misc]
    def load_bytes(self, data: bytes) -> Any:
        """Called in vLLM's threads. The hash is that of `data`, as for every image.

        The image's attribute `rgb` is its pixels, uint8 [height, width, 3]. It is None if the same
        file has been decoded before: its pixels are probably in vLLM's cache of processed images,
        as in later turns of a chat, and are decoded from `jpeg` if they are not. If something reads
        the image in another way, Pillow decodes it."""
        image = plain(data)
        if image is None:
            return super().load_bytes(data)
        budget = getattr(self, "decoded_budget", None)  # of the request, from vLLM 0.33 on
        if budget is not None:
            budget.charge(image.width * image.height * 4)
            self.decoded_budget = None  # of this copy, so that nothing is charged twice
        image.jpeg, image.rgb = data, None
        digest = decoded.of(data)
        if digest not in decoded:
            image.rgb = plain_jpeg(data, image)
            if image.rgb is None:
                return super().load_bytes(data)
            decoded.add(digest)
        used["load_bytes"] += 1
        log.debug("accepted a JPEG of %d bytes", len(data))
        return MediaWithBytes(image, data)


def jpeg_io(media_io: Any) -> Any:
    """A JpegIO with the same settings, or vLLM's own if it has settings that JpegIO ignores."""
    known = type(media_io) is ImageMediaIO and vars(media_io).keys() <= SETTINGS
    if not known or media_io.image_mode != "RGB":
        return media_io
    ours = copy(media_io)
    ours.__class__ = JpegIO
    return ours


def plain(data: bytes) -> Any:
    """Opens an upright RGB JPEG. None: vLLM must decode it, or raise its own error."""
    try:
        image = Image.open(BytesIO(data), formats=("JPEG",))
        if image.mode != "RGB" or 0 < envs.VLLM_MAX_IMAGE_PIXELS < image.width * image.height:
            return None
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except Exception:
        return None
    return None if turned else image

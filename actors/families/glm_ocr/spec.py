"""GLM-OCR: transformers.models.glm_ocr. Processors are those of GLM-4.6V."""

from __future__ import annotations

from actors.families.glm4v.spec import TOWER, glm
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Thinning
from actors.spec.settings import ModelSource
from actors.spec.video import FRAMES_PER_GROUP


def glm_ocr(source: ModelSource) -> ModelSpec:
    return glm(source, Thinning(FRAMES_PER_GROUP), "glm_ocr", bias=True)


MODEL_TYPES = {"glm_ocr": glm_ocr}
VISION_DEFAULTS = {
    "glm_ocr": TOWER
    | {"hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "intermediate_size": 4096}
}

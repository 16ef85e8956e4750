"""The connector inside vLLM 0.26, for measurements alone: the product refuses that release.

It takes no embedding without rows, so a client sends rows of width 1 beside the id (bench_026.py),
and this connector takes them for none. An id that is gone makes its request wait for ever.

    PYTHONPATH=CHECKOUT vllm serve MODEL --enable-mm-embeds --mm-processor-cache-gb 1
        --ec-transfer-config '{"ec_connector": "EncoderServiceConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "tests.engines.connector_026",
        "ec_connector_extra_config": {"url": "http://127.0.0.1:8000"}}'

With no processor cache and no prefix cache at all, that vLLM puts names of its own in the place of
ids.
"""

from __future__ import annotations

from typing import Any

from encoder_service.engines import vllm_connector
from encoder_service.engines.vllm_rows import METADATA

ROWS = "image_embeds"


class EncoderServiceConnector(vllm_connector.EncoderServiceConnector):
    def check_version(self) -> None:
        pass

    @staticmethod
    def is_reference(feature: Any) -> bool:
        if feature.data is None or not feature.data.keys() <= METADATA | {ROWS}:
            return False
        return ROWS not in feature.data or feature.data[ROWS].data.shape[-1] == 1

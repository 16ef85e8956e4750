"""Encoders that Serve takes away answer what they have."""

from __future__ import annotations

from threading import Thread
from time import sleep

import pytest
from ray import serve

from actors.types import Embedding
from router.options import RouterOptions
from tests.serve.stand_in import encoders, item, right, routed
from tests.serve.test_kill import status

SLOW = 200_000
"""Patches: two seconds."""


@pytest.mark.usefixtures("cluster")
def test_a_call_outlasts_its_encoders_deployment() -> None:
    serve.run(encoders(1), name="drained", route_prefix=None)
    handle = serve.get_deployment_handle("Encoder", "drained")
    options = RouterOptions(replica_wait_seconds=0.5)
    router = serve.run(routed(handle, options), name="staying", route_prefix=None)
    try:
        quick, slow = [item(1, 4)], [item(2, SLOW)]
        assert right(quick, router.encode.remote(quick, "bfloat16", 10.0).result(timeout_s=10))
        (replica,) = status(router).replicas
        call = router.encode.remote(slow, "bfloat16", 20.0)
        sleep(0.3)
        deleting = Thread(target=serve.delete, args=("drained",))
        deleting.start()
        for _ in range(10):  # the router hears that there is no encoder any more
            sleep(0.1)
            seen = status(router).replicas
        assert not seen
        answers = call.result(timeout_s=20)
        assert right(slow, answers)
        assert [one.replica for one in answers if isinstance(one, Embedding)] == [replica.replica]
        deleting.join(timeout=30)
    finally:
        serve.delete("staying")

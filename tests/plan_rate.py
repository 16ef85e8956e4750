"""`python -m tests.plan_rate`: images per second of POST /v1/plan, one request after another.

The server is the front door's application on uvicorn in this process; a second process sends
requests of 50 JPEGs of 320 x 240 pixels over one connection. CPU seconds are this process's alone.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
from base64 import b64encode
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import Thread
from time import perf_counter, process_time, sleep

import msgpack
import uvicorn

from encoder_service.api.http import build
from encoder_service.wire.formats import JSON, MSGPACK
from tests.images import encoded, opened
from tests.unit.front_door import Fleet, service

IMAGES = 50
REQUESTS = 40


def send(port: int, body: bytes, content_type: str) -> float:
    """Returns the seconds that all requests took."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"content-type": content_type, "accept": content_type}
    started = perf_counter()
    for _ in range(REQUESTS):
        connection.request("POST", "/v1/plan", body, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200
    return perf_counter() - started


def main() -> None:
    picture = opened("chelsea.png").resize((320, 240))
    files = [encoded(picture.rotate(i), "JPEG", quality=85) for i in range(IMAGES)]
    bodies = {
        MSGPACK: msgpack.packb({"items": [{"data": file} for file in files]}),
        JSON: json.dumps(
            {"items": [{"data": b64encode(file).decode()} for file in files]}
        ).encode(),
    }
    logging.disable(logging.INFO)  # httpx logs a line per request
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(build(service(Fleet())), log_level="warning"))
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            sleep(0.05)
        with ProcessPoolExecutor(1, get_context("spawn")) as sender:
            for content_type, body in bodies.items():
                sender.submit(send, port, body, content_type).result()  # warms both up
                before = process_time()
                seconds = sender.submit(send, port, body, content_type).result()
                spent = process_time() - before
                images = IMAGES * REQUESTS
                print(
                    f"{content_type}: {images / seconds:.0f} images/s, {images / spent:.0f} per "
                    f"CPU second, {len(body) / IMAGES / 1024:.1f} KiB each"
                )
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()

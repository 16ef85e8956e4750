"""`python -m tests.fuzz.api COMMAND...`: runs a command against the front door, without Ray.

`{url}` in the command is the address of its OpenAPI document. The answers are zeros, the token is
"open".
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from threading import Thread
from time import sleep

import uvicorn

from actors.families.registry import read
from encoder_service.api.http import build
from encoder_service.config import AuthOptions, ServiceOptions
from encoder_service.service import Service
from tests.unit.front_door import MODEL, Fleet


def closed() -> Service:
    """A front door that asks for the token."""
    auth = AuthOptions(token_sha256=(hashlib.sha256(b"open").hexdigest(),))
    return Service(ServiceOptions(model=MODEL, auth=auth), read(MODEL), Fleet())


def main(command: list[str]) -> int:
    """The command's exit status."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/openapi.json"
        server = uvicorn.Server(uvicorn.Config(build(closed()), log_level="warning"))
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                sleep(0.05)
            return subprocess.run([part.format(url=address) for part in command]).returncode
        finally:
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

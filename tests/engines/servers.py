"""Processes that serve: vLLM of another environment, on this machine's CPU, and others."""

from __future__ import annotations

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
START_SECONDS = 600
OPTIONS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8",
    "--gpu-memory-utilization", "0.05", "--no-enable-prefix-caching", "--enable-mm-embeds",
    "--served-model-name", "m", "--host", "127.0.0.1",
)  # fmt: skip
"""The memory is the machine's own: there is no GPU."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as on one GPU, scheduler and worker share a process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def running(command: Sequence[str], health: str, log: Path) -> Iterator[None]:
    """A process, from when an URL of it answers."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{metadata(log.parent)}"},
        )
    try:
        wait(process, health, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def metadata(folder: Path) -> Path:
    """A folder with our entry points, as pip writes them: vLLM finds its plugins there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = folder / "metadata" / "encoder_service-0.dist-info"
    written.mkdir(parents=True, exist_ok=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: encoder-service\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (written / "entry_points.txt").write_text("\n".join(lines))
    return written.parent


def wait(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    """Until it answers. Fails with the end of its log."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(health, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-5000:])


@contextmanager
def vllm(python: str, folder: Path, name: str, **options: Any) -> Iterator[str]:
    """URL of `vllm serve` of the checkpoint in folder/model; its log lies beside that.

    Of the options, such as limit_mm_per_prompt, the values are texts or JSON; None: an option
    without one.
    """
    from encoder_service.bench.cluster import free_ports  # which SGLang's environment lacks

    (port,) = free_ports(1)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *OPTIONS]
    command += ["--model", str(folder / "model"), "--port", str(port)]
    for option, value in options.items():
        command += [f"--{option.replace('_', '-')}"]
        if value is not None:
            command.append(value if isinstance(value, str) else json.dumps(value))
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/health", folder / f"{name}.log"):
        yield url

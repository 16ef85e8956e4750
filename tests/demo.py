"""`make demo`: the tiny service encodes photographs over HTTP and gRPC, and answers a chat.

`make demo-vectors`: a small random CLIP returns vectors of photographs and texts. `make
demo-audio`: a small random Qwen2-Audio encodes sounds. Prints the service's metrics. Exits with 1
if a check fails. Needs no GPU, no weights, no network.
"""

from __future__ import annotations

import json
import sys
import time
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.bench.load import WorkDone, scrape, work_between
from encoder_service.client import Client, Embedding, Text
from encoder_service.config import ServiceOptions, load
from tests.checkpoints_audio import RATE, Hearing, sound, tones, write_qwen2_audio
from tests.checkpoints_clip import CAPTIONS, units_of, write_clip_texts
from tests.images import PHOTOGRAPHS, jpeg, photograph
from tests.videos import video

CONFIG = Path(__file__).parents[1] / "configs" / "tiny-chat.yaml"
TOLERANCE = 1e-3
"""Maximum difference between two float32 runs, which may pack items differently."""


def main() -> int:
    console = Console()
    options = load(CONFIG)
    pictures = {name: photograph(name) for name in PHOTOGRAPHS}
    pictures["moving coffee, MP4"] = video(20, size=(160, 96), fps=10)
    pictures["coffee, small JPEG"] = jpeg(160, 240)
    started = time.perf_counter()
    with cluster(logical_cpus(options), object_store_bytes=400_000_000) as where:
        encoders = options.encoder.replicas
        console.print(f"starting {CONFIG.name}: {encoders} encoders, a language model ...")
        with service(options, where):
            console.print(f"ready after {time.perf_counter() - started:.0f} s\n")
            before = scrape(where.http)
            over_http = encode(console, where.http, pictures)
            over_grpc = encode(console, where.grpc, pictures)
            work = work_between(before, scrape(where.http))
            console.print(metrics(work))
            rows = over_http[-1].tokens
            chats = chat(
                console, where.http, options.model.id, pictures["coffee, small JPEG"], rows
            )
    return judge(console, over_http, over_grpc, work, encoders, chats)


def vectors() -> int:
    """Checks that photographs are ranked for texts as by transformers with the same weights."""
    console, names = Console(), list(PHOTOGRAPHS)
    with TemporaryDirectory() as folder:
        model = write_clip_texts(Path(folder))
        few = {"num_cpus": 0.1}
        options = ServiceOptions.model_validate(
            {
                "model": {"id": folder, "dtype": "float32", "output": "vector"},
                "encoder": {"replicas": 2, "device": "cpu", "num_gpus": 0} | few,
                **{"router": few, "ingress": few},
            }
        )
        exact = units_of(model, folder, names)
        with cluster(logical_cpus(options), object_store_bytes=400_000_000) as where:
            console.print("starting: 2 encoders with a small random CLIP ...")
            with service(options, where), Client(where.http) as client:
                started = time.perf_counter()
                images = client.embed([photograph(name) for name in names])
                texts = client.embed([Text(one) for one in CAPTIONS])
                taken = time.perf_counter() - started
                body = {"input": CAPTIONS[0], "encoding_format": "float", "dimensions": 8}
                answer = httpx.post(f"{where.http}/v1/embeddings", json=body, trust_env=False)
    title = f"/v1/embeddings: {len(names)} images, {len(CAPTIONS)} texts in {taken * 1e3:.0f} ms"
    shown = Table("text", *names, title=f"{title}; cosine similarity, by random weights")
    for caption, row in zip(CAPTIONS, texts @ images.T, strict=True):
        shown.add_row(caption, *(f"{one:.3f}" for one in row))
    console.print(shown)
    few_values = np.array(answer.json()["data"][0]["embedding"])
    cut = texts[0, :8] / np.linalg.norm(texts[0, :8])
    ranks, theirs = ((b @ a.T).argsort(1) for a, b in ((images, texts), exact))
    checks = {
        "texts rank the photographs as with transformers": bool((ranks == theirs).all()),
        "vectors of texts equal transformers'": np.allclose(texts, exact[1], atol=1e-4),
        "vectors have length 1": np.allclose(np.linalg.norm(images, axis=1), 1),
        "floats of 8 dimensions are the first, scaled": np.allclose(few_values, cut, atol=1e-6),
    }
    return told(console, checks)


def audio() -> int:
    """Checks that sounds of several formats and lengths are encoded as by transformers."""
    console = Console()
    with TemporaryDirectory() as folder:
        model = write_qwen2_audio(Path(folder))
        few = {"num_cpus": 0.1}
        options = ServiceOptions.model_validate(
            {
                "model": {"id": folder, "dtype": "float32"},
                "encoder": {"replicas": 2, "device": "cpu", "num_gpus": 0} | few,
                **{"router": few, "ingress": few},
            }
        )
        waves = [tones(seconds, seed=place) for place, seconds in enumerate((2.0, 0.7, 1.234))]
        exact = [Hearing("qwen2_audio", model).rows([wave]).numpy() for wave in waves]
        sounds = {f"WAV, {len(wave) / RATE:g} s": sound(wave) for wave in waves}
        sounds |= {"FLAC": sound(waves[0], "flac"), "MP3": sound(tones(1.5, 44100), "mp3", 44100)}
        sounds["OGG, two channels"] = sound(np.stack([tones(1.5, 48000)] * 2), "ogg", 48000)
        with cluster(logical_cpus(options), object_store_bytes=400_000_000) as where:
            console.print("starting: 2 encoders with a small random Qwen2-Audio ...")
            with service(options, where):
                over_http = encode(console, where.http, sounds)
                over_grpc = encode(console, where.grpc, sounds)
                with Client(where.http) as client:
                    plans = client.plan(list(sounds.values()))
    rows = [one.numpy() for one in over_http]
    checks = {
        "rows equal transformers'": all(
            np.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(rows, exact, strict=False)
        ),
        "FLAC gives the rows of WAV": np.allclose(rows[3], rows[0], atol=1e-4),
        "HTTP and gRPC return the same rows": all(
            np.allclose(one, other.numpy(), atol=TOLERANCE)
            for one, other in zip(rows, over_grpc, strict=True)
        ),
        "plans are as long": [plan.tokens for plan in plans] == [len(one) for one in rows],
    }
    return told(console, checks)


def encode(console: Console, url: str, pictures: dict[str, bytes]) -> list[Embedding]:
    with Client(url) as client:
        client.model()  # connects before the clock starts
        started = time.perf_counter()
        embeddings = client.encode(list(pictures.values()), dtype="float32")
        taken = time.perf_counter() - started
    title = f"{url}: {len(pictures)} items in {taken * 1e3:.0f} ms"
    shown = Table("item", "grid", "tokens", "shape", "source", title=title)
    for name, one in zip(pictures, embeddings, strict=True):
        grid, shape = (" x ".join(map(str, numbers)) for numbers in (one.grid_thw, one.shape))
        shown.add_row(name, grid, str(one.tokens), shape, one.source)
    console.print(shown)
    timings = embeddings[0].timings.items()
    console.print(", ".join(f"{name[:-3]} {value:.1f} ms" for name, value in timings), "\n")
    return embeddings


def chat(console: Console, url: str, model: str, picture: bytes, rows: int) -> bool:
    """Asks about a photograph, with and without streaming. Returns whether all answers are
    right."""
    image = {"url": "data:image/jpeg;base64," + b64encode(picture).decode()}
    question = {"type": "text", "text": "What is in the picture?"}
    content = [{"type": "image_url", "image_url": image}, question]
    request = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 48,
    }
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        started = time.perf_counter()
        answer = client.post("/v1/chat/completions", json=request).raise_for_status().json()
        taken = time.perf_counter() - started
        stream = client.post("/v1/chat/completions", json=request | {"stream": True})
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
    text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    console.print(f"\n/v1/chat/completions, {usage} in {taken * 1e3:.0f} ms, by random weights:")
    console.print(repr(text), markup=False, highlight=False)
    console.print(f"the same as a stream: {sum(map(bool, deltas))} pieces\n")
    return (
        "".join(deltas) == text
        and lines[-1] == "[DONE]"
        and usage["prompt_tokens"] > rows
        and answer["weights"] == "dummy"
    )


def metrics(work: WorkDone) -> Table:
    shown = Table(title="from /metrics, both requests", show_header=False)
    shown.add_row("graph hits, misses", f"{work.hits:g}, {work.misses:g} ({work.hit_rate:.0%} hit)")
    shown.add_row("padding", f"{work.padded_tokens:g} tokens, {work.padding:.0%} of all computed")
    for replica, patches in sorted(work.replica_patches.items()):
        shown.add_row(f"patches, encoder {replica}", f"{patches:g}")
    shown.add_row("balance, max/mean", f"{work.balance:.2f}")
    return shown


def judge(
    console: Console,
    over_http: list[Embedding],
    over_grpc: list[Embedding],
    work: WorkDone,
    replicas: int,
    chats: bool,
) -> int:
    equal = all(
        np.allclose(one.numpy(), other.numpy(), atol=TOLERANCE)
        and (one.grid_thw, one.digest) == (other.grid_thw, other.digest)
        for one, other in zip(over_http, over_grpc, strict=True)
    )
    checks = {
        "HTTP and gRPC return the same rows": equal,
        "all numbers are finite": all(np.isfinite(one.numpy()).all() for one in over_http),
        "/metrics counted every item": work.hits + work.misses == 2 * len(over_http),
        "every encoder took part": len(work.replica_patches) == replicas
        and min(work.replica_patches.values()) > 0,
        "weights are reported as random": over_http[0].weights == "dummy",
        "chat: the stream equals the answer, and usage counts the photograph": chats,
    }
    return told(console, checks)


def told(console: Console, checks: dict[str, bool]) -> int:
    """Prints the checks. Returns the exit status."""
    for name, good in checks.items():
        console.print(f"[{'green' if good else 'red'}]{'yes' if good else 'NO '}[/] {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit({"vectors": vectors, "audio": audio}.get("".join(sys.argv[1:]), main)())

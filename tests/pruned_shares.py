"""`python -m tests.pruned_shares [FILE...]`: how much `preprocess.prune: exact` keeps of images.

Shows screenshots and pages that are drawn here, the status page and photographs of scikit-image, or
the files that are named. A cell is the share of tokens that are kept. CPU times are medians of this
process for the first size: from the file to all patches, and of the comparison alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import process_time

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from actors.families.registry import read
from actors.media.image import prepare
from actors.media.patchify import patchifier_of, unrepeated
from actors.options import ModelOptions
from actors.types import ProcessorKwargs
from encoder_service.config import LimitOptions
from encoder_service.intake.media import probe
from tests.images import encoded, opened

SCREEN = Path(__file__).parents[1] / "docs" / "status.png"
REPEATS = 5
WORDS = (
    *("the", "of", "a", "page", "that", "an", "encoder", "reads", "is", "mostly", "paper", "its"),
    *("margins", "columns", "headings", "tables", "figures", "captions", "and", "white", "between"),
)


def lines(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], size: int, seed: int) -> None:
    """Draws lines of text that fill a box."""
    left, top, right, bottom = box
    font, random = ImageFont.load_default(size), Random(seed)
    for y in range(top, bottom - size, size * 3 // 2):
        text = random.choice(WORDS)
        while draw.textlength(longer := f"{text} {random.choice(WORDS)}", font) < right - left:
            text = longer
        draw.text((left, y), text, (20, 20, 20), font)


def page(width: int = 1654, height: int = 2339) -> Image.Image:
    """A printed page, A4 at 200 dpi: a heading, two columns, a table and a photograph."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    edge, middle = width // 9, width // 2
    draw.text((edge, edge), "Fewer patches before the tower", "black", ImageFont.load_default(52))
    top = edge + 120
    lines(draw, (edge, top, middle - 30, height - edge), 28, 1)
    lines(draw, (middle + 30, top, width - edge, height // 3), 28, 2)
    image.paste(opened().resize((middle - edge - 30, 400)), (middle + 30, height // 3 + 40))
    for row in range(12):
        y = height // 3 + 520 + 60 * row
        draw.line((middle + 30, y, width - edge, y), "black", 2)
        for column in range(4):
            x = middle + 50 + 150 * column
            draw.text(
                (x, y + 12), f"{row * 37.5 + column:.1f}", "black", ImageFont.load_default(28)
            )
    return image


def desktop(width: int = 1920, height: int = 1080) -> Image.Image:
    """A screenshot: a window with a bar, a list at the side, a form, and text."""
    image = Image.new("RGB", (width, height), (243, 244, 246))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(20)
    draw.rectangle((0, 0, width, 56), (36, 41, 47))
    draw.text((24, 16), "Encoder Service    Models    Replicas    Logs", "white", font)
    draw.rectangle((0, 56, 320, height), "white")
    for entry, word in enumerate(WORDS[:14]):
        y = 90 + 48 * entry
        if entry == 3:
            draw.rectangle((8, y - 12, 312, y + 32), (221, 235, 255))
        draw.text((32, y), f"{word} {entry}", (60, 60, 60), font)
    draw.rectangle((360, 100, width - 40, height - 40), "white", (208, 215, 222))
    lines(draw, (400, 140, width - 500, 420), 22, 3)
    for field in range(4):
        y = 480 + 90 * field
        draw.text((400, y), WORDS[field].title(), (60, 60, 60), font)
        draw.rectangle((400, y + 28, 1000, y + 68), "white", (140, 149, 159))
    image.paste(opened("chelsea.png").resize((360, 240)), (width - 440, 140))
    return image


def scanned(image: Image.Image, brighter: float) -> Image.Image:
    """Adds grey noise of two steps and brightens; what exceeds 255 is white again."""
    noise = np.random.default_rng(0).normal(brighter, 2, (image.height, image.width, 1))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).round().astype(np.uint8))


def pictures() -> dict[str, bytes]:
    screen, sheet = desktop(), page()
    scan, clean = scanned(sheet, -2), scanned(sheet, 12)
    fax = scan.convert("L").point(lambda value: 255 * (value > 127)).convert("1")
    return {
        "screenshot, drawn, PNG": encoded(screen, "PNG"),
        "screenshot, drawn, JPEG 85": encoded(screen, "JPEG", quality=85),
        "docs/status.png": SCREEN.read_bytes(),
        "page, drawn, PNG": encoded(sheet, "PNG"),
        "page, drawn, JPEG 85": encoded(sheet, "JPEG", quality=85),
        "page with noise, PNG": encoded(scan, "PNG"),
        "page with noise, JPEG 85": encoded(scan, "JPEG", quality=85),
        "page with noise, paper clipped to white, JPEG 85": encoded(clean, "JPEG", quality=85),
        "page with noise, in black and white, PNG": encoded(fax, "PNG"),
        "page, upper part, PNG": encoded(page(1024, 1448).crop((0, 0, 1024, 1024)), "PNG"),
        "photograph (coffee.png), PNG": encoded(opened(), "PNG"),
    }


def milliseconds(call: Callable[[], object]) -> float:
    """The median CPU time of some calls, after a warm-up call."""
    seconds = []
    for _ in range(REPEATS + 1):
        began = process_time()
        call()
        seconds.append(process_time() - began)
    return 1e3 * median(seconds[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--model", default="qwen3vl-8b", help="a preset (qwen3vl-8b)")
    parser.add_argument("--max-pixels", nargs="+", type=int, default=[2**24, 1024 * 1024, 2**18])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as in decoder processes
    spec = read(ModelOptions(id=options.model, load_format="dummy"))
    spec.check_prune()
    patchifier, merge = patchifier_of(spec), spec.sizing.merge_size
    sizes = " | ".join(f"up to {most:,} pixels" for most in options.max_pixels)
    print(f"| picture | {sizes} | to patches, ms | comparison, ms |")
    print("|---" * (3 + len(options.max_pixels)) + "|")
    given = {file.name: file.read_bytes() for file in options.files}
    for name, data in (given or pictures()).items():
        cells = []
        for most in options.max_pixels:
            media = probe(
                data, "image", spec, LimitOptions(), kwargs=ProcessorKwargs(max_pixels=most)
            )
            found, grid = prepare(patchifier, media), media.plan.grid_thw
            kept = unrepeated(found.patches, grid, merge)
            cells.append(f"{kept.mean():.0%} of {len(kept)}")
            if len(cells) == 1:
                whole = milliseconds(partial(prepare, patchifier, media))
                alone = milliseconds(partial(unrepeated, found.patches, grid, merge))
        print(f"| {name} | {' | '.join(cells)} | {whole:.1f} | {alone:.2f} |")


if __name__ == "__main__":
    main()

"""`python -m tests.fuzz TARGET FOLDER [libFuzzer options]`: atheris looks for inputs that fail.

What it finds worth keeping goes into FOLDER; one that fails is written to the working directory:
put it into tests/fuzz/corpus/TARGET/, and mend what it shows.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["encoder_service", "actors.media.image", "PIL", "httpx"]):
    from tests.fuzz.seeds import corpus
    from tests.fuzz.targets import TARGETS, run


def main(name: str, folder: Path, options: list[str]) -> None:
    """Does not return."""
    folder.mkdir(parents=True, exist_ok=True)
    for position, data in enumerate([*TARGETS[name].seeds(), *corpus(name)]):
        (folder / f"seed-{position}").write_bytes(data)
    warnings.simplefilter("ignore")  # Pillow warns of much that is damaged
    atheris.Setup([sys.argv[0], *options, str(folder)], lambda data: run(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

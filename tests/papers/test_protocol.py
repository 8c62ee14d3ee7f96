"""The list of tables and figures, the printed numbers, and a table made end to end on a tiny model."""

from __future__ import annotations

import json
import re

import pytest

from perpend import papers
from perpend.cli import run
from perpend.errors import InputError
from perpend.models.catalog import CATALOG
from perpend.papers.protocol import catalog, compare, find

SECTION = {"table-6": "Table 6: Estimator", "table-7": "Table 7: Aggregation",
           "table-8": "Table 8: Convention", "table-9": "Table 9: Clark",
           "table-10": "Table 10: Full", "table-11": "Table 11: Additional",
           "table-2": "Table 2: Measured"}  # fmt: skip


@pytest.mark.parametrize("item", SECTION)
def test_printed_numbers_stand_in_the_paper(item: str, shared) -> None:
    source = (shared / "papers" / "attention-rows-as-compositions.md").read_text()
    start = source.index(SECTION[item])
    lines = [line for line in source[start:].split("\n\n")[1].split("\n") if line.startswith("|")]
    title = ""
    cells: dict[str, str] = {}
    for line in lines:
        first = line.strip("|").split("|")[0].strip()
        title = first or title
        cells[title] = cells.get(title, "") + line
    for entry in papers.published("attention", item).entries.values():
        row = cells[entry.more.get("title") or f"${entry.more['clusters']}$"]
        sd = entry.more.get("sd")
        wanted = re.escape(entry.printed) + (rf"\{{\\scriptstyle\\pm {re.escape(sd)}\}}" if sd else "")
        assert re.search(rf"(?<![\d.]){wanted}(?![\d])", row), (entry.name, entry.printed)


def test_every_item_says_what_it_needs_and_models_are_in_the_catalog() -> None:
    for item in catalog().values():
        assert item.question.endswith("?")
        assert item.command or item.why, item.item
        assert set(item.models) <= set(CATALOG), item.item
        if item.published:
            paper, name = item.item.split("/")
            assert name in papers.items(paper) or name == "figure-1", item.item


def test_commands_are_verbs_whose_options_exist() -> None:
    import importlib

    for item in catalog().values():
        for _, words in item.commands(["model"]):
            verb = words[0]
            module = importlib.import_module(f"perpend.commands.{verb}")
            options = {name for parameter in module.command.params for name in parameter.opts}
            for word in words:
                assert not word.startswith("--") or word in options, (item.item, word)


def test_near_names_are_suggested() -> None:
    with pytest.raises(InputError, match="attention/table-10"):
        find("attention/table-10x")


def test_the_list_and_a_plan_are_one_json_document(capsys) -> None:
    assert run(["paper", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["items"]) == len(catalog())
    assert run(["paper", "attention/table-2", "--models", "gpt2=here,pythia-70m", "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert [row["model"] for row in plan] == ["here", "pythia-70m"]
    assert plan[0]["command"].startswith("perpend attention here --text")


def test_an_item_without_a_command_says_why(capsys) -> None:
    assert run(["paper", "attention/table-9"]) == 2
    assert "no study makes it yet" in capsys.readouterr().err


def test_measured_numbers_are_held_against_printed_ones() -> None:
    results = {
        "sink": {"row_mass": 0.681, "signature_mass": 0.5},
        "collapse": {"disagreement": 0.273},
        "reversal": {m: {"mean": 0.36} for m in ("cosine", "jensen_shannon", "euclidean", "hellinger")},
    }
    rows = {row.name: row for row in compare(find("attention/table-2"), "gpt2", results)}
    assert rows["gpt2/sink_row"].within
    assert not rows["gpt2/sink_signature"].within
    assert rows["gpt2/cosine"].measured == pytest.approx(36.0)
    assert rows["gpt2/cosine"].within  # 36.1 ± 0.1
    assert not rows["gpt2/jensen_shannon"].within
    cells = [{"criterion": "js", "sparsity": 0.1, "perplexity": 50.4}]
    pruned = compare(find("attention/table-10"), "gpt2", {"base": {"perplexity": 43.5}, "cells": cells})
    assert {row.name: row.within for row in pruned} == {"gpt2/base": True, "gpt2/10/js": True}


@pytest.mark.slow
def test_a_table_is_made_end_to_end_on_a_local_folder(tmp_path, capsys) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<s>", *letters])}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(letters) + 1,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
    text.write_text("which head looks at what, and how much of it is the sink? " * 60)
    code = run(
        ["paper", "attention/table-2", "--models", f"gpt2={folder}", "--out", str(tmp_path / "out"),
         "--json", "--", "--text", str(text), "--sequences", "12", "--length", "80", "--bootstrap", "0",
         "--triples", "500"]
    )  # fmt: skip
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    names = {row["name"] for row in document["comparisons"]}
    assert {"gpt2/sink_row", "gpt2/cosine", "gpt2/collapse_disagreement"} <= names
    assert all(not row["within"] or row["published"] > 0 for row in document["comparisons"])

"""The list of tables and figures, the printed numbers, and a table made end to end on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from perpend import papers
from perpend.cli import run
from perpend.errors import InputError
from perpend.models.catalog import CATALOG
from perpend.papers.comparison import compare, entries_of, key_of
from perpend.papers.measures import at
from perpend.papers.protocol import Named, catalog, find, overridden, without_hub_texts

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


@pytest.mark.parametrize(("paper", "passage"), [("attention", "prose-models"), ("directional", "prose")])
def test_numbers_in_prose_stand_in_their_sentences(paper: str, passage: str, shared) -> None:
    names = {"attention": "attention-rows-as-compositions.md", "directional": "directional-decomposition.md"}
    source = (shared / "papers" / names[paper]).read_text()
    for entry in papers.published(paper, passage).entries.values():
        assert entry.more["sentence"] in source, entry.name
        assert re.search(
            rf"(?<![\d.]){re.escape(entry.printed.lstrip('-'))}(?!\d)", entry.more["sentence"]
        ), entry.name
        assert entry.more["item"] in catalog(), entry.name


def test_exact_numbers_in_prose_stand_in_the_paper(shared) -> None:
    source = (shared / "papers" / "attention-rows-as-compositions.md").read_text()
    for entry in papers.published("attention", "prose").entries.values():
        digits = entry.printed.lstrip("-")
        assert re.search(rf"(?<![\d.]){re.escape(digits)}(?!\d)", source) or "/" in entry.printed, entry.name


def test_every_item_says_what_it_needs_and_models_are_in_the_catalog() -> None:
    for item in catalog().values():
        assert item.question.endswith("?")
        assert item.steps or item.why, item.item
        assert set(item.models) | set(item.also) <= set(CATALOG), item.item
        assert set(item.needs) <= {"hub", "GPU", "hours", "days"}
        assert item.note or item.published or item.why, item.item
        if item.published:
            paper, name = item.item.split("/")
            assert (item.values or name) in papers.items(paper), item.item


def test_models_of_printed_numbers_are_the_items_own() -> None:
    for item in catalog().values():
        if item.values:  # another table's numbers, of which this one has a part
            continue
        named = {entry.more["model"] for entry in entries_of(item) if "model" in entry.more}
        assert named <= set(item.models), item.item


def test_every_table_and_figure_of_the_text_is_listed(shared) -> None:
    source = (shared / "papers" / "directional-decomposition.md").read_text().replace("\xa0", " ")
    named = {f"directional/{kind.lower()}-{n}" for kind, n in re.findall(r"(Table|Figure) (\d+)", source)}
    assert named <= set(catalog()), named - set(catalog())
    source = (shared / "papers" / "attention-rows-as-compositions.md").read_text().replace("\xa0", " ")
    found = re.findall(r"(?<!et al\. )(Table|Figure|Fig\.)[ ~](\d+[ab]?)", source)
    named = {f"attention/{'table' if kind == 'Table' else 'figure'}-{n}" for kind, n in found}
    known = set(catalog()) | {"attention/table-3", "attention/figure-5"}
    assert named <= known, named - known


def test_commands_are_verbs_whose_options_exist() -> None:
    import importlib

    for item in catalog().values():
        models = [Named(name, name) for name in (*item.models, *item.also)] or [Named("model", "model")]
        for steps in item.commands(models, accelerator=True):
            for step in steps:
                module = importlib.import_module(f"perpend.commands.{step.verb}")
                options = {name for p in module.command.params for name in (*p.opts, *p.secondary_opts)}
                for word in step.words:
                    assert not word.startswith("--") or word in options, (item.item, word)


def test_the_figures_that_draw_an_item_have_titles_that_commands_give() -> None:
    import importlib
    import inspect
    import pkgutil

    from perpend import commands

    sources = "".join(
        inspect.getsource(importlib.import_module(f"perpend.commands.{module.name}"))
        for module in pkgutil.iter_modules(commands.__path__)
    )
    for item in catalog().values():
        for title in item.figure:
            stem = title.removesuffix(", local")
            assert f'"{title}"' in sources or f'"{stem}, {{mode}}"' in sources, (item.item, title)


def test_a_models_own_protocol_enters_its_commands() -> None:
    (bert,) = find("attention/table-2").commands([Named("bert-base", "bert-base")])
    words = list(bert[0].words)
    assert words[words.index("--sink") + 1] == "cls"
    assert words[words.index("--length") + 1] == "128"
    (llama,) = find("attention/table-2").commands([Named("llama-3.2-1b", "folder")], accelerator=True)
    words = list(llama[0].words)
    assert words[1] == "folder"
    assert words[words.index("--dtype") + 1] == "float16"
    assert words.count("--sequences") == 1  # the paper's own: no small options
    (other,) = find("attention/table-2").commands([Named("mine", "mine")])
    words = list(other[0].words)
    assert words[words.index("--sequences") + 1] == "32"  # one that fits a model of one's own


def test_later_words_replace_earlier_options_and_repeats_of_one_place_stay() -> None:
    words = ["edit", "m", "--site", "a", "--site", "b", "--parallel", "0", "--audit"]
    assert overridden(words, ["--site", "c"]) == ["edit", "m", "--parallel", "0", "--audit", "--site", "c"]
    assert overridden(words, ["--audit", "--parallel=1"])[-2:] == ["--audit", "--parallel=1"]
    assert overridden(words, ["--batch", "2"])[:6] == words[:6]


def test_the_same_words_share_a_run_folder(tmp_path) -> None:
    from perpend.papers.making import chained

    (first,) = find("attention/table-2").commands([Named("gpt2", "gpt2")])
    (second,) = find("attention/table-6").commands([Named("gpt2", "gpt2")])
    one, two = list(chained(first, tmp_path)), list(chained(second, tmp_path))
    assert one[0][2] == two[0][2]
    assert two[1][1] == ["audit", str(two[0][2])]


def test_hub_texts_are_left_out_where_there_is_no_hub() -> None:
    words = ["prune", "m", "--text", "wikitext103", "--held-out", "wikitext103:test", "--tokens", "5"]
    assert without_hub_texts(words) == ["prune", "m", "--tokens", "5"]


def test_near_names_are_suggested() -> None:
    with pytest.raises(InputError, match="attention/table-10"):
        find("attention/table-10x")


def test_a_name_without_its_paper_will_do_where_one_paper_has_it() -> None:
    assert find("table-2") is find("attention/table-2")
    with pytest.raises(InputError, match="both papers"):
        find("table-5")


def test_the_list_says_what_is_here(capsys) -> None:
    assert run(["paper", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["items"]) == len(catalog())
    by_name = {record["item"]: record for record in document["items"]}
    assert by_name["attention/table-1"]["here"] == "yes"
    assert by_name["directional/table-4"]["here"] == "no command"
    assert by_name["directional/table-5"]["values"] == "protocol only"
    assert all(record["commands"] or record["why"] for record in by_name.values())


def test_an_item_without_a_command_says_why(capsys) -> None:
    assert run(["paper", "directional/table-4"]) == 2
    assert "perpend evaluate" in capsys.readouterr().err


class Stored:
    """A finished run, as far as comparisons read one."""

    def __init__(self, command: str, results: dict) -> None:
        self.command, self.results = command, results


def test_a_model_that_fails_does_not_stop_the_others(tmp_path) -> None:
    """The runner stands for processes: the first model's ends with a fault, the second's leaves a run."""
    from perpend.papers.making import Machine, make

    asked = [Named.parse("broken"), Named.parse("gpt2=whole")]
    seen = []

    def runner(words) -> int:
        seen.append(words[1])
        if words[1] == "broken":
            return 70
        folder = Path(words[list(words).index("--out") + 1])
        folder.mkdir(parents=True)
        results = {"sink": {"row_mass": 0.68, "signature_mass": 0.78}}
        (folder / "run.json").write_text(json.dumps({"command": "attention", "results": results}))
        return 0

    own = Machine(hub=False, accelerator=False, models=())
    (made,) = make([find("attention/table-2")], asked, base=tmp_path, runner=runner, own=own)
    assert seen == ["broken", "whole"]
    assert list(made.failures) == ["broken"]
    assert "ended with 70" in made.failures["broken"]
    assert {(model, row.name, row.within) for model, row in made.rows} == {
        ("gpt2", "sink_row", True),
        ("gpt2", "sink_signature", True),
    }
    make([find("attention/table-2")], asked[1:], base=tmp_path, runner=runner, own=own)
    assert seen == ["broken", "whole"]  # the finished run is used again


@pytest.mark.parametrize(
    ("item", "word", "said"),
    [
        ("attention/table-9", "smollm2-135m-instruct", "an encoder"),
        ("attention/table-2", "vit-b-16", "--images"),
        ("directional/table-5", "minilm", "a causal language model"),
        ("attention/table-2", "/nowhere/at/all", "no model folder"),
    ],
)
def test_a_model_that_does_not_fit_is_told_why(item: str, word: str, said: str) -> None:
    from perpend.papers.making import check

    with pytest.raises(InputError, match=said):
        check(find(item), Named.parse(word))


def test_without_a_hub_only_what_is_here_is_made() -> None:
    from perpend.papers.making import Machine, steps

    bare = Machine(hub=False, accelerator=False, models=())
    with pytest.raises(InputError, match="models=FOLDER"):
        steps(find("attention/table-2"), [], [], bare)
    own = Machine(hub=False, accelerator=False, models=("smollm2-135m-instruct",))
    assert own.here(find("attention/table-2")) == "with smollm2-135m-instruct"
    (sequence,) = steps(find("attention/table-2"), [], [], own)
    assert "--text" not in sequence[0].words  # its built-in text
    rich = Machine(hub=True, accelerator=True, models=tuple(CATALOG))
    assert rich.here(find("attention/table-10")) == "yes"
    assert len(steps(find("attention/table-10"), [], [], rich)) == 11


def test_measured_numbers_are_held_against_printed_ones() -> None:
    results = {
        "sink": {"row_mass": 0.681, "signature_mass": 0.5},
        "collapse": {"disagreement": 0.273},
        "reversal": {
            "cosine": {"mean": 0.36, "low": 0.35, "high": 0.37},
            "jensen_shannon": {"mean": 0.36, "low": 0.34, "high": 0.37},
            "euclidean": {"mean": 0.36},
            "hellinger": {"mean": 0.36},
        },
    }
    found = compare(find("attention/table-2"), "gpt2", [Stored("attention", results)])
    rows = {row.name: row for row in found}
    assert rows["sink_row"].within
    assert not rows["sink_signature"].within
    assert rows["cosine"].measured == pytest.approx(36.0)
    assert (rows["cosine"].low, rows["cosine"].high) == (pytest.approx(35.0), pytest.approx(37.0))
    assert rows["cosine"].within  # 36.1 ± 0.1
    assert not rows["jensen_shannon"].within
    assert rows["jensen_shannon"].agrees  # 35.0 in [34, 37]
    cells = [{"criterion": "js", "sparsity": 0.1, "perplexity": 50.4}]
    run_ = Stored("prune", {"base": {"perplexity": 43.5}, "cells": cells})
    pruned = compare(find("attention/table-10"), "gpt2", [run_])
    assert {row.name: row.within for row in pruned} == {"base": True, "10/js": True}


def test_another_model_is_an_extra_row_beside_the_range_of_the_papers() -> None:
    results = {"sink": {"row_mass": 0.5, "signature_mass": 0.8}, "reversal": {"cosine": {"mean": 0.4}}}
    found = compare(find("attention/table-2"), "mine", [Stored("attention", results)])
    rows = {row.name: row for row in found}
    assert rows["cosine"].published is None
    assert rows["cosine"].agrees is None
    assert rows["cosine"].range == (22.4, 46.1)
    assert rows["cosine"].measured == pytest.approx(40.0)


def test_bounds_in_prose_are_bounds() -> None:
    summary = {"mode": "local", "part": "mlp", "along": "update", "r_over_layers": 0.99, "r_over_tokens": 0.9}
    parts = dict.fromkeys(("perpendicular", "parallel", "total"), 0.1)
    run_ = Stored("compress", {"regimes": {"awq": {"summary": [{**summary, **parts}]}}})
    (row,) = compare(find("directional/table-11-compression"), "qwen3-4b", [run_])
    assert (row.relation, row.published, row.within) == (">", 0.97, True)


def test_every_printed_number_is_one_that_a_run_can_give() -> None:
    """Keys of printed numbers are keys that the measures know, for items that are compared."""
    whole = {
        "attention": {
            "sink": {"row_mass": 0.5, "signature_mass": 0.5, "signature_cv": 0.4},
            "reversal": {
                m: {"mean": 0.4} for m in ("cosine", "jensen_shannon", "euclidean", "hellinger")
            },
            "collapse": {"disagreement": 0.2},
            "windows": {
                "by_window": [
                    {"window": w, "retained": {"value": 0.5}, "reversal": {"jensen_shannon": {"value": 0.4}}}
                    for w in (32, 64, 128)
                ],
                "between": [{"first": 32, "second": 64, "spearman": {"value": 0.9}}],
            },
        },
        "audit": {
            "rivals": {"hellinger": 0.4, "fisher_rao": 0.4},
            "tail": {"1e-06": {"share": 0.0}},
            "content": {"spearman": 0.9, "neighbours": 0.8, "cross_ari": 0.4},
            "aggregation": dict.fromkeys(
                ("arithmetic", "aitchison"), dict.fromkeys(("cosine", "jensen_shannon", "euclidean"), 0.3)
            ),
            "temperature": [{"metric": "jensen_shannon", "flips": 0.1, "retention": 0.9}],
            "sink_set": {"jensen_shannon": 0.1, "content": 0.1},
        },
        "checkpoints": {"collapse": dict.fromkeys(("total", "binary", "weighted_content", "share",
                                                   "dispersion_change"), 0.1)},
        "taxonomy": {
            "heads": 144,
            "majority": {"sep": 68, "cls": 12},
            "between_conventions": {
                m: {"mean": 0.0, "by_clusters": dict.fromkeys("4568", 0.0)}
                for m in ("jensen_shannon", "cosine", "content")
            },
            "blocks": {"sep": [{"metric": m, "policy": p, "clusters": k, "jaccard": 0.5}
                               for m in ("jensen_shannon", "content") for p in ("keep", "drop")
                               for k in (4, 5, 6, 8)]},
        },
        "prune": {
            "base": {"perplexity": 20.0},
            "prediction": {"cv": 0.4},
            "cells": [{"criterion": c, "sparsity": s, "perplexity": 30.0} for s in (0.1, 0.2, 0.3)
                      for c in ("js", "js_drop", "content", "aitchison", "js_l1", "js_drop_l1", "content_l1",
                                "random_a", "random_b")],
        },
        "edit": {"diagonal": {
            "diagonal": [{"layer": None, "form": "residual.attn head", "min": -1.0, "max": 0.7}],
            "audit": [{"layer": None, "site": site, "norm_change": 0.4, "energy_removed": 0.2}
                      for site in ("residual.attn", "value.exclude_self")],
        }},
    }  # fmt: skip
    runs = [Stored(command, results) for command, results in whole.items()]
    assert at(whole, "prune", "base", "perplexity") == 20.0
    for item in catalog().values():
        if item.compare in (None, "simulate", "train", "tasks", "compress", "cosine", "heads", "edit"):
            continue
        for model in item.models:
            wanted = {key_of(item, e) for e in entries_of(item) if e.more.get("model") == model}
            found = {row.name for row in compare(item, model, runs)}
            assert wanted <= found, (item.item, model, wanted - found)


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
    assert {"sink_row", "cosine", "collapse_disagreement"} <= names
    assert all(not row["within"] or row["published"] > 0 for row in document["comparisons"])
    (report,) = document["reports"]
    assert "Verdicts that reverse · gpt2" in (Path(report) / "report.html").read_text("utf-8")

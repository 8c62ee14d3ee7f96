"""How the documentation says to extend perpend is how it works: one file, put where its kind lies.

The files of docs/extend.md are written into a copy of the package, each where its first line says, and what
the page does with them is done: in a process of its own, since most kinds are looked for once, at import.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from perpend.errors import InputError
from perpend.models import families
from perpend.models.stream import contributions, family
from perpend.runs import Run

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "extend.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"(?:#|//) (\S+\.(?:py|json))\n")
KINDS = {
    "perpend/geometry/metrics/total_variation.py",
    "perpend/models/families/xglm.py",
    "perpend/commands/reach.py",
    "perpend/models/controls/coin.py",
    "perpend/compression/binary.py",
    "dampen.json",
}

# Runs the page's other blocks in their order: Python in one namespace, each command as typed.
DRIVER = """
import json, sys
from perpend import cli
names = {}
for kind, text in json.loads(sys.stdin.read()):
    if kind == "python":
        exec(compile(text, "docs/extend.md", "exec"), names)
    else:
        for line in text.splitlines():
            status = cli.run([*line.split()[1:], "--quiet"])
            assert status == 0, (line, status)
assert cli.run(["--help"]) == 0
"""

XGLM = """
from perpend.models.families import Family

XGLM = Family(
    name="xglm",
    model_types=("xglm",),
    blocks="layers",
    form="sequential",
    attention="self_attn",
    attn_update="self_attn.out_proj",
    mid="final_layer_norm",
    mlp_update="fc2",
    out_proj="self_attn.out_proj",
)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files count as files of perpend/models/families."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families.known.cache_clear()
    yield tmp_path
    families.known.cache_clear()
    sys.modules.pop("perpend.models.families.xglm", None)


def test_a_model_family_is_one_file(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.XGLMConfig(
        vocab_size=tiny.VOCAB, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4
    )
    model = transformers.XGLMForCausalLM(config).eval()
    with pytest.raises(InputError, match="perpend/models/families"):
        family(model)
    (folder / "xglm.py").write_text(XGLM)
    families.known.cache_clear()
    assert family(model).name == "xglm"
    seen: list[str] = []
    # Attaching checks that the input and all contributions of every layer add up to its output.
    with contributions(model, lambda c: seen.append(c.part)), torch.no_grad():
        model(tiny.tokens())
    assert seen.count("attn") == seen.count("mlp") == seen.count("block") == 3


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the page was followed, and what was printed on the way."""
    work = tmp_path_factory.mktemp("extended")
    package = work / "package" / "perpend"
    shutil.copytree(REPO / "src" / "perpend", package, ignore=shutil.ignore_patterns("__pycache__"))
    steps = []
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        place = PLACE.match(text)
        if place is None:
            steps.append((kind, text))
            continue
        inside = place[1].startswith("perpend/")
        target = package.parent / place[1] if inside else work / place[1]
        assert not target.exists(), f"{place[1]} is no new file"
        target.write_text(text if inside else text[place.end() :], encoding="utf-8")
    tiny.save_llama(work / "path" / "to" / "model")
    tokenizer = tiny.byte_tokenizer()
    torch.manual_seed(0)
    config = transformers.XGLMConfig(
        vocab_size=len(tokenizer), d_model=32, ffn_dim=48, num_layers=3, attention_heads=4
    )
    transformers.XGLMForCausalLM(config).save_pretrained(work / "path" / "to" / "xglm")
    tokenizer.save_pretrained(work / "path" / "to" / "xglm")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        input=json.dumps(steps),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return work, done.stdout


def test_the_page_has_one_file_of_every_kind() -> None:
    places = [PLACE.match(text) for _, text in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    assert {place[1] for place in places if place} == KINDS


@pytest.mark.slow
def test_a_metric_is_one_file(extended: tuple[Path, str]) -> None:
    run = Run.open(extended[0] / "runs" / "attention-model-1")
    rates = run.tables["reversal"].set_index("metric")
    assert 0 <= rates.loc["total_variation", "mean"] <= 1
    assert rates.loc["total_variation", "mean"] != rates.loc["cosine", "mean"]


@pytest.mark.slow
def test_a_family_is_one_file_for_the_verbs_too(extended: tuple[Path, str]) -> None:
    updates = Run.open(extended[0] / "runs" / "updates-xglm-1").tables["updates"]
    assert set(updates["part"]) == {"attn", "mlp", "block"}  # without the record: blocks alone


@pytest.mark.slow
def test_a_study_is_one_file(extended: tuple[Path, str]) -> None:
    work, printed = extended
    assert re.search(r"^  reach +How far into the window", printed, re.MULTILINE)
    assert "forward passes" in printed  # --plan came with the decorators
    run = Run.open(work / "runs" / "reach-model-1")
    assert run.results["mean_key"] > 1
    assert (run.folder / "report.html").stat().st_size > 100_000
    assert not (work / "runs" / "reach-model-2").exists()


@pytest.mark.slow
def test_an_edit_is_one_file(extended: tuple[Path, str]) -> None:
    cells = Run.open(extended[0] / "runs" / "edit-model-1").tables["cells"]
    assert cells["site"].tolist() == ["unedited", "value.exclude_self"]
    assert cells["parallel"][1] == 0.5


@pytest.mark.slow
def test_a_control_is_one_file(extended: tuple[Path, str]) -> None:
    cells = Run.open(extended[0] / "runs" / "edit-model-2").tables["cells"]
    controls = cells["control"].dropna().tolist()
    assert controls == ["random", "shuffled", "opposite", "coin"]
    moved = cells.set_index("control")["change"]
    assert moved["coin"] != 0
    assert moved["coin"] != moved["random"]


@pytest.mark.slow
def test_a_compression_method_is_one_file(extended: tuple[Path, str]) -> None:
    document = Run.open(extended[0] / "runs" / "compress-model-1").document
    assert "binary" in json.dumps(document["results"])

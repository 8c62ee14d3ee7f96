"""What --plan counts is what then runs: tokens through the model, counted by a hook on its forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaModel

import tiny
from perpend import cli
from verbs import TEXT

CUT = ["--length", "24", "--sequences", "40"]
VERBS = {
    "attention": [*CUT, "--window", "8", "--seed", "0,1", "--triples", "50", "--bootstrap", "2"],
    "updates": [
        *CUT,
        "--generate",
        "0",
        "--evaluate",
        "--drop",
        "1",
        "--eval-sequences",
        "8",
        "--seed",
        "0,1",
    ],
    "edit": [*CUT, "--site", "value.full", "--site", "residual.mlp", "--parallel", "0,2"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_plan_counts_the_passes_that_run(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save_llama(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    words = [verb, str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), *VERBS[verb], "--quiet"]
    assert cli.run([*words, "--plan", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]["tokens"]
    forward, ran = LlamaModel.forward, []

    def counted(self: LlamaModel, input_ids=None, *args, **more):
        ran.append((more.get("inputs_embeds", input_ids)[..., 0] if input_ids is None else input_ids).numel())
        return forward(self, input_ids, *args, **more)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    assert cli.run([*words, "--out", str(tmp_path / "run")]) == 0
    assert 0.6 * planned <= sum(ran) <= 1.05 * planned, (planned, sum(ran))

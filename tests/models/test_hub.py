"""Hub models by name and revision, from a hub that runs inside the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub import serve

import tiny
from perpend.models.weights import weights_hash

# The hub's address is read when its library is imported, so each case runs in a process of its own.
SCRIPT = """
import json, sys
import perpend
from perpend.models.weights import weights_hash

said = {}
for label, (name, options) in json.loads(sys.argv[1]).items():
    try:
        model, tokenizer = perpend.load(name, device="cpu", **options)
        revision = model.perpend_source.revision
        said[label] = [type(model).__name__, weights_hash(model), tokenizer is None, revision]
    except perpend.InputError as error:
        said[label] = str(error)
print(json.dumps(said))
"""


def loads(cases: dict, endpoint: str, cache: Path) -> dict:
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in {"HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"}
    }
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "DISABLE_SAFETENSORS_CONVERSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def repositories(tmp_path: Path) -> dict:
    early, late = tiny.build("gpt_neox", seed=1), tiny.build("gpt_neox", seed=2)
    folders = {"step1": tmp_path / "early", "main": tmp_path / "late"}
    early.save_pretrained(folders["step1"])
    late.save_pretrained(folders["main"])
    pickled = tmp_path / "pickled"
    early.save_pretrained(pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(early.state_dict(), pickled / "pytorch_model.bin")
    return {
        "EleutherAI/pythia-160m": folders,
        "owner/name": folders,
        "owner/pickled": {"main": pickled},
        "hashes": {"early": weights_hash(early), "late": weights_hash(late)},
    }


@pytest.mark.slow
def test_hub_models_and_what_can_be_wrong_with_them(repositories: dict, tmp_path: Path) -> None:
    hashes = repositories.pop("hashes")
    cases = {
        "main": ("owner/name", {}),
        "revision": ("owner/name", {"revision": "step1"}),
        "short": ("pythia-160m@step1", {}),
        "no revision": ("owner/name", {"revision": "step9"}),
        "no repository": ("owner/other", {}),
        "gated": ("meta-llama/Llama-3.2-1B", {}),
        "pickled": ("owner/pickled", {}),
    }
    with serve(repositories, gated=("meta-llama/Llama-3.2-1B",)) as endpoint:
        said = loads(cases, endpoint, tmp_path / "cache")
    assert said["main"] == ["GPTNeoXForCausalLM", hashes["late"], True, None]
    assert said["revision"] == ["GPTNeoXForCausalLM", hashes["early"], True, "step1"]
    assert said["short"] == ["GPTNeoXForCausalLM", hashes["early"], True, "step1"]
    assert "has no revision 'step9'" in said["no revision"]
    assert "there is no model owner/other on the hub" in said["no repository"]
    assert "is gated: accept its licence" in said["gated"]
    assert "no safetensors weights, and perpend opens no pickle" in said["pickled"]

    # the hub is gone: what was fetched still loads, at once, and the rest says why not
    cases = {label: cases[label] for label in ("main", "short")} | {"never fetched": ("owner/new", {})}
    said = loads(cases, endpoint, tmp_path / "cache")
    assert said["main"][1] == hashes["late"]
    assert said["short"][1] == hashes["early"]
    assert "the model hub cannot be reached" in said["never fetched"]

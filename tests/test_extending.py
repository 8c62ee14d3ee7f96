"""How the documentation says to extend perpend is how it works: one file, put where its kind lies.

Verbs are tested so in test_cli.py, dissimilarities in geometry/test_metrics.py.
"""

from __future__ import annotations

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

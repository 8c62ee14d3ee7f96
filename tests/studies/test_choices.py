"""The audit of choices: constructed rows on which one convention decides, for each kind of statistic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import perpend
import tiny
from perpend.errors import InputError
from perpend.geometry import entropy, pairwise
from perpend.studies import taxonomy
from perpend.studies.choices import Setting, audit, conventional, shares, vectors
from perpend.surveys.probabilities import signatures_from_probabilities


def survey(sink: np.ndarray, content: np.ndarray, spread: float = 0.0):
    """A survey of given heads: sink shares (heads,), content (heads, 11); 12 sequences of 3 rows."""
    generator = np.random.default_rng(0)
    logs = np.log(content)[:, None] + spread * generator.normal(size=(12, len(content), 3, 11))
    pure = np.exp(logs) / np.exp(logs).sum(-1, keepdims=True)
    s = np.broadcast_to(sink[None, :, None, None], (*pure.shape[:-1], 1))
    rows = np.concatenate([s, (1 - s) * pure], -1)  # [n, heads, 3, 12]
    whole = np.zeros((1, 12, len(content), 15, 12 + 3))
    whole[..., :12, 0] = 1.0  # queries before the support, which no one reads
    whole[0, :, :, 12:, :12] = rows
    return signatures_from_probabilities(torch.as_tensor(whole), window=12, block=2)


@pytest.fixture(scope="module")
def heads():
    """Eight heads: sink shares that pair them one way, contents that pair them another."""
    generator = np.random.default_rng(1)
    kinds = generator.dirichlet(np.full(11, 0.4), 2)
    content = np.stack([kinds[i % 2] * generator.uniform(0.99, 1.01, 11) for i in range(8)])
    content /= content.sum(-1, keepdims=True)
    sink = np.where(np.arange(8) < 4, 0.97, 0.05) + np.arange(8) * 0.001
    return survey(sink, content, spread=0.3)


def test_a_number_that_the_policy_decides(heads) -> None:
    found = audit(heads, lambda rows: float(entropy(rows).mean()), temperatures=(0.98, 1.02), sinks=(0,))
    assert found.decides == "policy"
    assert found.results["shares"]["policy"]["alone"] > 0.9
    assert found.results["same_decision"] == 1.0
    low, high = found.results["shares"]["policy"]["low"], found.results["shares"]["policy"]["high"]
    assert 0.8 < low <= high <= 1
    assert "the choice of policy decides the number" in found.findings[0]


def test_a_number_that_the_temperature_decides(heads) -> None:
    found = audit(
        heads,
        lambda rows: float(entropy(rows).mean()),
        policies=("drop",),
        temperatures=(0.2, 1.0, 5.0),
        sinks=(0,),
    )
    assert found.decides == "temperature"
    assert found.results["shares"].keys() == {"temperature", "mean"}


def test_a_ranking_that_the_sink_set_decides(heads) -> None:
    def mass(rows: np.ndarray, setting: Setting) -> np.ndarray:
        return rows[:, list(setting.columns)].sum(1) if setting.columns else -rows.max(1)

    found = audit(heads, mass, policies=("keep",), sinks=("first", [5, 6, 7, 8, 9, 10, 11]), replicates=0)
    assert found.results["kind"] == "ranking"
    assert found.decides == "sink"
    shares = found.tables["shares"].set_index("choice")
    assert shares.loc["sink", "agreement"] < shares.loc["temperature", "agreement"]
    assert "low" not in shares


def test_a_partition_that_the_policy_decides(heads) -> None:
    def clusters(rows: np.ndarray) -> np.ndarray:
        return taxonomy.cut(taxonomy.merges(pairwise(rows, "jensen_shannon")), 2)

    found = audit(heads, clusters, sinks=("first",), temperatures=(0.7, 1.0, 1.5))
    assert found.results["kind"] == "partition"
    assert found.decides == "policy"
    shares = found.results["shares"]
    assert shares["policy"]["alone"] == pytest.approx(1.0)
    assert shares["policy"]["agreement"] < 0.1
    assert shares["temperature"]["agreement"] == 1.0


def test_the_content_distance_is_told_to_depend_on_nothing_it_should_not(heads) -> None:
    def ranking(rows: np.ndarray, setting: Setting) -> np.ndarray:
        distances = pairwise(
            rows if setting.columns else np.concatenate([np.full((len(rows), 1), 0.5), rows / 2], 1),
            "content",
            sink=0,
        )
        return distances[np.triu_indices(len(rows), 1)].round(9)

    found = audit(
        heads, ranking, sinks=("first",), temperatures=(1.0, 2.0), means=("aitchison",), replicates=2
    )
    assert found.decides is None
    assert found.undefined == {"decides": "no choice changes the statistic"}
    assert "no choice changes it" in found.findings[0]


def test_bos_and_window_of_a_model() -> None:
    model = tiny.build("llama")
    tokens = tiny.tokens(6, 24)
    opened = torch.cat([torch.ones(6, 1, dtype=torch.long), tokens[:, 1:]], 1)
    seen: list[Setting] = []

    def first_key(rows: np.ndarray, setting: Setting) -> float:
        seen.append(setting)
        assert rows.shape[-1] == setting.window - (0 if setting.columns else 1)
        np.testing.assert_allclose(rows.sum(-1), 1)
        return float(rows[..., 0].mean())

    found = perpend.audit(
        model, first_key, tokens={"auto": opened, "never": tokens}, windows=(6, 12), sinks=("first",),
        temperatures=(1.0,), batch=2, replicates=3,
    )  # fmt: skip
    assert {s.bos for s in seen} == {"auto", "never"}
    assert {s.window for s in seen} == {6, 12}
    assert found.results["settings"] == 2 * 2 * 2 * 2
    assert found.results["shares"].keys() == {"bos", "window", "policy", "mean"}
    # an own computation of one cell
    survey = perpend.survey_attention(model, opened, window=6)
    cells = found.tables["cells"]
    one = cells[(cells["bos"] == "auto") & (cells["window"] == 6) & (cells["policy"] == "keep")
                & (cells["mean"] == "aitchison")]  # fmt: skip
    assert one["value"].item() == pytest.approx(np.exp(survey.signatures[..., 0]).mean(), rel=1e-6)


def test_single_rows_of_a_model_are_its_eager_rows() -> None:
    model, tokens = tiny.build("gpt2"), tiny.tokens(3, 20)
    kept: list[np.ndarray] = []
    perpend.audit(
        model, lambda rows: kept.append(rows) or 1.0, tokens=tokens, of="rows", windows=(8,),
        sinks=("first",), policies=("keep",), temperatures=(1.0,), batch=2,
    )  # fmt: skip
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = torch.stack(model(tokens, output_attentions=True).attentions)[..., :8].numpy()
    queries = sorted({int(q) for q in np.linspace(8, 19, 8)})
    expected = eager[:, :, :, queries]
    expected = expected / expected.sum(-1, keepdims=True)
    expected = expected.transpose(0, 2, 1, 3, 4).reshape(12, -1, 8)
    np.testing.assert_allclose(kept[0], expected, rtol=2e-4, atol=1e-7)


def test_conventions_applied_to_rows() -> None:
    rows = np.array([[0.5, 0.1, 0.4], [0.2, 0.4, 0.4]])
    kept, columns = conventional(np.log(rows), [0], "keep", 2.0)
    assert columns == (0,)
    np.testing.assert_allclose(kept[0], [0.5, 0.5 * 1 / 17, 0.5 * 16 / 17])
    dropped, columns = conventional(np.log(rows), [0], "drop", 1.0)
    assert columns == ()
    np.testing.assert_allclose(dropped, [[0.2, 0.8], [0.5, 0.5]])


def test_the_split_of_the_variance_by_hand() -> None:
    a, b = np.array([0.0, 1.0]), np.array([0.0, 3.0])
    table = (a[:, None] + b)[..., None].reshape(2, 2, 1, 1, 1, 1, 1)
    found = shares(table)
    assert found["sink"] == pytest.approx({"alone": 0.1, "involved": 0.1})
    assert found["policy"] == pytest.approx({"alone": 0.9, "involved": 0.9})
    product = np.array([-1.0, 1.0])
    table = (product[:, None] * product).reshape(2, 2, 1, 1, 1, 1, 1)  # nothing but an interaction
    found = shares(table)
    assert found["sink"] == pytest.approx({"alone": 0.0, "involved": 1.0})
    assert found["policy"] == pytest.approx({"alone": 0.0, "involved": 1.0})
    up = vectors([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], "ranking", [{}, {}])
    assert np.linalg.norm(up[0] - up[1]) == pytest.approx(2)


def test_what_cannot_be_audited_is_told(heads) -> None:
    with pytest.raises(InputError, match="no finite value for sink first"):
        audit(heads, lambda rows: float("nan"))
    with pytest.raises(InputError, match="leaves no content"):
        audit(heads, lambda rows: 1.0, sinks=("first:12",))
    with pytest.raises(InputError, match="cannot be narrowed"):
        audit(heads, lambda rows: 1.0, windows=(6,))
    with pytest.raises(InputError, match="needs tokens"):
        audit(tiny.tiny("llama"), lambda rows: 1.0)
    with pytest.raises(InputError, match="named twice"):
        audit(heads, lambda rows: 1.0, sinks=("first", "first"))
    with pytest.raises(InputError, match="one for each head"):
        audit(heads, lambda rows: rows[0])
    with pytest.raises(ZeroDivisionError) as caught:
        audit(heads, lambda rows: 1 / 0)
    assert "policy keep" in caught.value.__notes__[0]


def test_a_run_folder_and_its_figures(tmp_path: Path) -> None:
    from perpend.runs import Run

    with Run.start(tmp_path / "run", command="attention", request={}) as made:
        generator = np.random.default_rng(0)
        rows = generator.dirichlet(np.ones(16), (2, 4))
        made.array("signatures", np.log(rows))
        made.array("arithmetic", rows)
        made.document = {}
        made._report = lambda: None
        made.finish(results={"sink": {"columns": [0]}}, conventions={}, findings=[])
    found = perpend.audit(
        str(tmp_path / "run"), lambda rows: float(rows.max()), means=("aitchison",), windows=(8, 16)
    )
    assert found.results["levels"]["window"] == ["8", "16"]
    assert "low" not in found.tables["shares"]
    for figure in found.figures:
        for chart in figure.charts.values():
            chart.to_dict()
    assert found.figures[1].title == "Levels"
    ranked = perpend.audit(str(tmp_path / "run"), lambda rows: rows[:, 0])
    assert ranked.figures[1].title == "Agreement"
    assert "decides" in found._repr_html_()


def test_it_is_exported_without_loading_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, perpend; dir(perpend); assert 'audit' in dir(perpend); "
         "assert 'scipy' not in sys.modules and 'torch' not in sys.modules"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

"""`perpend attention --images`: a tiny image model and a folder of pictures, to the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from perpend import survey_attention
from perpend.cli import run
from perpend.commands import attention
from perpend.images import accuracy, classify, read_images
from perpend.models.load import load
from perpend.runs import Run

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in two classes, a classifier that knows them, a backbone with registers."""
    folder = tmp_path_factory.mktemp("images")
    for label in ("cat", "dog"):
        (folder / "pictures" / label).mkdir(parents=True)
        for number in range(4):
            values = np.random.default_rng([ord(label[0]), number]).integers(
                0, 255, (40, 30, 3), dtype=np.uint8
            )
            PIL.fromarray(values).save(folder / "pictures" / label / f"{number}.png")
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 28, "width": 28},
    }
    classifier = tiny.build("vit")
    classifier.config.id2label = dict(enumerate(("bird", "dog", "fish", "cat", "cow")))
    classifier.config.label2id = {name: i for i, name in classifier.config.id2label.items()}
    for name, model in (("vit", classifier), ("dinov2", tiny.build("dinov2_registers"))):
        model.save_pretrained(folder / name)
        (folder / name / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def words(here: Path, name: str, *more: str) -> list[str]:
    return ["attention", str(here / name), "--images", str(here / "pictures"), "--batch", "2", "--quiet",
            "--bootstrap", "4", "--triples", "500", "--seed", "0", *more]  # fmt: skip


def test_registers_as_the_sink_of_a_backbone(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run([*words(here, "dinov2", "--sink", "registers"), "--out", str(out)]) == 0
    found = Run.open(out)
    json.dumps(found.document, allow_nan=False)
    assert found.results["sink"]["columns"] == [1, 2]
    assert found.results["roles"]["positions"] == {"cls": [0], "registers": [1, 2]}
    assert found.arrays["signatures"].shape == (3, 4, 19)  # every key: no window unless one is given
    model, processor = load(str(here / "dinov2"))
    pixels = read_images(here / "pictures", processor).pixels
    survey = survey_attention(model, pixels, sink=[1, 2])
    np.testing.assert_allclose(found.arrays["signatures"], survey.signatures, atol=1e-6)
    shares = found.tables["roles"]
    assert shares.groupby("layer")["share"].sum().tolist() == pytest.approx([1.0] * 3)
    own = shares[shares["role"] == "registers"]["share"]
    assert own.tolist() == pytest.approx(survey.per_layer()["row_mass"].tolist(), rel=1e-5)
    assert "no classifier" in found.document["undefined"]["accuracy"]
    titles = [figure.title for figure in attention.figures(found)]
    assert titles[0] == "Sink mass by head"
    assert "Attention by role of the key" in titles
    assert "Norms of patch tokens" in titles
    for figure in attention.figures(found):
        for chart in figure.charts.values():
            chart.to_dict()


def test_a_classifier_on_a_labelled_folder_has_an_accuracy(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run([*words(here, "vit"), "--out", str(out)]) == 0
    scored = Run.open(out).results["accuracy"]
    model, processor = load(str(here / "vit"))
    images = read_images(here / "pictures", processor)
    with torch.no_grad():
        best = model(images.pixels).logits.argmax(-1)
    assert torch.equal(classify(model, images.pixels, batch=3), best)
    names = [model.config.id2label[int(i)] for i in best]
    expected = np.mean([name == file.split("/")[0] for name, file in zip(names, images.files)])
    assert scored["accuracy"] == pytest.approx(expected)
    assert scored["low"] <= scored["accuracy"] <= scored["high"]
    model.config.label2id = {"wolf": 0}
    assert "knows no class 'cat'" in accuracy(model, images)["why"]


def test_outlier_tokens_have_row_statistics_beside_the_signatures(here: Path, tmp_path: Path) -> None:
    from perpend.surveys import outliers

    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outliers.find_outliers, "__kwdefaults__", {
            **outliers.find_outliers.__kwdefaults__, "factor": 1.05,  # random weights make no real outlier
        })  # fmt: skip
        assert run([*words(here, "dinov2"), "--out", str(out)]) == 0
    found = Run.open(out)
    record = found.results["outliers"]
    assert record["tokens"] > 0
    assert 0 < record["row_mass"] < 1
    assert record["low"] <= record["high"]
    assert "Outlier tokens as the sink" in [figure.title for figure in attention.figures(found)]
    plain = tmp_path / "plain"
    assert run([*words(here, "dinov2", "--sink", "cls,registers"), "--out", str(plain)]) == 0
    found = Run.open(plain)
    assert found.results["sink"]["columns"] == [0, 1, 2]
    assert found.results["outliers"]["tokens"] == 0
    assert found.document["undefined"]["outliers.row_mass"] == "no image has an outlier token"


def test_rules_that_do_not_fit_are_told(here: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(words(here, "vit", "--sink", "registers")) == 2
    assert "no registers; found: cls at token 0" in capsys.readouterr().err
    assert run(words(here, "dinov2", "--sink", "outliers")) == 2
    assert "no signatures" in capsys.readouterr().err

"""`perpend prune` from the words typed to the run folder, the masks and the saved model."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

import perpend
import tiny
from perpend.cli import run
from perpend.evaluation.losses import token_nll
from perpend.models.ablate import read_heads
from perpend.runs import Run
from perpend.studies import pruning


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of single bytes, a text and a task."""
    folder = tmp_path_factory.mktemp("prune")
    tiny.save_llama(folder / "model")
    lines = [{"goal": "Carry water", "sol1": "use a pail", "sol2": "use a net", "label": 0}] * 3
    (folder / "tasks").mkdir()
    (folder / "tasks" / "piqa.jsonl").write_text("\n".join(map(json.dumps, lines)))
    generator = np.random.default_rng(0)
    lines = [" ".join(generator.choice(["stream", "head", "sink", "row", "adds"], 9)) for _ in range(200)]
    (folder / "text.txt").write_text(".\n".join(lines))
    return folder


def words(folder: Path, out: Path, *more: str) -> list[str]:
    text = ["--text", str(folder / "text.txt"), "--length", "32", "--window", "8", "--sequences", "6"]
    held = ["--tokens", "256", "--context", "32", "--batch", "4"]
    return ["prune", str(folder / "model"), *text, *held, "--quiet", "--out", str(out), *more]


def test_a_run_holds_cells_masks_and_a_model_with_the_perplexity_reported(folder, tmp_path, capsys):
    out, smaller = tmp_path / "run", tmp_path / "smaller"
    arguments = words(folder, out, "--sparsity", "0.2", "--sparsity", "0.4", "--seed", "0,1")
    assert run([*arguments, "--save", str(smaller)]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "of one pass for each" in printed
    finished = Run.open(out)
    results = finished.results
    json.dumps(finished.document, allow_nan=False)
    assert len(results["cells"]) == 9 * 2
    assert results["evaluations"] == 7 * 2 * 2 + 2 * 2  # the random draws carry no seed
    assert results["distinct_sets"] <= results["evaluations"] + 8
    assert 0 < results["cost"] < 1
    assert results["base"]["context"] == 32
    assert results["base"]["tokens"] == 8 * 31
    assert "last 40%" in results["base"]["split"]
    assert results["prediction"]["regime"] in ("content", "js", "abstain")
    assert set(results["weighted"]["against"]) == {"λ=0", "λ=∞", "js", "js_l1"}
    assert set(finished.tables) == {"cells", "sets", "removed", "stability", "weights"}
    for cell in results["cells"]:
        assert cell["loss_change_low"] <= cell["loss_change"] <= cell["loss_change_high"]
        assert cell["kl"] >= 0
        assert 0 <= cell["top1_agreement"] <= 1

    saved = results["saved"]
    assert saved["perplexity_after_loading"] == pytest.approx(saved["perplexity"], rel=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(smaller).eval()
    whole = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    mask = out / "masks" / f"{saved['criterion']}-40-seed0.json"
    ids = tiny.tokens(1, 20)
    with torch.no_grad(), perpend.ablate(whole, mask) as ablation:
        expected = whole(ids).logits
    assert ablation.heads == read_heads(mask)
    assert len(ablation.heads) == round(0.4 * 12)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-5)

    from perpend.commands.prune import figures

    found = figures(finished)
    assert [figure.title for figure in found] == [
        "Perplexity after pruning",
        "Regime map",
        "What each criterion removes",
        "The weighted family",
        "Stability of the sets",
    ]
    assert (out / "report.html").stat().st_size > 10_000


def test_masks_say_what_they_are_and_which_kv_heads_nothing_reads(folder, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = words(folder, out, "--sparsity", "0.4", "--seed", "0", "--no-weights")
    assert run(arguments) == 0, capsys.readouterr().err
    capsys.readouterr()
    finished = Run.open(out)
    assert len(list((out / "masks").glob("*.json"))) == 9
    for row in finished.results["sets"]:
        mask = json.loads((out / row["file"]).read_text())
        assert finished.document["files"][row["file"]] == sha256((out / row["file"]).read_bytes()).hexdigest()
        heads = {tuple(head) for head in mask["heads"]}
        assert len(heads) == row["heads"]
        # four query heads read two KV heads
        unread = [
            [layer, kv]
            for layer in range(3)
            for kv in range(2)
            if {(layer, 2 * kv), (layer, 2 * kv + 1)} <= heads
        ]
        assert mask["unused_kv_heads"] == unread
        assert mask["model"]["weights_sha256"] == finished.request["model"]["weights_sha256"]


def test_heads_of_a_file_are_judged_and_saved_without_signatures(folder, tmp_path, capsys, monkeypatch):
    given = tmp_path / "mine.json"
    given.write_text("[[0, 1], [2, 3]]")
    import perpend.surveys.attention as surveys

    monkeypatch.setattr(surveys, "survey_attention", None)  # nothing is surveyed
    out, smaller = tmp_path / "run", tmp_path / "smaller"
    assert run(words(folder, out, "--heads", str(given), "--save", str(smaller))) == 0
    capsys.readouterr()
    (cell,) = Run.open(out).results["cells"]
    assert cell["criterion"] == "mine"
    model, tokenizer = perpend.load(str(folder / "model"))
    from perpend import texts

    text = (folder / "text.txt").read_text()
    held = texts.read_text([text[int(0.6 * len(text)) :]])
    ids = texts.sequences(held, tokenizer, length=32, model=model).take(8, 0)
    with perpend.ablate(model, [(0, 1), (2, 3)]):
        alone = token_nll(model, ids).values.double().mean().exp()
    assert cell["perplexity"] == pytest.approx(float(alone), rel=1e-5)


def test_a_killed_run_resumes_to_the_same_numbers(folder, tmp_path, capsys, monkeypatch):
    asked = ("--sparsity", "0.25", "--criterion", "js", "--criterion", "content_l1", "--no-weights")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(words(folder, whole, *asked)) == 0
    own, calls = pruning.Walk.run, []

    def stops(self, leaf):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(self, leaf)

    monkeypatch.setattr(pruning.Walk, "run", stops)
    assert run(words(folder, broken, *asked)) == 130
    assert run([*words(folder, broken, *asked), "--resume"]) == 0
    assert len(calls) == 3  # two batches: the first was kept
    capsys.readouterr()
    assert Run.open(whole).results == Run.open(broken).results


def test_the_prediction_is_stored_before_any_set_is_judged(folder, tmp_path, capsys, monkeypatch):
    def stops(self, leaf):
        raise KeyboardInterrupt

    monkeypatch.setattr(pruning.Walk, "run", stops)
    out = tmp_path / "run"
    assert run(words(folder, out)) == 130
    assert [path.name for path in (out / "steps").iterdir() if "prediction" in path.name]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--sparsity", "0.01"), "removes 0: at least one must go and one stay"),
        (("--sparsity", "0"), "0.0 is not in the range"),
        (("--criterion", "content_l2"), "did you mean 'content_l1'"),
        (("--heads", "nowhere.json"), "there is no file of heads"),
        (("--images", "nowhere"), "there is no folder of images nowhere"),
        (("--tokens", "9000000"), "lower --tokens or name a longer --held-out"),
        (("--sequences", "5000"), "5000"),
        (("--context", "300"), "context 300 is beyond the 256 positions of this model; set --context 256"),
    ],
)
def test_bad_requests_say_what_to_do(folder, tmp_path, capsys, more, message):
    assert run(words(folder, tmp_path / "none", *more)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


def test_a_folder_with_a_model_in_it_is_refused_before_anything_is_run(folder, tmp_path, capsys):
    arguments = words(folder, tmp_path / "none", "--save", str(folder / "model"))
    assert run(arguments) == 2
    assert "is not empty" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"heads": [[0, 9]]}', "layer 0 has heads 0 to 3"),
        ('{"heads": [[0]]}', "holds no list of heads"),
        ("[]", "names no head"),
        ("heads", "is no JSON"),
    ],
)
def test_files_of_heads_that_do_not_fit_are_refused(folder, tmp_path, capsys, content, message):
    file = tmp_path / "heads.json"
    file.write_text(content)
    assert run(words(folder, tmp_path / "none", "--heads", str(file))) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Twelve small pictures, and two image models with their processor."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "images").mkdir()
    for number in range(12):
        values = np.random.default_rng(number).integers(0, 255, (40, 30, 3), dtype=np.uint8)
        image.fromarray(values).save(folder / "images" / f"{number}.png")
    for name in ("vit", "dinov2"):
        tiny.build(name).save_pretrained(folder / name)
        (folder / name / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": 28, "width": 28}})
        )
    return folder


@pytest.mark.parametrize(("name", "measure"), [("vit", "top1_agreement"), ("dinov2", "cosine")])
def test_an_image_model_is_judged_by_agreement_alone(pictures, tmp_path, capsys, name, measure):
    out, smaller = tmp_path / "run", tmp_path / "smaller"
    arguments = ["prune", str(pictures / name), "--images", str(pictures / "images"), "--quiet"]
    arguments += ["--sparsity", "0.25", "--batch", "3", "--save", str(smaller), "--out", str(out)]
    assert run(arguments) == 0, capsys.readouterr().err
    capsys.readouterr()
    finished = Run.open(out)
    results = finished.results
    assert results["base"] == {"images": 5}  # seven made the signatures
    assert "prediction" not in results
    assert "perplexity" not in results["cells"][0]
    assert finished.request["data"]["count"] == 12
    assert any(line.startswith("One seed") for line in finished.document["findings"])
    assert all(cell["sd"] is None for cell in results["cells"])
    assert all(0 <= cell["low"] <= cell[measure] <= cell["high"] <= 1 for cell in results["cells"])
    assert results["saved"]["error_after_loading"] < 1e-5

    model, _ = perpend.load(str(pictures / name))
    from perpend.images import read_images

    _, processor = perpend.load(str(pictures / name))
    pixels = read_images(pictures / "images", processor).pixels[7:]
    mask = out / "masks" / "random_a-25.json"
    cell = next(c for c in results["cells"] if c["criterion"] == "random_a")
    with torch.no_grad():
        plain = model(pixel_values=pixels)
        with perpend.ablate(model, mask):
            pruned = model(pixel_values=pixels)
    if measure == "cosine":
        one, other = plain.last_hidden_state[:, 0], pruned.last_hidden_state[:, 0]
        expected = torch.cosine_similarity(one, other).mean()
    else:
        expected = (plain.logits.argmax(-1) == pruned.logits.argmax(-1)).double().mean()
        loaded = AutoModelForImageClassification.from_pretrained(smaller).eval()
        assert loaded(pixel_values=pixels).logits.shape == (5, 5)
    assert cell[measure] == pytest.approx(float(expected), abs=1e-5)

    from perpend.commands.prune import figures

    assert figures(finished)[0].title == "Agreement after pruning"


def test_a_folder_of_the_classifiers_own_classes_gives_accuracy(pictures, tmp_path, capsys):
    for name, numbers in (("LABEL_0", range(6)), ("LABEL_3", range(6, 12))):
        (tmp_path / "labelled" / name).mkdir(parents=True)
        for number in numbers:
            picture = (pictures / "images" / f"{number}.png").read_bytes()
            (tmp_path / "labelled" / name / f"{number}.png").write_bytes(picture)
    out = tmp_path / "run"
    arguments = ["prune", str(pictures / "vit"), "--images", str(tmp_path / "labelled"), "--quiet"]
    assert run([*arguments, "--sparsity", "0.25", "--criterion", "js", "--out", str(out)]) == 0
    capsys.readouterr()
    results = Run.open(out).results
    from perpend.images import read_images

    model, processor = perpend.load(str(pictures / "vit"))
    held = read_images(tmp_path / "labelled", processor, label2id=model.config.label2id)
    with torch.no_grad():
        right = model(pixel_values=held.pixels[7:]).logits.argmax(-1) == held.labels[7:]
    assert results["base"] == {"images": 5, "accuracy": pytest.approx(right.double().mean())}
    assert 0 <= results["cells"][0]["accuracy"] <= 1


def test_an_image_model_asks_for_images(pictures, tmp_path, capsys):
    assert run(["prune", str(pictures / "vit"), "--out", str(tmp_path / "none")]) == 2
    assert "--images DIR" in capsys.readouterr().err
    few = tmp_path / "few"
    few.mkdir()
    for number in range(3):
        (few / f"{number}.png").write_bytes((pictures / "images" / f"{number}.png").read_bytes())
    assert run(["prune", str(pictures / "vit"), "--images", str(few), "--out", str(tmp_path / "none")]) == 2
    assert "give 5 or more" in " ".join(capsys.readouterr().err.split())


def test_updates_of_an_image_model_from_the_command_line(pictures, tmp_path, capsys):
    arguments = ["updates", str(pictures / "dinov2"), "--images", str(pictures / "images"), "--quiet"]
    out = tmp_path / "run"
    assert run([*arguments, "--save", str(tmp_path / "smaller"), "--drop", "1", "--out", str(out)]) == 0
    capsys.readouterr()
    finished = Run.open(out)
    assert set(finished.tables) == {"updates", "ranking"}
    assert finished.document["conventions"]["bos"] == "position 0 is the class token"
    model, processor = perpend.load(str(pictures / "dinov2"))
    from perpend.images import read_images

    survey = perpend.survey_updates(model, read_images(pictures / "images", processor).pixels)
    assert np.array_equal(finished.arrays["sums"], survey.sums)
    assert finished.results["updates"]["per_layer"][0]["attn"]["ratio"] > 0
    assert run([*arguments, "--plan"]) == 0
    assert "12" in capsys.readouterr().out
    assert run([*arguments, "--evaluate", "--out", str(tmp_path / "none")]) == 2
    assert "no causal language model" in capsys.readouterr().err
    assert run(["updates", str(pictures / "vit"), "--out", str(tmp_path / "none")]) == 2
    assert "--images DIR" in capsys.readouterr().err


def test_verify_of_an_image_model_from_the_command_line(pictures, tmp_path, capsys):
    assert run(["verify", str(pictures / "vit"), "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert "its attention" not in capsys.readouterr().err
    checks = Run.open(tmp_path / "run").results["checks"]
    assert checks["stream adds up"]["status"] == "ok"
    assert checks["padded = unpadded"]["status"] == "skipped"


def test_tasks_are_scored_without_the_heads_of_the_best_sets(folder, tmp_path, capsys):
    out = tmp_path / "run"
    asked = ["--tasks", "piqa", "--tasks-data", str(folder / "tasks"), "--criterion", "js_l1", "--no-weights"]
    arguments = words(folder, out, "--sparsity", "0.2", "--sparsity", "0.4", "--seed", "0", *asked)
    assert run(arguments) == 0, capsys.readouterr().err
    results = Run.open(out).results
    assert list(results["tasks"]) == ["unpruned", "js_l1 20%", "js_l1 40%"]
    heads = read_heads(out / "masks" / "js_l1-40-seed0.json")
    model, tokenizer = perpend.load(folder / "model")
    with perpend.ablate(model, heads):
        own = perpend.evaluate(model, tokenizer, "piqa", data=folder / "tasks")
    row = results["comparison"]["js_l1 40%"]["tasks"]["piqa"]["gold log-likelihood"]
    assert row["other"] == pytest.approx(np.mean(own["piqa"].items["gold_ll"]), abs=1e-4)
    assert row["difference"] != 0


def test_a_language_model_given_images_says_what_it_reads(folder, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4)).save(tmp_path / "one.png")
    assert run(words(folder, tmp_path / "none", "--images", str(tmp_path))) == 2
    assert "is a language model: it reads --text" in " ".join(capsys.readouterr().err.split())

"""Bad input, as a user meets it: exit code 2, what to do, and no run left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import perpend
import tiny
from perpend import cli
from perpend.errors import InputError
from perpend.models.edit import edit
from verbs import TEXT, laid_out

CHANGE = {"site": "residual.mlp", "parallel": 0.0}
CUT = ["--length", "24", "--sequences", "4", "--window", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = laid_out(tmp_path_factory.mktemp("bad"))
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("Too short.")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (folder / "lines.jsonl").write_text('{"words": "no text here"}\n')
    return folder


def updates(folder: Path) -> list[str]:
    return ["updates", str(folder / "model"), "--text", str(folder / "text.txt"), *CUT[:4], "--generate", "0"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    out = tmp_path / "none"
    assert cli.run([*words, "--out", str(out), "--quiet"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert not out.exists(), "a refused run leaves a folder"
    return " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("empty.txt", "empty"),
        ("short.txt", "fewer than one sequence|shorter than one sequence|one sequence"),
        ("binary.txt", "binary.txt"),
        ("lines.jsonl", "text"),
        ("missing.txt", "missing.txt"),
    ],
)
@pytest.mark.parametrize("verb", ["attention", "updates"])
def test_texts(
    verb: str, text: str, says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        verb,
        str(folder / "model"),
        "--text",
        str(folder / text),
        *CUT[: 6 if verb == "attention" else 4],
    ]
    told = refused(words, capsys, tmp_path)
    assert any(one in told for one in says.split("|")), told


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--window", "24"], "--length"),
        (["--window", "8", "--sink", "0,8"], "position 8 is outside"),
        (["--window", "8", "--sink", "first:9"], "position 8 is outside"),
        (["--window", "8", "--sink", "frist"], "first"),
        (["--window", "8", "--dtype", "float23"], "did you mean 'float"),
        (["--window", "8", "--length", "9999"], "set --length 256 or less"),
        (["--window", "8", "--sequences", "99999"], "there are|holds"),
    ],
)
def test_options(
    more: list[str], says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["attention", str(folder / "model"), "--text", str(folder / "text.txt"), *CUT[:4], *more]
    told = refused(words, capsys, tmp_path)
    assert any(one in told for one in says.split("|")), told


@pytest.mark.parametrize(
    ("vocabulary", "says"), [(100, "does not belong to this model"), (9000, "it is another model's")]
)
def test_a_tokenizer_of_another_model(
    vocabulary: int, says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.save_llama(tmp_path / "model", vocab_size=vocabulary)
    words = ["updates", str(model), "--text", str(folder / "text.txt"), *CUT[:4]]
    assert says in refused(words, capsys, tmp_path)


def test_nan_weights_are_named_by_layer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.save_llama(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.2.self_attn.v_proj.weight"][0, 0] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = ["edit", str(model), "--text", str(folder / "text.txt"), *CUT[:4]]
    assert "model.layers.2.self_attn.v_proj.weight" in refused(words, capsys, tmp_path)


def test_truncated_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.save_llama(tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    words = ["attention", str(model), "--text", str(folder / "text.txt"), *CUT]
    assert "damaged" in refused(words, capsys, tmp_path)


def test_a_vision_model_given_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.tiny("vit").save_pretrained(tmp_path / "model")
    for verb in ("attention", "updates", "edit"):
        words = [verb, str(tmp_path / "model"), "--text", str(folder / "text.txt"), *CUT[:4]]
        told = refused(words, capsys, tmp_path)
        assert "image" in told or "no tokenizer" in told, told


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=len(tiny.byte_tokenizer()), hidden_size=16, num_hidden_layers=2, state_size=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return MambaForCausalLM(config).eval()


def test_a_model_without_attention(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused where attention is asked for; its blocks' updates are read."""
    model = _mamba()
    model.save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    text = ["--text", str(folder / "text.txt"), *CUT[:4]]
    for words in (
        ["attention", "--window", "8"],
        ["prune", "--window", "8"],
        ["edit", "--site", "value.full"],
    ):
        told = refused([words[0], str(tmp_path / "model"), *text, *words[1:]], capsys, tmp_path)
        assert "no self-attention layer" in told, told
    with (
        pytest.raises(InputError, match="no adapter for 'mamba'"),
        edit(model, site="residual.mlp", parallel=0.0),
    ):
        pass
    with pytest.warns(UserWarning, match="block updates only"):
        survey = perpend.survey_updates(model, tiny.tokens(2, 12))
    assert survey.parts == ("block",)


class _Block(nn.Module):
    """Attention and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class _OnlyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_without_an_mlp() -> None:
    """Rows and block updates are read; the MLP that is not there is refused by name."""
    torch.manual_seed(0)
    model, tokens = _OnlyAttention().eval(), tiny.tokens(4, 12)
    survey = perpend.survey_attention(model, tokens, window=4)
    assert survey.signatures.shape[:2] == (3, 2)
    with pytest.warns(UserWarning, match="block updates only"):
        assert perpend.survey_updates(model, tokens).parts == ("block",)
    with (
        pytest.raises(InputError, match=r"no adapter for|families"),
        edit(model, site="residual.mlp", parallel=0.0),
    ):
        pass
    llama = tiny.build("llama")
    del llama.model.layers[1].mlp
    llama.model.layers[1].forward = lambda hidden_states, **_: hidden_states
    with (
        pytest.raises(perpend.PerpendError, match=r"model\.layers\.1 has no 'mlp"),
        edit(llama, **CHANGE),
    ):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}'])
def test_a_corrupt_run_is_refused_and_untouched(
    content: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(content)
    (run / "mine.txt").write_text("kept")
    words = updates(folder)
    for command in (
        ["report", str(run)],
        [*words, "--out", str(run)],
        [*words, "--out", str(run), "--resume"],
    ):
        assert cli.run(command) == 2
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert "run" in told
    assert (run / "run.json").read_text() == content
    assert (run / "mine.txt").read_text() == "kept"


def test_resuming_with_another_model_text_or_option_names_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perpend.runs import Run

    def interrupted(self: Run, *args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    other = tiny.save_llama(tmp_path / "other", seed=1)
    (tmp_path / "other.txt").write_text(TEXT[5:])
    run, text = tmp_path / "run", str(folder / "text.txt")
    base = ["updates", "--generate", "0", "--seed", "0", "--out", str(run), "--quiet", *CUT[:4]]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", interrupted)
        assert cli.run([*base, str(folder / "model"), "--text", text]) == 130
    capsys.readouterr()
    kept = sorted(path.name for path in (run / "steps").iterdir())
    for words, named in (
        ([str(other), "--text", text], "weights_sha256"),
        ([str(folder / "model"), "--text", str(tmp_path / "other.txt")], "sha256"),
        ([str(folder / "model"), "--text", text, "--batch", "2"], "batch"),
    ):
        assert cli.run([*base, *words, "--resume"]) == 2
        told = capsys.readouterr().err
        assert named in told, told
        assert sorted(path.name for path in (run / "steps").iterdir()) == kept
    assert cli.run([*base, str(folder / "model"), "--text", text, "--resume"]) == 0


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="no place here that none may write in")
def test_an_unwritable_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = updates(folder)
    assert cli.run([*words, "--out", "/proc/perpend-run"]) == 2
    told = capsys.readouterr().err
    assert "/proc/perpend-run" in told
    assert "--out" in told or "another folder" in told or "cannot" in told


def test_an_error_is_one_json_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["attention", str(folder / "model"), "--text", str(folder / "empty.txt"), "--json"]) == 2
    assert "empty" in json.dumps(json.loads(capsys.readouterr().out))

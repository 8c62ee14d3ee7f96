"""Loading: from folders, GGUF files and names; and what is said when something is wrong."""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import perpend
import tiny
from perpend.errors import InputError
from perpend.models.weights import check_finite, named_weights, weights_hash


def saved(name: str, folder: Path) -> Path:
    tiny.tiny(name).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_wrong_name_is_told_the_near_ones_and_what_lies_here(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(InputError, match="did you mean 'smollm2-135m' or 'smollm2-135m-instruct'"):
        perpend.load("smollm2")
    monkeypatch.chdir(tmp_path)
    saved("llama", tmp_path / "tinyllama")
    with pytest.raises(InputError, match=r"There is a model here in \./tinyllama\."):
        perpend.load("tinylama")
    with pytest.raises(InputError, match=r"no folder matches runs/ckpt-\*"):
        perpend.load("runs/ckpt-*")


# ---- folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_a_saved_folder_of_every_family_loads_as_the_same_model(name: str, tmp_path: Path) -> None:
    original = tiny.tiny(name)
    model, tokenizer = perpend.load(saved(name, tmp_path))
    assert type(model) is type(original)
    assert tokenizer is None
    assert not model.training
    ours, theirs = model(**tiny.inputs(name)), original(**tiny.inputs(name))
    assert torch.equal(ours[0], theirs[0])
    assert weights_hash(model) == weights_hash(original)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bert", "BertForMaskedLM"), ("gpt2", "GPT2LMHeadModel"), ("vit", "ViTForImageClassification")],
)
def test_without_architectures_the_class_is_found_by_its_weights(
    name: str, kind: str, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    edit_config(tmp_path, architectures=None)
    assert type(perpend.load(tmp_path)[0]).__name__ == kind


def test_an_encoder_without_a_head_stays_without_one(tmp_path: Path) -> None:
    tiny.tiny("bert").bert.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=None)
    assert type(perpend.load(tmp_path)[0]).__name__ == "BertModel"  # its pooler is new, and harmless


def test_a_bare_class_with_the_weights_of_a_head_gets_the_head(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    edit_config(tmp_path, architectures=["BertModel"])
    model, _ = perpend.load(tmp_path)
    assert type(model).__name__ == "BertForMaskedLM"
    assert weights_hash(model) == weights_hash(tiny.tiny("bert"))


def test_dtype_and_attention_are_as_asked(tmp_path: Path) -> None:
    tiny.build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    if not torch.cuda.is_available():
        assert perpend.load(tmp_path)[0].dtype == torch.float32
    assert perpend.load(tmp_path, device="cpu")[0].dtype == torch.float32
    assert perpend.load(tmp_path, dtype="auto")[0].dtype == torch.bfloat16
    assert perpend.load(tmp_path, dtype="fp16")[0].dtype == torch.float16
    assert perpend.load(tmp_path, dtype=torch.float64)[0].dtype == torch.float64
    assert perpend.load(tmp_path, attn_implementation="eager")[0].config._attn_implementation == "eager"
    with pytest.raises(InputError, match="unknown dtype 'float23'; did you mean 'float"):
        perpend.load(tmp_path, dtype="float23")
    with pytest.raises(InputError, match="cpu, cuda"):
        perpend.load(tmp_path, device="abacus")
    with pytest.raises(InputError, match="no device cuda:99"):
        perpend.load(tmp_path, device="cuda:99")
    with pytest.raises(InputError, match="attn_implementation"):
        perpend.load(tmp_path, attn_implementation="telepathy")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_mixture_of_experts_runs_in_float64(name: str, tmp_path: Path) -> None:
    """transformers' grouped kernel of experts has no float64."""
    model, _ = perpend.load(saved(name, tmp_path), dtype="float64")
    single, _ = perpend.load(tmp_path, dtype="float32")
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        exact, rounded = model(ids).logits, single(ids).logits
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), rounded, rtol=1e-4, atol=1e-5)
    assert (exact - rounded).abs().max() > 0  # computed, not merely kept, in float64
    assert single.config._experts_implementation != "eager"  # other dtypes keep the fast kernel


def test_a_model_spread_by_accelerate_has_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    saved("llama", tmp_path)
    model, _ = perpend.load(tmp_path, device="auto")
    assert weights_hash(model) == weights_hash(tiny.tiny("llama"))


@torch.no_grad()
def test_weights_moved_to_disk_are_hashed_and_checked(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny.build("llama")
    before = weights_hash(model)
    accelerate.cpu_offload(model)
    assert all(p.device.type == "meta" for p in model.model.layers.parameters())
    assert weights_hash(model) == before
    check_finite(model)


# ---- folders with something wrong ------------------------------------------------------------------------


def test_missing_weights_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    edit_weights(tmp_path, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        perpend.load(tmp_path)


def test_a_headless_checkpoint_is_no_language_model(tmp_path: Path) -> None:
    """A random head would give numbers that look like numbers."""
    build = t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(
            vocab_size=tiny.VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=False,
        )
    )
    build.gpt_neox.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["GPTNeoXForCausalLM"])
    with pytest.raises(InputError, match="would be random"):
        perpend.load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_numbers_are_named_by_parameter(value: float, tmp_path: Path) -> None:
    saved("gpt2", tmp_path)

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.2.attn.c_attn.weight"][3, 4] = value

    edit_weights(tmp_path, spoil)
    with pytest.raises(InputError, match=r"h\.2\.attn\.c_attn\.weight \(1 of 3072 values\)"):
        perpend.load(tmp_path)


def test_values_too_large_for_the_dtype_are_named(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    edit_weights(tmp_path, lambda w: w["transformer.wte.weight"].view(-1)[7:8].fill_(1e6))
    perpend.load(tmp_path)
    with pytest.raises(InputError, match="float32"):
        perpend.load(tmp_path, dtype="float16")


class Trap:
    """What an attacker's pickle does when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_is_refused_and_never_opened(tmp_path: Path) -> None:
    folder, sprung = saved("gpt2", tmp_path / "model"), tmp_path / "sprung"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(InputError, match="as a pickle only"):
        perpend.load(folder)
    assert not sprung.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert sprung.exists()  # the trap works, so that its silence above means something


@pytest.mark.parametrize("keep", [0, 5, 40, 0.5, -1])
def test_truncated_weights_are_said_to_be(keep: float, tmp_path: Path) -> None:
    file = saved("gpt2", tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if keep == 0.5 else keep])
    with pytest.raises(InputError, match=r"model\.safetensors is truncated or damaged"):
        perpend.load(tmp_path)


def test_other_broken_folders(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()

    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InputError, match="git lfs pull"):
        perpend.load(folder)

    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="weights are missing"):
        perpend.load(folder)

    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(InputError, match=r"lacks 1 of its 1 weight files, first one\.safetensors"):
        perpend.load(folder)
    (folder / "model.safetensors.index.json").unlink()

    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(InputError, match=r"config\.json cannot be read as JSON"):
        perpend.load(folder)

    (folder / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(InputError, match="no_such_family"):
        perpend.load(folder)

    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        perpend.load(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapter"):
        perpend.load(folder)


KEYS = st.sampled_from(["a", "data_offsets", "__metadata__", "weight_map"])
HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**6) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "data_offsets", "__metadata__", "weight_map"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(header=HEADERS | st.binary(max_size=40), body=st.binary(max_size=24), lie=st.integers(-3, 3))
@settings(max_examples=300, deadline=None)
def test_any_weights_file_is_whole_or_an_input_error(header: object, body: bytes, lie: int) -> None:
    from perpend.models._source import check_safetensors

    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(max(0, len(data) + lie).to_bytes(8, "little") + data + body)
        with contextlib.suppress(InputError):
            check_safetensors(path)


@given(document=HEADERS | st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_config_and_index_is_read_or_an_input_error(document: object) -> None:
    from perpend.models._source import check_folder

    text = document if isinstance(document, str) else json.dumps(document)
    with tempfile.TemporaryDirectory() as folder:
        for config, index in ((text, "{}"), ("{}", text)):
            (Path(folder) / "config.json").write_text(config)
            (Path(folder) / "model.safetensors.index.json").write_text(index)
            with pytest.raises(InputError):
                check_folder(Path(folder))


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = {name: "../outside.safetensors" for name, _ in named_weights(tiny.tiny("gpt2"))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(InputError, match="lacks 1 of its 1 weight files"):
        perpend.load(folder)


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "model")
    deep = "[" * 200_000
    (folder / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep.encode())
    with pytest.raises(InputError, match="header cannot be read"):
        perpend.load(folder)
    (folder / "config.json").write_text(deep)
    with pytest.raises(InputError, match="JSON"):
        perpend.load(folder)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    edit_config(tmp_path, intermediate_size=40)
    with pytest.raises(InputError, match=r"mlp|mismatch|size"):
        perpend.load(tmp_path)


def test_code_in_a_model_runs_only_when_asked(tmp_path: Path) -> None:
    folder, ran = saved("gpt2", tmp_path / "model"), tmp_path / "ran"
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
        "class OwnModel(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
    )
    edit_config(
        folder,
        model_type="own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    with pytest.raises(InputError, match="trust_remote_code"):
        perpend.load(folder)
    assert not ran.exists()
    model, _ = perpend.load(folder, trust_remote_code=True)
    assert ran.exists()
    assert type(model).__name__ == "OwnModel"


# ---- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt-2", "did you mean 'gpt2'"),
        ("pythia-160", "did you mean 'pythia-160m'"),
        ("smollm", "smollm2-135m-instruct"),
        ("", "empty"),
        ("nowhere/at/all", "no folder"),
        ("/nowhere", "no folder"),
        ("model.gguf", "no GGUF file"),
        ("owner/name", "needs no hub"),
        ("gpt2", "needs no hub"),
        ("pythia-160m@step512", "needs no hub"),
    ],
)
def test_names_that_lead_nowhere(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        perpend.load(name)


def test_revisions_belong_to_hub_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="revision"):
        perpend.load(saved("gpt2", tmp_path), revision="step1")
    with pytest.raises(InputError, match="revision"):
        perpend.load(None, revision="step1")
    with pytest.raises(InputError, match="names another"):
        perpend.load("pythia-160m@step1", revision="step2")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("hello")
    with pytest.raises(InputError, match="is a file"):
        perpend.load(tmp_path / "weights.txt")
    (tmp_path / "fake.gguf").write_text("hello")
    with pytest.raises(InputError, match="is not a GGUF file"):
        perpend.load(tmp_path / "fake.gguf")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(InputError, match=r"short\.gguf"):
        perpend.load(tmp_path / "short.gguf")


def test_a_folder_with_only_a_gguf_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"give the file itself: .*a\.gguf"):
        perpend.load(tmp_path)


# ---- hashes ---------------------------------------------------------------------------------------------


def test_the_hash_sees_every_weight_and_nothing_else() -> None:
    first = weights_hash(tiny.build("gpt2"))
    assert weights_hash(tiny.build("gpt2")) == first
    for name, _ in named_weights(tiny.build("gpt2")):
        changed = tiny.build("gpt2")
        with torch.no_grad():
            changed.get_parameter(name).view(-1)[-1].add_(1e-3)
        assert weights_hash(changed) != first, name
    assert weights_hash(tiny.build("gpt2").to(torch.bfloat16)) != first


def test_tied_weights_are_counted_once() -> None:
    model = tiny.build("gpt2")
    names = [name for name, _ in named_weights(model)]
    assert ("lm_head.weight" in names) != ("transformer.wte.weight" in names)
    assert sum(w.numel() for _, w in named_weights(model)) == model.num_parameters()


def test_views_of_one_storage_are_not_taken_for_tied() -> None:
    whole = torch.arange(8.0)
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Parameter(whole[:4]), torch.nn.Parameter(whole[4:])
    assert [name for name, _ in named_weights(module)] == ["a", "b"]


# ---- shared models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "tokenizer"),
    [
        ("capp-gpt2", "GPT2LMHeadModel", None),
        ("stories260K", "LlamaForCausalLM", "convert_ids_to_tokens"),
        ("dinov2-small", "Dinov2Model", "preprocess"),
    ],
)
def test_trained_models_on_disk(name: str, kind: str, tokenizer: str | None, shared: Path) -> None:
    if name == "dinov2-small":
        pytest.importorskip("PIL")
    model, reader = perpend.load(shared / "data" / "models" / name)
    assert type(model).__name__ == kind
    assert model.dtype == torch.float32 or torch.cuda.is_available()
    assert (reader is None) if tokenizer is None else hasattr(reader, tokenizer)


@torch.no_grad()
def test_stories_reads_stories(shared: Path) -> None:
    from perpend.texts import sequences

    model, tokenizer = perpend.load(shared / "data" / "models" / "stories260K", device="cpu")
    ids = sequences(shared / "data" / "text" / "tinystories.txt", tokenizer, 256, model=model).take(8)
    loss = model(ids, labels=ids).loss
    assert 3.0 < float(loss.exp()) < 4.5

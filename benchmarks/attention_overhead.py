"""What the attention survey costs beside the plain forward pass, in time and in memory.

    python benchmarks/attention_overhead.py                          # the default model, T = 512 and 2048
    python benchmarks/attention_overhead.py MODEL --lengths 192 512 --rounds 9
    python benchmarks/attention_overhead.py --memory 512 2048 8192   # peak memory, a process each

Two readings of time. `inside`: thread time spent in the survey's own function during a pass, over the pass
without language-model head; it resolves half a percent where whole runs resolve about four. `whole`: medians
of alternating runs, with the plain pass against itself as control. Beside them transformers' eager path with
`output_attentions`, the other way to the same rows. One thread, or `--threads`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median

import torch

import perpend
from perpend.models.attention import attach
from perpend.models.inputs import run_trunk
from perpend.surveys.capture import Capture
from perpend.surveys.supports import plan_support

KINDS = {"signatures": (False, False), "rows": (True, False), "rows_and_retained_mass": (True, True)}


def capture_for(length: int, kind: str) -> Capture:
    """The survey's hook for one pass, with its standard support (window 64, sink at key 0)."""
    support = plan_support(
        causal=True, length=length, lengths=None, window=None, sink="first", queries=None, has_virtual=False
    )
    rows, retained = KINDS[kind]
    return Capture(support, None, rows, retained, 4 if rows else 0)


@torch.no_grad()
def time_of(model: torch.nn.Module, tokens: torch.Tensor, kind: str | None) -> tuple[float, float]:
    """Thread seconds of one pass, and of the survey's function inside it (0 for the plain pass)."""
    inside = 0.0
    began = time.thread_time()
    if kind is None:
        run_trunk(model, tokens)
    else:
        capture = capture_for(tokens.shape[1], kind)

        def hook(call, output):
            nonlocal inside
            start = time.thread_time()
            capture.hook(call, output)
            inside += time.thread_time() - start

        with attach(model, hook, need_lse=capture.retained):
            run_trunk(model, tokens)
        start = time.thread_time()
        capture.settle()
        inside += time.thread_time() - start
    return time.thread_time() - began, inside


@torch.no_grad()
def time_of_eager(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Thread seconds of transformers' own way to attention rows: eager, T x T probabilities."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        began = time.thread_time()
        model.base_model(tokens, use_cache=False, output_attentions=True)
        return time.thread_time() - began
    finally:
        model.set_attn_implementation(own)


def times(model: torch.nn.Module, length: int, tokens_a_pass: int, rounds: int) -> dict[str, object]:
    """Both readings for one length, runs alternating."""
    count = max(1, tokens_a_pass // length)
    tokens = torch.randint(1000, (count, length), generator=torch.Generator().manual_seed(0))
    time_of(model, tokens, None)
    seen: dict[str, list[float]] = {name: [] for name in ("plain", "control", "eager", *KINDS)}
    inside: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        plain = time_of(model, tokens, None)[0]
        seen["plain"].append(plain)
        for kind in KINDS:
            whole, part = time_of(model, tokens, kind)
            seen[kind].append(whole)
            inside[kind].append(part / plain)
        seen["control"].append(time_of(model, tokens, None)[0])
        seen["eager"].append(time_of_eager(model, tokens))
    reference = median(seen["plain"])
    return {
        "length": length,
        "sequences": count,
        "plain_seconds": reference,
        "inside": {kind: 1 + median(values) for kind, values in inside.items()},
        "whole": {name: median(values) / reference for name, values in seen.items() if name != "plain"},
    }


def peak(length: int, what: str, name: str | None) -> int:
    """Peak resident bytes of one pass in a process of its own, where nothing has been allocated before."""
    import resource

    torch.set_num_threads(1)
    model, _ = perpend.load(name)
    tokens = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    if what == "plain":
        with torch.no_grad():
            run_trunk(model, tokens)
    else:
        perpend.survey_attention(model, tokens, retained=what == "retained")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(lengths: list[int], name: str | None) -> list[dict[str, object]]:
    """Peak memory of the plain pass and of the survey; allocator threshold fixed, fragmentation is no use."""
    import os

    found = []
    for length in lengths:
        peaks = {}
        for what in ("plain", "survey", "retained"):
            command = [sys.executable, __file__, *([name] if name else []), "--one-peak", str(length), what]
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
            answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            peaks[what] = int(answer.stdout.split()[-1])
        found.append({"length": length, **peaks, "ratio": peaks["survey"] / peaks["plain"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a pass")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, nargs="+", metavar="LENGTH")
    parser.add_argument("--one-peak", nargs=2, metavar=("LENGTH", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_peak:
        print(peak(int(options.one_peak[0]), options.one_peak[1], options.model))
        return
    if options.memory:
        print(json.dumps({"peak_bytes": memory(options.memory, options.model)}, indent=1))
        return
    torch.set_num_threads(options.threads)
    model, _ = perpend.load(options.model)
    found = [times(model, length, options.tokens, options.rounds) for length in options.lengths]
    print(json.dumps({"threads": options.threads, "times": found}, indent=1))


if __name__ == "__main__":
    main()

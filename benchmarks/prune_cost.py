"""What evaluating prune sets together costs beside evaluating each by itself.

    python benchmarks/prune_cost.py path/to/model                 # 9 criteria × 3 sparsities, 4 × 512 tokens
    python benchmarks/prune_cost.py path/to/model --windows 8

Two ratios, both over one plain evaluation for each distinct set and the unpruned model: of layers run, which
is exact and what `perpend prune` prints, and of CPU time (wall-clock on an accelerator), the best of
alternating rounds. A plain evaluation is one pass with the losses of its tokens; the shared walk also takes
the KL and the top-1 agreement of every set.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import perpend
from perpend import texts
from perpend.evaluation.losses import token_nll
from perpend.studies.prune_sets import prune_sets
from perpend.studies.pruning import evaluate_sets
from perpend.surveys.attention import survey_attention


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = perpend.load(options.model)
    text = texts.read_text(options.text)
    short = texts.sequences(text, tokenizer, length=192, model=model).take(8, 0)
    survey = survey_attention(model, short, rows=False)
    found = prune_sets(survey.signatures, list(survey.support.columns.sink), (0.1, 0.2, 0.3))
    tokens = texts.sequences(text, tokenizer, length=options.context, model=model).take(options.windows, 0)
    on_cpu = model.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter

    least: dict[str, float] = {}
    for _ in range(options.rounds):
        started = clock()
        losses = evaluate_sets(model, tokens, [one.heads for one in found], batch=4)
        least["together"] = min(least.get("together", float("inf")), clock() - started)
        started = clock()
        token_nll(model, tokens, batch=4)
        if not on_cpu:
            torch.cuda.synchronize()
        least["plain"] = min(least.get("plain", float("inf")), clock() - started)
    passes = len(losses.sets) + 1
    print(
        json.dumps(
            {
                "seconds": least,
                "distinct_sets": len(losses.sets),
                "layers_to_plain": losses.cost,
                "time_to_plain": least["together"] / (passes * least["plain"]),
                "tokens": tokens.numel(),
                "device": str(model.device),
                "threads": options.threads,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

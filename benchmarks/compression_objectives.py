"""Does a compression objective that weighs rotation beat the isotropic one at equal calibration cost?

    python benchmarks/compression_objectives.py --text wiki.txt --calibration other.txt --out objectives.json

Every directional regime is set against the isotropic one of its kind (same method, steps and calibration),
paired over the evaluated sequences. The first of each line below is the isotropic one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import perpend
from perpend import texts
from perpend.compression import compress
from perpend.evaluation.perplexity import paired, token_nll
from perpend.evaluation.windows import as_windows

WEIGHTS = ("parallel=0.25", "parallel=0.5", "parallel=2", "parallel=4", "relative=true")


def families(group: int, steps: int, grid: int, sample: int, weights: tuple[str, ...]) -> list[list[str]]:
    """Isotropic regime first, then the same with other weights of the perpendicular and parallel error."""
    gain, refit = "wanda:2:4+gain", f"wanda:2:4+refit:iterations={steps}"
    awq = f"awq:3,group={group},clip=false,grid={grid},objective=update,sample={sample}"
    return [
        ["wanda:2:4"],
        [gain, f"{gain}:perpendicular=0.25"],
        [refit, *(f"{refit},{weight}" for weight in weights)],
        [f"rtn:3,group={group}"],
        [f"awq:3,group={group},clip=false,grid={grid}"],
        [awq, *(f"{awq},{weight}" for weight in weights)],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--calibration")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--calibration-length", type=int, default=256)
    parser.add_argument("--calibration-sequences", type=int, default=8)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--grid", type=int, default=20)
    parser.add_argument("--sample", type=int, default=1, help="batches of two that awq's search runs")
    parser.add_argument("--weights", default=" ".join(WEIGHTS))
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")

    model, tokenizer = perpend.load(chosen.model, device="cpu")
    text, other = texts.read_text(chosen.text), texts.read_text(chosen.calibration)
    skip = (
        chosen.sequences * chosen.length // chosen.calibration_length + 1
        if other.sha256 == text.sha256
        else 0
    )
    windows = as_windows(texts.sequences(text, tokenizer, length=chosen.length).take(chosen.sequences))
    pool = texts.sequences(other, tokenizer, length=chosen.calibration_length).tokens
    tokens = pool[skip : skip + chosen.calibration_sequences]

    base = token_nll(model, windows, batch=4)
    rows: list[dict[str, Any]] = []
    document = {
        "command": "python benchmarks/compression_objectives.py",
        "model": chosen.model or "smollm2-135m",
        "evaluated": {"text_sha256": text.sha256, "sequences": chosen.sequences, "length": chosen.length},
        "calibration": {"text_sha256": other.sha256, "sequences": len(tokens), "length": tokens.shape[1]},
        "base_perplexity": math.exp(float(base.sums.sum() / base.counts.sum())),
        "rows": rows,
    }
    lines = families(chosen.group, chosen.steps, chosen.grid, chosen.sample, tuple(chosen.weights.split()))
    for line in lines:
        isotropic = None
        for regime in line:
            compressed = copy.deepcopy(model)
            started = time.process_time()
            compress(compressed, tokens, regime, batch=2)
            seconds = time.process_time() - started
            nll = token_nll(compressed, windows, batch=4)
            change = paired(base, nll)
            row = {
                "regime": regime,
                "perplexity": math.exp(float(nll.sums.sum() / nll.counts.sum())),
                "change": [change.difference, change.low, change.high],
                "cpu_seconds": round(seconds, 1),
                "against_isotropic": None,
            }
            if isotropic is None:
                isotropic = nll
            else:
                gap = paired(isotropic, nll)
                row["against_isotropic"] = [gap.difference, gap.low, gap.high]
            rows.append(row)
            print(json.dumps(row), flush=True)
            chosen.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

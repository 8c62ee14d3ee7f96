"""What a variant costs per training step, as a ratio to the baseline's: forward, backward and optimizer step.

    python benchmarks/train_overhead.py                        # eager and compiled, size mini, one thread
    python benchmarks/train_overhead.py --size 296M --device cuda --dtype bfloat16 --batch 8

Variants take turns, step by step, so that a machine that slows down slows all of them; the ratio is taken
within each round, and its median and quartiles over the rounds are printed. On a CPU time is the process's
own. Goal: at most 1.035 compiled, the overhead that the paper states for its pretraining (3.39 %).
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
import torch.nn.functional as F

from perpend.training.model import build, shape
from perpend.training.variants import VARIANTS, apply_variant

GOAL = 1.035


def stepper(size: str, variant: str, tokens: torch.Tensor, device: str, dtype: str, compiled: bool):
    """A function that trains one step and returns its seconds."""
    model = apply_variant(build(shape(size, context=tokens.shape[1] - 1)), variant).to(device)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    clock = time.process_time if device == "cpu" else time.perf_counter

    def step() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        began = clock()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device != "cpu":
            torch.cuda.synchronize()
        return clock() - began

    return step


def measure(arguments: argparse.Namespace, compiled: bool) -> list[dict]:
    torch.manual_seed(0)
    sizes = (arguments.batch, (arguments.context or shape(arguments.size).context) + 1)
    tokens = torch.randint(shape(arguments.size).vocab, sizes, device=arguments.device)
    names = list(dict.fromkeys(["baseline", *arguments.variants.split(",")]))
    steps = {
        name: stepper(arguments.size, name, tokens, arguments.device, arguments.dtype, compiled)
        for name in names
    }
    for step in steps.values():  # compilation, and the first touch of the memory
        step()
        step()
    seconds = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name in names if number % 2 else names[::-1]:
            seconds[name].append(steps[name]())
    rows = []
    for name in names:
        ratio = np.array(seconds[name]) / np.array(seconds["baseline"])
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
        rows.append(
            {
                "mode": "compiled" if compiled else "eager",
                "variant": name,
                "milliseconds": float(np.median(seconds[name])) * 1000,
                "ratio": float(middle),
                "quartiles": [float(low), float(high)],
                "within_goal": bool(middle <= GOAL),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="mini")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [row for mode in arguments.modes.split(",") for row in measure(arguments, mode == "compiled")]
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), "torch": torch.__version__, "rows": rows}, indent=1))
        return
    for row in rows:
        low, high = row["quartiles"]
        told = "" if row["within_goal"] else "  above the goal"
        print(
            f"{row['mode']:9} {row['variant']:22} {row['milliseconds']:8.1f} ms  "
            f"ratio {row['ratio']:.3f} [{low:.3f}, {high:.3f}]{told}"
        )


if __name__ == "__main__":
    main()

"""What watching attention costs a training run, as a share of its time, and how often it may look.

    python benchmarks/monitor_overhead.py                     # a small GPT-2 on one thread, about a minute
    python benchmarks/monitor_overhead.py --width 768 --layers 12 --batch 32 --context 1024 --device cuda

A reading is a survey of 4 held-out sequences of 128 tokens. One reading costs `ratio` training steps; read
every N steps it takes the share ratio / (N + ratio) of the time, so that N = 49 · ratio keeps it at 2 %. The
share is then measured too: a run of 2 N steps with a reading at every N of them. Steps and readings take
turns, so that a machine that slows down slows both. On a CPU time is the process's own.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np
import torch

from perpend.training.monitor import Monitor

GOAL = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in (("width", 192), ("layers", 4), ("heads", 6), ("vocabulary", 4096), ("batch", 16),
                        ("context", 256), ("sequences", 4), ("length", 128), ("rounds", 8)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments), indent=1))


def measure(arguments: argparse.Namespace) -> dict[str, float | int]:
    """Seconds of a step and of a reading, their ratio, the N it needs, and the share measured at that N."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=arguments.vocabulary,
            n_embd=arguments.width,
            n_layer=arguments.layers,
            n_head=arguments.heads,
            n_positions=max(arguments.context, arguments.length),
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model = model.to(arguments.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (arguments.batch, arguments.context)
    tokens = torch.randint(arguments.vocabulary, shape, device=arguments.device)
    held_out = torch.randint(arguments.vocabulary, (arguments.sequences, arguments.length))
    on_cpu = arguments.device == "cpu"

    def clock() -> float:
        if not on_cpu:
            torch.cuda.synchronize()
        return time.process_time() if on_cpu else time.perf_counter()

    def step() -> float:
        began = clock()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return clock() - began

    monitor = Monitor(held_out, every=1, most=None, clock=clock)
    for _ in range(2):
        step()
        monitor.read(0, model)
    pairs = np.array([[step(), monitor.read(0, model).seconds] for _ in range(arguments.rounds)])
    seconds, reading = np.median(pairs, axis=0)
    ratio = float(np.median(pairs[:, 1] / pairs[:, 0]))
    every = math.ceil(ratio * (1 - GOAL) / GOAL)
    watched = Monitor(held_out, every=every, most=None, clock=clock)
    for number in range(1, 2 * every + 1):
        step()
        watched(number, model)
    return {
        "parameters": model.num_parameters(),
        "step_seconds": float(seconds),
        "reading_seconds": float(reading),
        "ratio": ratio,
        "every": every,
        "share_measured": watched.cost,
        "goal": GOAL,
    }


if __name__ == "__main__":
    main()

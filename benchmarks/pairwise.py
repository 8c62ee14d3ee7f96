"""All head-to-head distances of a large model: seven metrics, sink kept and dropped, and 50,000 triples.

    python benchmarks/pairwise.py                    # 5,120 heads × 64 keys, 2 threads; to meet: 60 s
    python benchmarks/pairwise.py --heads 1024 --threads 1

JS is timed beside scipy's `cdist(…, "jensenshannon")` on the same rows (figure to meet: 5 × faster). Wall and
processor time are both shown: on a machine that others use the second is the steadier one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.spatial.distance import cdist

from perpend.geometry import closure, pairwise
from perpend.studies.reversal import METRICS, compare, sample_triples, verdicts


def clock(function: Callable[[], object]) -> tuple[float, float, object]:
    """(wall seconds, processor seconds, value)."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = function()
    return time.perf_counter() - wall, time.process_time() - cpu, value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=5120)
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scipy-heads", type=int, default=1500, help="rows of the comparison with scipy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (options.heads, options.keys))
    logits[:, 0] += 4  # a strong sink: nearly equal rows, the slow case of JS
    triples = sample_triples(options.heads)
    total = np.zeros(2)
    print(
        f"{options.heads} heads x {options.keys} keys, {options.threads} threads; seconds (wall, processor)"
    )
    for metric in METRICS:
        signs = []
        spent = np.zeros(2)
        for policy in ("keep", "drop"):
            wall, cpu, matrix = clock(lambda m=metric, p=policy: pairwise(logits, m, 0, p, log=True))
            spent += wall, cpu
            wall, cpu, sign = clock(lambda d=matrix: verdicts(d, triples))
            spent += wall, cpu
            signs.append(sign)
        total += spent
        rate = compare(*signs).rate
        print(f"  {metric:16s} keep and drop {spent[0]:6.2f} {spent[1]:6.2f}   reversal {rate:.3f}")
    print(f"  {'all':16s}               {total[0]:6.2f} {total[1]:6.2f}")

    rows = closure(np.exp(logits[: options.scipy_heads]))
    ours = min(clock(lambda: pairwise(rows, "jensen_shannon"))[:2] for _ in range(3))
    theirs = min(clock(lambda: cdist(rows, rows, "jensenshannon"))[:2] for _ in range(3))
    print(
        f"JS of {len(rows)} rows: {ours[0]:.2f} s wall, {ours[1]:.2f} s processor; scipy {theirs[0]:.2f}, "
        f"{theirs[1]:.2f}: {theirs[0] / ours[0]:.1f} x by wall, {theirs[1] / ours[1]:.1f} x by processor time"
    )


if __name__ == "__main__":
    main()

"""What surveying the updates costs beside the plain forward pass.

    python benchmarks/updates_overhead.py                       # the default model, 8 × 192 tokens
    python benchmarks/updates_overhead.py MODEL --length 1024 --rounds 8

Times alternate, so that a machine that slows down slows all of them, and the least of each counts: CPU time
of the process on a CPU, wall-clock on an accelerator. Two plain passes stand beside the survey: the whole
model, and the model without its head, which is what the survey runs.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import perpend
from perpend.models.inputs import run_trunk


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, _ = perpend.load(options.model)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary // 2, (options.sequences, options.length))
    on_cpu = model.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter

    @torch.inference_mode()
    def whole() -> None:
        model(tokens.to(model.device))

    @torch.inference_mode()
    def trunk() -> None:
        run_trunk(model, tokens)

    def survey() -> None:
        perpend.survey_updates(model, tokens, batch=options.sequences)

    least: dict[str, float] = {}
    for _ in range(options.rounds + 1):
        for name, run in (("whole", whole), ("trunk", trunk), ("survey", survey)):
            started = clock()
            run()
            if not on_cpu:
                torch.cuda.synchronize()
            least[name] = min(least.get(name, float("inf")), clock() - started)
    print(
        json.dumps(
            {
                "seconds": least,
                "survey_to_whole": least["survey"] / least["whole"],
                "survey_to_trunk": least["survey"] / least["trunk"],
                "tokens": tokens.numel(),
                "device": str(model.device),
                "threads": options.threads,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

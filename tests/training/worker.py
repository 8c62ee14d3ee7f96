"""One training run as a program, for tests that kill it or start it several times: torchrun's or a plain
process.

    python worker.py DATA '{"OUT": {"variant": ..., "recipe": {...}, "rhythm": {...}, "strategy": "ddp"},
    ...}'
"""

import json
import sys
from contextlib import suppress

import torch

from perpend import distributed
from perpend.training.data import open_data
from perpend.training.model import shape
from perpend.training.recipe import recipe
from perpend.training.trainer import Rhythm, train


def stop_at(wanted: int):
    """Interrupts a run at its evaluation of this step."""

    def look(step: int, model) -> None:
        if step == wanted:
            raise KeyboardInterrupt

    return look


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = open_data(sys.argv[1])
    for out, asked in json.loads(sys.argv[2]).items():
        for watch in [[stop_at(asked["stop"])], []] if "stop" in asked else [[]]:
            with suppress(KeyboardInterrupt):
                train(
                    shape("tiny", vocab=data.vocab),
                    asked["variant"],
                    data,
                    recipe(**asked["recipe"]),
                    out,
                    rhythm=Rhythm(**asked["rhythm"]),
                    strategy=asked.get("strategy", "ddp"),
                    watch=watch,
                )
    distributed.shutdown()

"""Writes README.md's example and its figure from a stored run; `--check` only says whether they are current.

python scripts/readme.py
python scripts/readme.py --check
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from profile_svg import lines

REPO = Path(__file__).resolve().parent.parent
RUN = REPO / "docs" / "runs" / "attention-smollm2.json"
README, FIGURE = REPO / "README.md", REPO / "docs" / "entropy-smollm2.svg"
BLOCK = re.compile(r"(?<=<!-- example -->\n).*?(?=<!-- /example -->)", re.DOTALL)
NOT_DEFAULT = "wikitext2-valid.txt"  # the run has the defaults of `perpend attention` but for its text


def figure(document: dict[str, Any]) -> str:
    """The entropy of whole rows and of their content by layer, as SVG."""
    entropy = document["results"]["entropy"]
    layers = entropy["per_layer"]
    return lines(
        {
            "content only": [layer["content"] for layer in layers],
            "the whole row": [layer["total"] for layer in layers],
        },
        title="Entropy of attention rows by layer, SmolLM2-135M-Instruct",
        x="layer",
        y="nats",
        reference=("uniform content", entropy["uniform"]["content"]),
        logarithmic=False,
    )


def example(document: dict[str, Any]) -> str:
    """The command, the figure, what it shows, and the findings as the run prints them."""
    request = document["request"]
    assert request["data"]["name"] == NOT_DEFAULT
    layers = document["results"]["entropy"]["per_layer"]
    steepest = max(range(1, len(layers)), key=lambda i: layers[i]["sink_mass"] - layers[i - 1]["sink_mass"])
    before, after = layers[steepest - 1], layers[steepest]
    told = (
        f"From layer {steepest - 1} to layer {steepest} the entropy of a row falls from "
        f"{before['total']:.2f} to {after['total']:.2f} nats, and attention seems to have collapsed. "
        "It has not: on everything but the sink it is spread as widely as before, "
        f"{before['content']:.2f} and {after['content']:.2f} nats. What grew is the sink, from "
        f"{before['sink_mass']:.1%} of a row to {after['sink_mass']:.1%}."
    )
    assert after["content"] >= before["content"], "the example's sentence is of another run"
    found = "\n".join(
        textwrap.fill(one, 104, initial_indent="  · ", subsequent_indent="    ", break_on_hyphens=False)
        for one in document["findings"]
    )
    name = FIGURE.relative_to(REPO).as_posix()
    return "\n".join(
        [
            f"![Entropy of the whole row and of its content, by layer]({name})",
            "",
            *textwrap.wrap(told, 118),
            "",
            "```console",
            f"$ perpend attention --text {shlex.quote(NOT_DEFAULT)}",
            "…",
            "Findings",
            found,
            "```",
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    document = json.loads(RUN.read_text(encoding="utf-8"))
    page = README.read_text(encoding="utf-8")
    if not BLOCK.search(page):
        print("README.md has no <!-- example --> … <!-- /example -->", file=sys.stderr)
        return 1
    made = example(document)
    written = {README: BLOCK.sub(lambda _: made, page), FIGURE: figure(document)}
    for path, text in written.items():
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is not what {RUN.name} says: run python scripts/readme.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

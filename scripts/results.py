"""Writes docs/results.md from the run summaries in docs/runs; `--check` only says whether it is current.

python scripts/results.py
python scripts/results.py --check
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results_sections as sections

from perpend.papers import claims

ROOT = Path(__file__).resolve().parent.parent
PAGE, RUNS = ROOT / "docs" / "results.md", ROOT / "docs" / "runs"

INTRODUCTION = """\
# Results measured here

<!-- Written by scripts/results.py from the summaries in docs/runs; edit those. -->

Every number on this page stands in a summary of a run (docs/runs) and comes with the command that makes it.
The machine had two cores, no accelerator and no model hub, so the papers' own models were out of reach: these
are SmolLM2-135M-Instruct (weights rounded to four bits by its publisher), stories260K (a Llama of 260k
parameters), MiniLM (a BERT of six layers), DINOv2-small, and a toy decoder from benchmarks/pretrain_cpu.sh.
Rates are shares of closer-head verdicts; losses are nats per token.
"""

# What the attention paper prints of SmolLM2-135M, the base model (Appendix E.2).
PRINTED = (
    "The paper prints for the base model SmolLM2-135M: CV 0.42 (the rule abstained); row sink 0.01–0.15 in "
    "the first twelve layers and 0.68–0.92 after. The model here is its instruction-tuned and four-bit "
    "descendant, on other sequences."
)


def page() -> str:
    """The page's text."""
    parts = [INTRODUCTION, *claims.markdown(claims.judge_all(claims.summaries(RUNS)))]
    for path in sorted(RUNS.glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        maker = _SECTIONS.get(document["command"], _by_hand)
        parts.append(maker(path, document))
    return "\n".join(parts)


def _heading(path: Path, document: Mapping[str, Any], findings: bool = True) -> list[str]:
    request = document["request"]
    data = request.get("data", {})
    lines = [
        f"## {path.stem}",
        "",
        f"`perpend {document['command']}` on {request['model']['name']}{_read(data)}, "
        f"seeds {', '.join(map(str, request.get('seeds') or ['–']))}. [Summary](runs/{path.name}).",
        "",
        "```",
        _command(document),
        "```",
        "",
    ]
    return lines + [f"- {line}" for line in document.get("findings", [])] + [""] if findings else lines


def _read(data: Mapping[str, Any]) -> str:
    """The text or the images of a run, in words; nothing where a run reads none of its own."""
    if not data:
        return ""
    if "length" not in data:
        return f", {data['name']} ({data.get('sequences', '–')} images)"
    opened = "each opened by a BOS" if data.get("bos") else "no BOS"
    return f", {data['name']} ({data['sequences']} sequences of {data['length']} tokens, {opened})"


_NAMED = {"text", "model", "data", "seeds", "command", "perpend", "cells", "held_out_sha256"}


def _command(document: Mapping[str, Any]) -> str:
    """The words that make the run again; of a run that did not keep them, from its request."""
    if document.get("invocation"):
        return shlex.join(document["invocation"])
    request = document["request"]
    data = request.get("data", {})
    words = ["perpend", document["command"], request["model"]["name"]]
    if data:
        bos = "always" if data.get("bos") else "never"
        words += [
            "--text",
            data["name"],
            "--sequences",
            data["sequences"],
            "--length",
            data["length"],
            "--bos",
            bos,
        ]
    if request.get("seeds"):
        words += ["--seed", ",".join(map(str, request["seeds"]))]
    for key in ("window", "sink", "batch", "context"):
        if request.get(key) is not None:
            words += [f"--{key}", request[key]]
    return shlex.join(str(word) for word in words)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table."""
    body = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body, ""]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return " to ".join(_cell(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _attention(path: Path, document: Mapping[str, Any]) -> str:
    results = document["results"]
    lines = _heading(path, document)
    if "SmolLM2" in document["request"]["model"]["name"] or "smollm2" in document["request"]["model"]["name"]:
        layers = results["sink"]["per_layer"]
        early, late = ([layer["row"] for layer in part] for part in (layers[:12], layers[12:]))
        lines += [
            f"{PRINTED} Here: CV {results['sink']['signature_cv']:.2f}; row sink "
            f"{min(early):.2f}–{max(early):.2f} in the first twelve layers and "
            f"{min(late):.2f}–{max(late):.2f} after.",
            "",
        ]
    rows = []
    for metric, rate in results["reversal"].items():
        placed = results.get("calibration", {}).get("by_metric", {}).get(metric, {})
        rows.append(
            [
                metric,
                *(_percent(rate.get(name)) for name in ("exact", "low", "high", "noise_floor_keep")),
                _percent(rate.get("rate_among_significant")),
                _percent(placed.get("expected")),
            ]
        )
    columns = ["metric", "reversal %", "low", "high", "noise floor", "among significant", "calibration curve"]
    lines += table(columns, rows)
    sweep = results.get("epsilon", {}).get("fp16_probabilities", [])
    if sweep:
        lines += [
            f"ε sweep: from logits ε is inactive. From fp16 probabilities {sweep[0]['zeros']:.1%} of entries "
            "are zero, and the Jensen-Shannon rate is "
            + ", ".join(f"{s['reversal']['jensen_shannon']:.2%} at ε = {s['epsilon']:g}" for s in sweep)
            + ".",
            "",
        ]
    return "\n".join(lines)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def _prune(path: Path, document: Mapping[str, Any]) -> str:
    return "\n".join([*_heading(path, document), *sections.prune(document, table)])


def _updates(path: Path, document: Mapping[str, Any]) -> str:
    figure = f"runs/{path.stem}.svg"
    return "\n".join([*_heading(path, document), *sections.updates(document, figure, table)])


def figures() -> dict[Path, str]:
    """The figures that the page shows, by file."""
    found = {}
    for path in sorted(RUNS.glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        if document["command"] == "updates":
            found[path.with_suffix(".svg")] = sections.profile(document)
    return found


def _evaluate(path: Path, document: Mapping[str, Any]) -> str:
    """Every condition's scores, then each against the first, item by item."""
    results = document["results"]
    scores = [
        [condition, task, one["metric"], *(one["scores"][one["metric"]][k] for k in ("value", "low", "high"))]
        for condition, tasks in results["tasks"].items()
        for task, one in tasks.items()
    ]
    rows = [
        [condition, task, quantity, *(row.get(k) for k in ("n", "difference", "low", "high", "verdict"))]
        for condition, one in results["comparison"].items()
        for task, quantities in one["tasks"].items()
        for quantity, row in quantities.items()
    ]
    lines = _heading(path, document, findings=False)  # they say what the second table says
    lines += [f"- {line}" for line in document["findings"] if "not above guessing" in line] + [""]
    lines += table(["condition", "task", "metric", "score", "low", "high"], scores)
    lines += table(["condition", "task", "quantity", "items", "difference", "low", "high", "verdict"], rows)
    return "\n".join(lines)


def _train(path: Path, document: Mapping[str, Any]) -> str:
    """Final losses, and the differences within a seed with the effect that could have been detected."""
    results = document["results"]
    lines = _heading(path, document)
    rows = [[name, one["mean"], one["sd"]] for name, one in results["final"].items()]
    lines += table(["variant", "validation loss", "sd over seeds"], rows)
    columns = ["variant", "against", "budget", "n", "mean", "low", "high", "detectable"]
    lines += table(columns, [[row[name] for name in columns] for row in results["paired"]])
    return "\n".join(lines)


def _asked(request: Mapping[str, Any]) -> str:
    """The options of `perpend edit` that decide its cells, as they were typed."""
    words = [f"--{name} {','.join(f'{x:g}' for x in request[name])}" for name in ("parallel", "perpendicular")
             if request.get(name)]  # fmt: skip
    words += [f"--site {site}" for site in request.get("sites") or ()]
    words += [f"--reference {name}" for name in request.get("references") or ()]
    if request.get("controls_at"):
        words.append(f"--controls-at {','.join(f'{x:g}' for x in request['controls_at'])}")
    flags = ("grid", "controls", "basin", "audit", "gradient", "head_sensitivity")
    words += [f"--{flag.replace('_', '-')}" for flag in flags if request.get(flag)]
    return "".join(f" {word}" for word in words)


def _edit(path: Path, document: Mapping[str, Any]) -> str:
    """Edits beside their controls, a row a site and scale; single heads and slopes where a run has them."""
    results = document["results"]
    lines = _heading(path, document)
    if not document.get("invocation"):
        command = _command(document)
        lines = [line.replace(command, command + _asked(document["request"])) for line in lines]
    cells = [cell for cell in results.get("cells", []) if cell.get("change_low") is not None]
    keys = ("site", "reference", "parallel", "perpendicular")
    rows = []
    for cell in (cell for cell in cells if cell.get("control") is None):
        same = {c["control"]: c["change"] for c in cells if all(c.get(k) == cell.get(k) for k in keys)}
        rows.append(
            [
                *(cell.get(name) for name in keys),
                f"{cell['change']:+.3f} ({cell['change_low']:+.3f} to {cell['change_high']:+.3f})",
                *(f"{same[k]:+.3f}" if k in same else None for k in ("random", "shuffled", "opposite")),
                *(cell.get(name) for name in ("perplexity", "word_perplexity", "kl", "top1_agreement")),
            ]
        )
    if rows:
        columns = ["site", "reference", "s∥", "s⊥", "change of the loss (95 %)"]
        columns += ["random", "shuffled", "opposite", "perplexity", "per word", "KL", "top-1"]
        lines += table(columns, rows)
    layers = results.get("heads", {}).get("layers", [])
    if layers:
        names = ["layer", "joint", "smallest", "largest", "sum_of_sizes", "signed_sum", "interaction"]
        lines += table(names, [[row.get(name) for name in names] for row in layers])
    return "\n".join(lines)


def _plain(path: Path, document: Mapping[str, Any]) -> str:
    return "\n".join(_heading(path, document))


def _by_hand(path: Path, document: Mapping[str, Any]) -> str:
    """A summary that carries its whole command: findings, and the tables it holds."""
    lines = [
        f"## {path.stem}",
        "",
        f"[Summary](runs/{path.name}).",
        "",
        "```",
        _command(document) if document.get("invocation") else document["command"],
        "```",
        "",
    ]
    lines += [document["note"], ""] if "note" in document else []
    lines += [f"- {line}" for line in document.get("findings", [])] + [""]
    cells = document.get("results", {}).get("cells")
    if cells:
        names = ["site", "reference", "parallel", "perpendicular", "control", "perplexity", "change"]
        names += ["change_low", "change_high", "kl", "top1_agreement"]
        lines += table(names, [[cell.get(name) for name in names] for cell in cells])
    rows = document.get("rows", [])
    if rows:
        columns = [name for name, value in rows[0].items() if not isinstance(value, (dict, list))]
        lines += table(columns, [[row.get(name) for name in columns] for row in rows])
    return "\n".join(lines)


_SECTIONS = {
    "attention": _attention,
    "prune": _prune,
    "updates": _updates,
    "compress": _plain,
    "edit": _edit,
    "evaluate": _evaluate,
    "train": _train,
    "verify": _plain,
}


def main() -> None:
    text = page()
    if "--check" in sys.argv:
        files = {PAGE: text, **figures()}
        if any(not path.exists() or path.read_text("utf-8") != own for path, own in files.items()):
            sys.exit("docs/results.md is not what docs/runs says: run python scripts/results.py")
        return
    for path, own in {PAGE: text, **figures()}.items():
        path.write_text(own, "utf-8")


if __name__ == "__main__":
    main()

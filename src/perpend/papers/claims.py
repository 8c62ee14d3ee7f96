"""Every claim of both papers, judged from stored runs; where a paper contradicts itself, both sentences.

    judged = judge_all(summaries())              # one Judged a claim
    judged[0].status, judged[0].found, judged[0].by

Claims are data (claims_data/*.json): a statement, where it stands, a sentence of the paper, and how it is
judged, by which fields of which stored run. A status is computed, never typed: `perpend.papers.judges` reads
it off the runs, and a claim whose run is not there comes out as "not run here yet". Claims whose models or
machines are out of reach say why.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from perpend.errors import InputError, unknown_name
from perpend.papers.judges import (
    ARTEFACT,
    JUDGES,
    REFUTED,
    REPRODUCED,
    UNDERPOWERED,
    Outcome,
    Summary,
)

NOT_YET, OUT_OF_REACH, CONTRADICTION = "not run here yet", "out of reach here", "contradicts itself"
NOT_SEEN = "not seen here"
STATUSES = (REPRODUCED, REFUTED, ARTEFACT, UNDERPOWERED, NOT_SEEN, OUT_OF_REACH, NOT_YET, CONTRADICTION)
PAPERS = {"attention": "Attention rows as compositions", "directional": "Directional decomposition"}


@dataclass(frozen=True)
class Claim:
    """One claim. `scope`: every model must show it ("every"), or one is enough ("some").

    `fields` names, for the reader, what of which run decides it; `item` the table or figure that makes it
    again; `reach` why it is out of reach; `quotes` two sentences that contradict each other.
    """

    name: str
    place: str
    statement: str
    quote: str = ""
    judge: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    fields: str = ""
    item: str | None = None
    scope: str = "every"
    reach: str | None = None
    quotes: tuple[str, ...] = ()

    @property
    def paper(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Judged:
    """A claim with its status, what was found in words, and each run's own outcome (summary, outcome)."""

    claim: Claim
    status: str
    found: str
    by: tuple[tuple[Summary, Outcome], ...] = ()

    @property
    def command(self) -> str:
        """The command that makes the claim's table or figure again."""
        return f"perpend paper {self.claim.item}" if self.claim.item else ""

    def record(self) -> dict[str, Any]:
        """Plain data, as `perpend paper --claims --json` gives it."""
        c = self.claim
        return {
            "name": c.name,
            "paper": c.paper,
            "place": c.place,
            "statement": c.statement,
            "quotes": list(c.quotes or (c.quote,)),
            "judged_by": c.fields or c.reach,
            "status": self.status,
            "found": self.found,
            "command": self.command,
            "runs": [
                {"run": s.name, "model": s.model, "status": o.status, "found": o.found, "command": s.command}
                for s, o in self.by
            ],
        }


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, paper by paper, and the contradictions last."""
    found = []
    for file in ("attention", "directional", "contradictions"):
        raw = json.loads(
            (resources.files("perpend.papers") / "claims_data" / f"{file}.json").read_text("utf-8")
        )
        found += [Claim(**{**record, "quotes": tuple(record.get("quotes", ()))}) for record in raw]
    return tuple(found)


def folder() -> Path | None:
    """Where the stored runs are: beside the package in an installation, docs/runs in a checkout."""
    import perpend

    package = Path(perpend.__file__).resolve().parent
    places = (package / "papers" / "runs", package.parent.parent / "docs" / "runs")
    return next((place for place in places if place.is_dir()), None)


def summaries(place: Path | None = None) -> list[Summary]:
    """The stored runs of a folder, by name. InputError where there is none."""
    place = place or folder()
    if place is None or not place.is_dir():
        raise InputError("no stored runs are here: they lie in docs/runs of a checkout of perpend")
    return [summary(path.stem, json.loads(path.read_text("utf-8"))) for path in sorted(place.glob("*.json"))]


def summary(name: str, document: Mapping[str, Any]) -> Summary:
    """One stored run, whichever way it was stored: run.json without paths, or with its whole command."""
    command = str(document["command"])
    request = document.get("request") or {}
    model = request.get("model") or document.get("model") or {}
    model = model.get("name", "") if isinstance(model, Mapping) else model
    words = shlex.split(command)
    whole = len(words) > 1
    verb = words[1] if whole and words[0] == "perpend" else ("benchmark" if whole else command)
    results = document.get("results") or {
        key: value for key, value in document.items() if key in ("regimes", "ordering", "relations", "rows")
    }
    return Summary(name, verb, str(model), results, command if whole else commanded(document))


_OPTIONS = ("window", "sink", "batch", "context", "protocol", "length")


def commanded(document: Mapping[str, Any]) -> str:
    """The words that make a stored run again; of a run that did not keep them, from its request."""
    if document.get("invocation"):
        return shlex.join(map(str, document["invocation"]))
    request = document.get("request") or {}
    data = request.get("data") or {}
    words = ["perpend", str(document["command"])]
    words += [str(request["model"]["name"])] if (request.get("model") or {}).get("name") else []
    if data.get("name"):
        words += ["--text", str(data["name"])]
        words += [w for k in ("sequences", "length") if data.get(k) for w in (f"--{k}", str(data[k]))]
    if request.get("seeds"):
        words += ["--seed", ",".join(map(str, request["seeds"]))]
    for name in _OPTIONS:
        if request.get(name) is not None and f"--{name}" not in words:
            words += [f"--{name}", str(request[name])]
    return shlex.join(words)


def judge_all(stored: Iterable[Summary], paper: str | None = None) -> list[Judged]:
    """Every claim judged from the stored runs; of one paper where it is named."""
    stored = list(stored)
    if paper is not None and paper not in PAPERS:
        raise unknown_name("paper", paper, PAPERS)
    return [judged(claim, stored) for claim in claims() if paper in (None, claim.paper)]


def judged(claim: Claim, stored: Sequence[Summary]) -> Judged:
    """One claim from the stored runs."""
    by = []
    if claim.judge:
        for one in stored:
            outcome = JUDGES[claim.judge](one, claim.args)
            if outcome is not None:
                by.append((one, outcome))
    told = "; ".join(f"{one.name}: {outcome.found}" for one, outcome in by)
    if claim.quotes:
        return Judged(claim, CONTRADICTION, told, tuple(by))
    if claim.reach:
        return Judged(claim, OUT_OF_REACH, claim.reach, ())
    if not by:
        return Judged(claim, NOT_YET, "", ())
    return Judged(claim, overall([outcome.status for _, outcome in by], claim.scope), told, tuple(by))


def overall(statuses: Sequence[str], scope: str) -> str:
    """One status for several runs: a claim about every model falls with one, a claim about some needs one.

    That something can happen is not refuted by models in which it does not: that is "not seen here".
    """
    if scope == "every":
        order = (REFUTED, ARTEFACT, UNDERPOWERED, REPRODUCED)
        return next(status for status in order if status in statuses)
    order = (REPRODUCED, UNDERPOWERED, ARTEFACT)
    return next((status for status in order if status in statuses), NOT_SEEN)


def markdown(judged_claims: Sequence[Judged]) -> list[str]:
    """The list for the results page: counts, a table a paper, the contradictions with both sentences."""
    counts = {status: sum(one.status == status for one in judged_claims) for status in STATUSES}
    lines = [
        "## Claims of both papers",
        "",
        "Each status is computed from the stored runs (docs/runs) by the fields named. A claim about every "
        "model is refuted by one, and what the claim says can happen is, where it does not, not seen here; a "
        "geometric artefact does what the claim says and so does its null; an "
        "underpowered one has an interval that holds both answers; claims of equality are held against a "
        "margin. The models here are small, and none is the papers' own.",
        "",
        ", ".join(f"{count} {status}" for status, count in counts.items() if count) + ".",
        "",
    ]
    for paper, title in PAPERS.items():
        rows = [one for one in judged_claims if one.claim.paper == paper and not one.claim.quotes]
        lines += [
            f"### {title}",
            "",
            "| claim | where | status | found here | made by |",
            "|---|---|---|---|---|",
        ]
        lines += ["| " + " | ".join(_cells(one)) + " |" for one in rows] + [""]
    lines += ["### Where the papers contradict themselves", ""]
    for one in judged_claims:
        if one.claim.quotes:
            lines += [f"- **{one.claim.statement}** ({PAPERS[one.claim.paper]}, {one.claim.place})"]
            lines += [f"    - “{_escaped(readable(quote))}”" for quote in one.claim.quotes]
            lines += [f"    - Here: {_escaped(one.found)}"] if one.found else []
    return [*lines, ""]


def _cells(one: Judged) -> list[str]:
    claim = one.claim
    found = "<br>".join(f"[{s.name}](#{s.name.lower()}): {_escaped(o.found)}" for s, o in one.by)
    if one.status == OUT_OF_REACH:
        found = claim.reach or ""
    made = f"`{one.command}`" if one.command else ""
    made += f"<br>{_escaped(claim.fields)}" if claim.fields else ""
    return [_escaped(claim.statement), claim.place, f"**{one.status}**", found or "–", made or "–"]


_SIGNS = {
    r"d_{A}^{\perp}": "d_A⊥",
    r"\rho": "ρ",
    r"\geq": "≥",
    r"\pm": "±",
    r"\to": "→",
    r"\%": "%",
    "$": "",
}


def readable(quote: str) -> str:
    """A sentence or a table's row of a paper without its typesetting marks."""
    quote = re.sub(r"\{\\scriptstyle\\pm ([\d.]+)\}", r" ± \1", quote)
    for sign, said in _SIGNS.items():
        quote = quote.replace(sign, said)
    return " · ".join(part.strip() for part in quote.strip("| ").split(" | "))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("$", "\\$")

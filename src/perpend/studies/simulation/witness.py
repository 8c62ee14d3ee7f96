"""Exact witnesses: Table 1 and Figure 1, Propositions 1 and 3, the Schur remark, Remark C.3."""

from __future__ import annotations

import math

import numpy as np

from perpend.geometry import (
    clr,
    content_dispersion,
    dissimilarity,
    entropy,
    pairwise,
    split_entropy,
)
from perpend.papers import published
from perpend.studies.simulation.checks import TITLE, Part, Settings, exact, holds

ORDER = 10
P, Q, R = np.array([0.9, 0.08, 0.02]), np.array([0.7, 0.24, 0.06]), np.array([0.9, 0.02, 0.08])
"""The witness of Theorem 1: (9/10, 2/25, 1/50), (7/10, 6/25, 3/50), (9/10, 1/50, 2/25)."""
CLASSICAL = ("cosine", "jensen_shannon", "euclidean")


def part(settings: Settings) -> Part:
    """Every entry of Table 1 and of the other exact witnesses; no sampling."""
    found = Part()
    _table_1(found)
    _proposition_1(found)
    _schur(found)
    _proposition_3(found)
    _remark_c3(found)
    return found


def _table_1(found: Part) -> None:
    import pandas as pd

    paper = published("attention", "table-1")
    lines = []
    for metric in ("cosine", "jensen_shannon", "euclidean", "aitchison"):
        values = {
            (policy, pair): float(dissimilarity(P, other, metric, 0, policy))
            for policy in ("keep", "drop")
            for pair, other in (("pq", Q), ("pr", R))
        }
        for (policy, pair), value in values.items():
            entry = paper[f"{metric}/{policy}/{pair}"]
            shown = 1 - value if metric == "cosine" else value  # the table prints cosine as a similarity
            found.checks.append(
                exact("Table 1", f"{TITLE[metric]}, sink {policy}, {pair[0]} to {pair[1]}", entry, shown)
            )
        closer = {
            policy: "q" if values[policy, "pq"] < values[policy, "pr"] else "r" for policy in ("keep", "drop")
        }
        told = {policy: paper[f"{metric}/{policy}/pq"].more["closer"] for policy in closer}
        verdict = "reversal" if closer["keep"] != closer["drop"] else "stable"
        agrees = closer == told and verdict == paper[f"{metric}/keep/pq"].more["verdict"]
        said = f"{told['keep']}, then {told['drop']}"
        found.checks.append(holds("Table 1", f"{TITLE[metric]}, closer to p", said, float(agrees), least=1))
        # Dominance: a subcomposition may not lie farther apart than the whole.
        excess = values["drop", "pr"] - values["keep", "pr"]
        violated = metric != "aitchison"
        limits = {"least": 1e-3} if violated else {"most": 1e-14}
        said = "violated" if violated else "kept"
        found.checks.append(holds("Table 1", f"{TITLE[metric]}, dominance on (p, r)", said, excess, **limits))
        lines += [
            (metric, policy, pair, value, closer[policy], verdict) for (policy, pair), value in values.items()
        ]
    columns = ["metric", "policy", "pair", "value", "closer", "verdict"]
    found.tables["witness"] = pd.DataFrame(lines, columns=columns)


def _proposition_1(found: Part) -> None:
    paper = published("attention", "prose")
    p, q = np.array([0.95, 0.025, 0.025]), np.array([0.5, 0.4995, 0.0005])
    first, second = split_entropy(p), split_entropy(q)
    item = "Proposition 1"
    for name, value in {
        "total/P": first.total,
        "total/Q": second.total,
        "content/Q": second.content,
        "content/Q/rounded": second.content,
        "dispersion/P": content_dispersion(p),
        "dispersion/Q": content_dispersion(q),
    }.items():
        found.checks.append(exact(item, name, paper[f"proposition-1/{name}"], float(value)))
    found.checks.append(holds(item, "H(P') − log 2", "0", abs(first.content - math.log(2)), most=1e-15))
    inverted = first.total < second.total and first.content > second.content
    found.checks.append(holds(item, "H(P) < H(Q) and H(P') > H(Q')", "holds", float(inverted), least=1))


def _schur(found: Part) -> None:
    paper = published("attention", "prose")
    x = np.array([[0.800, 0.199, 0.001], [0.780, 0.219, 0.001]])
    values = {"entropy": entropy(x), "norm": np.linalg.norm(clr(x), axis=-1)}
    for name, (p, q) in values.items():
        found.checks.append(exact("Remark 1 (Schur)", f"{name} of p", paper[f"schur/{name}/p"], p))
        found.checks.append(exact("Remark 1 (Schur)", f"{name} of q", paper[f"schur/{name}/q"], q))
    partial = np.cumsum(-np.sort(-x, axis=-1), axis=-1)
    margin = float((partial[0] - partial[1]).min())
    found.checks.append(
        holds("Remark 1 (Schur)", "p majorizes q: least partial-sum gap", "≥ 0", margin, least=-1e-15)
    )


def _proposition_3(found: Part) -> None:
    """The three distances of the witness in closed form, and single and complete linkage at K = 2."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    paper, item = published("attention", "prose"), "Proposition 3"
    rows = np.stack([P, Q, R])
    place = {"pq": (0, 1), "pr": (0, 2), "qr": (1, 2)}
    squares, cosines = pairwise(rows, "euclidean") ** 2, 1 - pairwise(rows, "cosine")
    for pair, at in place.items():
        entry = paper[f"proposition-3/square/{pair}"]
        found.checks.append(exact(item, f"‖·‖² of {pair}, in 1/2500", entry, round(2500 * squares[at], 10)))
        entry = paper[f"proposition-3/cosine/{pair}"]
        root = math.sqrt(math.prod(entry.more["over_root"]))
        found.checks.append(
            exact(
                item,
                f"cosine of {pair}, over √{entry.more['over_root']}",
                entry,
                round(root * cosines[at], 9),
            )
        )
    kept = {"p": 0, "q": 1, "r": 2}
    for metric in CLASSICAL:
        for method in ("single", "complete"):
            for policy, together in (("keep", "pr"), ("drop", "pq")):
                matrix = pairwise(rows, metric, 0, policy)
                labels = fcluster(linkage(squareform(matrix, checks=False), method), 2, "maxclust")
                a, b = (labels[kept[name]] for name in together)
                alone = labels[kept[({"p", "q", "r"} - set(together)).pop()]]
                right = a == b != alone
                said = f"{{{together[0]}, {together[1]}}} together"
                found.checks.append(
                    holds(
                        item, f"{TITLE[metric]}, {method} linkage, sink {policy}", said, float(right), least=1
                    )
                )


def _remark_c3(found: Part) -> None:
    """N₁(v) = ‖clr v‖₁ fails the parallelogram law."""
    paper = published("attention", "prose")
    u, v = np.array([1.0, -1, 0, 0]), np.array([1.0, 0, -1, 0])
    size = {name: float(np.abs(x).sum()) for name, x in (("u", u), ("v", v), ("u+v", u + v), ("u-v", u - v))}
    size["left"] = size["u+v"] ** 2 + size["u-v"] ** 2
    size["right"] = 2 * size["u"] ** 2 + 2 * size["v"] ** 2
    for name, value in size.items():
        found.checks.append(exact("Remark C.3", f"N₁, {name}", paper[f"remark-c3/{name}"], value))

"""Do the clusters of a model's heads, and the block they are known for, survive dropping the sink?

    study = taxonomy_study(log_signatures, sink=[0, 127], protocol=CLARK, roles={"cls": [0], "sep": [127]})
    study.results["between_conventions"]["jensen_shannon"]["mean"], study.results["blocks"]["sep"]

Two named protocols. `table-5`: five dissimilarities, encoder rows of queries 0 to 63 on the first 64 keys
(causal models: the main protocol's rows), sink [CLS] or the first key, average linkage, mean over K of 4, 6
and 8. `clark`: the whole 128 keys of [CLS] … [SEP], sink set {CLS, SEP}, K of 4, 5, 6 and 8, and how well the
heads with most of their mass on SEP (or CLS) are found again as one cluster.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.3 (1), Tables 5 and 9, E.3, E.6 (1).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.errors import InputError, PerpendError, unknown_name
from perpend.studies import taxonomy
from perpend.studies.result import Study
from perpend.studies.reversal import matrices

if TYPE_CHECKING:
    import pandas as pd

CLASSICAL = ("cosine", "jensen_shannon", "euclidean")
POLICIES = ("keep", "drop")
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Protocol:
    """What is surveyed and how it is cut. Of an encoder; a causal model is read by the main protocol's rows.

    `window` None: all keys; `queries` None: all. `sink`: the roles that make the sink, in an encoder.
    """

    name: str
    sequences: int
    length: int
    window: int | None
    queries: tuple[int, int] | None
    sink: tuple[str, ...]
    clusters: tuple[int, ...]
    linkage: str = "average"
    words: str = ""


TABLE_5 = Protocol(
    "table-5",
    sequences=1000,
    length=128,
    window=64,
    queries=(0, 64),
    sink=("cls",),
    clusters=(4, 6, 8),
    words="five dissimilarities, queries 0 to 63 on the first 64 keys, average linkage, mean over K",
)
CLARK = Protocol(
    "clark",
    sequences=512,
    length=128,
    window=None,
    queries=None,
    sink=("cls", "sep"),
    clusters=(4, 5, 6, 8),
    words="all keys of sequences [CLS] … [SEP], sink set {CLS, SEP}, average linkage",
)
PROTOCOLS = {protocol.name: protocol for protocol in (TABLE_5, CLARK)}


def protocol_named(name: str) -> Protocol:
    """The protocol of that name; InputError with the known ones otherwise."""
    if name not in PROTOCOLS:
        raise unknown_name("taxonomy protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


class TaxonomyStudy(Study):
    """Clusters of heads under both conventions."""


def taxonomy_study(
    log_signatures: np.ndarray,
    sink: Sequence[int],
    protocol: Protocol = TABLE_5,
    *,
    roles: Mapping[str, Sequence[int]] | None = None,
    summed: tuple[np.ndarray, np.ndarray] | None = None,
    replicates: Iterable[np.ndarray] = (),
    summed_replicates: Iterable[tuple[np.ndarray, np.ndarray]] = (),
) -> TaxonomyStudy:
    """Clusters of heads under both conventions, and the blocks of heads that attend to each role.

    log_signatures (layers, heads, keys): log-probabilities; heads without one (NaN) are left out. roles: name
    → keys; a head belongs to a role's block where these keys hold more than half of its signature. summed:
    (keep, drop) of `summed_jensen_shannon`, (heads, heads) in the same order, as a further metric.
    replicates, summed_replicates: signatures and summed divergences of resampled text, for 95 % intervals
    (quantiles over replicates); as many of one as of the other.

    Raises InputError with fewer heads than the smallest K, PerpendError where d_A⊥ is not the same entrywise.
    """
    import pandas as pd

    defined = np.isfinite(log_signatures).all(-1)
    index = [(int(layer), int(head)) for layer, head in np.argwhere(defined)]
    least = min(protocol.clusters)
    if len(index) < max(2, least):
        raise InputError(f"{len(index)} heads with a signature make no {least} clusters")
    rows, sink = log_signatures[defined], sorted(int(key) for key in sink)
    pairs = dict(matrices(rows, sink, taxonomy.METRICS))
    if not np.array_equal(*pairs["content"]):
        raise PerpendError("d_A⊥ differs between keep and drop, which it cannot: please report this")
    if summed is not None:
        if len(summed[0]) != len(index):
            raise InputError(f"the summed divergences are of {len(summed[0])} heads, not of {len(index)}")
        pairs["summed_jensen_shannon"] = summed
    cells = taxonomy.stability(pairs, clusters=protocol.clusters)
    shares = {name: np.exp(rows[:, list(keys)]).sum(1) for name, keys in (roles or {}).items()}
    blocks = {name: share > 0.5 for name, share in shares.items()}
    found, undefined = _blocks(pairs, blocks, protocol)
    drawn = [
        _replicate(each[defined], sink, roles or {}, protocol, other)
        for each, other in itertools.zip_longest(replicates, summed_replicates)
    ]
    results: dict[str, Any] = {
        "protocol": protocol.name,
        "heads": len(index),
        "sink": {"columns": sink, "signature_mass": float(np.exp(rows[:, sink]).sum(1).mean())},
        "linkage": protocol.linkage,
        "between_conventions": _between(cells, protocol, drawn),
        "majority": {name: int(block.sum()) for name, block in blocks.items()},
        "blocks": found,
    }
    for record in (r for records in found.values() for r in records):
        key = ("block", record["role"], record["metric"], record["clusters"], record["policy"])
        _interval(record, [each[key] for each in drawn if key in each])
    return TaxonomyStudy(
        results,
        {
            "taxonomy": cells,
            "blocks": pd.DataFrame(
                [r for records in found.values() for r in records],
                columns=["role", "metric", "policy", "clusters", "jaccard", "cluster_size"]
                + (["low", "high"] if drawn and found else []),
            ),
            "heads": _heads(index, pairs, shares, protocol),
        },
        {
            f"{metric}_{policy}": distances
            for metric, pair in pairs.items()
            for policy, distances in zip(POLICIES, pair)
            if metric != "content" or policy == "keep"
        }
        | {"signatures": log_signatures},
        _findings(results, undefined),
        undefined,
    )


def best_cluster(block: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Jaccard index of a set of heads (heads,) bool with its best-matching cluster, and that cluster's size.

    Raises InputError for a block of fewer than two heads: one head matches any small cluster well.
    """
    if block.sum() < 2:
        raise InputError(f"a block of {int(block.sum())} heads has no cluster to match; it needs two")
    best, size = 0.0, 0
    for label in np.unique(labels):
        inside = labels == label
        value = float((block & inside).sum() / (block | inside).sum())
        if value > best:
            best, size = value, int(inside.sum())
    return best, size


def _blocks(
    pairs: Pairs, blocks: Mapping[str, np.ndarray], protocol: Protocol
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    found: dict[str, list[dict[str, Any]]] = {}
    undefined = {}
    for role, block in blocks.items():
        if block.sum() < 2:
            count = int(block.sum())
            undefined[f"{role}_block"] = (
                f"{'one head has' if count else 'no head has'} most of its signature on {role.upper()}, "
                "and a block that can be found again needs two"
            )
            continue
        found[role] = []
        for metric, pair in pairs.items():
            for policy, distances in zip(POLICIES, pair):
                tree = taxonomy.merges(distances, protocol.linkage)
                for k in protocol.clusters:
                    if k <= len(block):
                        jaccard, size = best_cluster(block, taxonomy.cut(tree, k))
                        found[role].append(
                            {
                                "role": role,
                                "metric": metric,
                                "policy": policy,
                                "clusters": k,
                                "jaccard": jaccard,
                                "cluster_size": size,
                            }
                        )
    return found, undefined


def _replicate(
    rows: np.ndarray,
    sink: Sequence[int],
    roles: Mapping[str, Sequence[int]],
    protocol: Protocol,
    summed: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[tuple[Any, ...], float]:
    """The ARI and Jaccard indices of one resample of the text, by what they are of."""
    found: dict[tuple[Any, ...], float] = {}
    blocks = {name: np.exp(rows[:, list(keys)]).sum(1) > 0.5 for name, keys in roles.items()}
    pairs = dict(matrices(rows, sink, taxonomy.METRICS))
    if summed is not None:
        pairs["summed_jensen_shannon"] = summed
    for metric, pair in pairs.items():
        trees = [taxonomy.merges(distances, protocol.linkage) for distances in pair]
        values = []
        for k in protocol.clusters:
            if k > len(rows):
                continue
            labels = [taxonomy.cut(tree, k) for tree in trees]
            values.append(taxonomy.adjusted_rand(*labels))
            found["ari", metric, k] = values[-1]
            for role, block in blocks.items():
                if block.sum() >= 2:
                    for policy, each in zip(POLICIES, labels):
                        found["block", role, metric, k, policy] = best_cluster(block, each)[0]
        found["mean", metric] = float(np.mean(values))
    return found


def _between(cells: pd.DataFrame, protocol: Protocol, drawn: list[dict[tuple[Any, ...], float]]) -> Any:
    """Metric → mean over K of the ARI, each K's, and intervals."""
    own = cells[cells["linkage"] == protocol.linkage]
    found = {}
    for metric, group in own.groupby("metric", sort=False):
        record: dict[str, Any] = {
            "mean": float(group["ari"].mean()),
            "by_clusters": {str(k): float(v) for k, v in zip(group["clusters"], group["ari"])},
        }
        _interval(record, [each["mean", metric] for each in drawn if ("mean", metric) in each])
        found[metric] = record
    return found


def _interval(record: dict[str, Any], values: Sequence[float]) -> None:
    if len(values) > 1:
        low, high = np.quantile(values, [0.025, 0.975])
        record |= {"low": float(low), "high": float(high)}


def _heads(
    index: Sequence[tuple[int, int]], pairs: Pairs, shares: Mapping[str, np.ndarray], protocol: Protocol
) -> pd.DataFrame:
    """One row a head: its share on each role, its place on a plane and its cluster, by metric and policy."""
    import pandas as pd

    columns: dict[str, Any] = {"layer": [i for i, _ in index], "head": [j for _, j in index]}
    columns |= {f"{role}_share": share for role, share in shares.items()}
    middle = [k for k in protocol.clusters if k <= len(index)]
    k = 6 if 6 in middle else middle[-1]
    for metric, pair in pairs.items():
        for policy, distances in zip(POLICIES, pair):
            places = taxonomy.plane(distances)
            columns |= {f"{metric}_{policy}_x": places[:, 0], f"{metric}_{policy}_y": places[:, 1]}
            labels = taxonomy.cut(taxonomy.merges(distances, protocol.linkage), k)
            columns[f"{metric}_{policy}_cluster"] = labels
    return pd.DataFrame(columns)


def _findings(results: Mapping[str, Any], undefined: Mapping[str, str]) -> list[str]:
    def told(record: Mapping[str, Any], name: str = "mean") -> str:
        interval = f" ({record['low']:.2f} to {record['high']:.2f})" if "low" in record else ""
        return f"{record[name]:.2f}{interval}"

    aris = results["between_conventions"]
    known = any("low" in record for record in aris.values())
    lines = [
        "Adjusted Rand index between clusters with and without the sink, mean over K, average linkage"
        + (" (95 % over resampled text)" if known else "")
        + ": "
        + ", ".join(f"{metric.replace('_', '-')} {told(record)}" for metric, record in aris.items())
        + f". The sink takes {results['sink']['signature_mass']:.1%} of a head's signature."
    ]
    if results["majority"]:
        lines.append(
            f"Of {results['heads']} heads, "
            + " and ".join(
                f"{n or 'none'} give{'s' if n < 2 else ''} most of the signature to {role.upper()}"
                for role, n in results["majority"].items()
            )
            + "."
        )
    for role, records in results["blocks"].items():
        for metric in ("jensen_shannon", "content"):
            parts = []
            for policy in POLICIES if metric != "content" else ("keep",):
                own = [r for r in records if r["metric"] == metric and r["policy"] == policy]
                values = [r["jaccard"] for r in own]
                ends = ""
                if own and "low" in own[0]:
                    ends = (
                        f" (95 % within {min(r['low'] for r in own):.2f}–{max(r['high'] for r in own):.2f})"
                    )
                parts.append(
                    f"{min(values):.2f}–{max(values):.2f}{ends}"
                    + {"keep": " with the sink", "drop": " without it"}[policy] * (metric != "content")
                )
            lines.append(
                f"The {role.upper()} block is found again by {metric.replace('_', '-')} clusters at a "
                f"Jaccard index of {' and '.join(parts)}, over K."
            )
    lines += [f"{name.replace('_', ' ')}: undefined, {why}." for name, why in undefined.items()]
    return lines

"""What an audit found, in sentences, each with its interval where the survey's run gives one."""

from __future__ import annotations

from typing import Any

from perpend.studies.resampling import said


def findings(results: dict[str, Any]) -> list[str]:
    """The findings of `audit_signatures`' results."""
    rival, channel, hot = results["rivals"], results["content"], results["temperature_worst"]
    known = results["intervals"]

    def told(name: str, value: float | None, form: str = ".1%") -> str:
        return said(known.get(name, {"value": value}), form)

    lines = [
        "Keys below 1e-6 in either head carry "
        f"{told('tail/1e-06', results['tail']['1e-06']['share'], '.2%')} of squared d_A⊥ "
        "over all pairs of heads.",
        "Hellinger and Fisher-Rao verdicts "
        f"{'coincide' if rival['verdicts_identical'] else 'do NOT coincide'}, ties included; "
        f"{told('rivals/hellinger', rival['hellinger'])} reverse when the sink is dropped.",
        "Hellinger on content picks the nearest neighbour of dropped-row JS for "
        f"{told('rivals/hellinger_content_neighbours', rival['hellinger_content_neighbours'])} of heads; "
        "prune sets overlap with a Jaccard index of at least "
        f"{min(rival['hellinger_content_prune_sets'].values()):.2f}.",
        "With the sink gone, JS and d_A⊥ have a rank correlation of "
        f"{told('content/spearman', channel['spearman'], '.3f')} and agree on "
        f"{told('content/neighbours', channel['neighbours'])} of nearest neighbours; their taxonomies have "
        f"an adjusted Rand index of {told('content/cross_ari', channel['cross_ari'], '.2f')}.",
        "Over temperatures, dropped-row JS flips up to "
        f"{told('temperature_worst/jensen_shannon/flips', hot['jensen_shannon']['flips'])} of verdicts and "
        "keeps at least "
        f"{told('temperature_worst/jensen_shannon/retention', hot['jensen_shannon']['retention'])} of its "
        "prune set; d_A⊥ "
        + ("changes nothing." if hot["content"]["identical"] else "CHANGES, which it must not."),
    ]
    both = results["aggregation"]
    if both["arithmetic"]:
        gap = max(abs(both["arithmetic"][m] - both["aitchison"][m]) for m in both["aitchison"])
        native, mean = (
            told(f"aggregation/{kind}/jensen_shannon", both[kind]["jensen_shannon"])
            for kind in ("arithmetic", "aitchison")
        )
        lines.append(
            f"On arithmetic means JS verdicts reverse in {native} of triples, on Aitchison means in {mean}; "
            f"over metrics the two differ by {gap:.3f} at most."
        )
    sets = results["sink_set"]
    if sets:
        js, own = (told(f"sink_set/{metric}", sets[metric]) for metric in ("jensen_shannon", "content"))
        lines.append(
            f"Four sink keys instead of {len(sets['small'])}: {js} of dropped-row JS verdicts and {own} of "
            f"d_A⊥ verdicts flip; the content distance grew in {sets['violations']} of {sets['pairs']} pairs "
            f"(it cannot), JS in {sets['violations_jensen_shannon']} (it may)."
        )
    clusters = results["taxonomy"]["between_conventions"]
    if clusters:
        lines.append(
            "Clusters kept against dropped, adjusted Rand index (average linkage, mean over K): "
            + ", ".join(f"{m} {told(f'taxonomy/{m}', value, '.2f')}" for m, value in clusters.items())
            + "."
        )
    seen = results["witness"]
    if seen["triple"]:
        names = ", ".join(f"{n} = L{seen['triple'][n][0]} H{seen['triple'][n][1]}" for n in "pqr")
        lines.append(
            "Cosine, JS and Euclidean reverse all at once on "
            f"{told('witness/share', seen['share'])} of triples; most sharply on {names}."
        )
    return lines

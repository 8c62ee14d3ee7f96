"""Every metric of the registry: laws, exactness, matrix. A new metric file inherits all of this."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

import perpend.geometry as g
from geometry.strategies import METRICS, POLICIES, SEEDS, options, rows, softmax, weights
from perpend.errors import InputError
from perpend.geometry.laws import LAWS, Draw
from perpend.geometry.metrics import jensen_shannon


def excess(name: str, law: str, draws: int) -> float:
    """The worst relative violation over rational draws of 3, 4 and 6 parts."""
    metric = g.METRICS[name]
    worst = 0.0
    for parts, weight in product((3, 4, 5), weights(name)):
        draw = Draw.random(draws, parts, seed=parts, needs_sink=metric.needs_sink)
        delta = lambda p, q, w=weight: g.dissimilarity(  # noqa: E731
            p, q, name, sink=0 if metric.needs_sink else None, weight=w
        )
        worst = max(worst, float(LAWS[law].excess(delta, draw).max()))
    return worst


@pytest.mark.parametrize(("name", "law"), [*product(METRICS, LAWS)])
def test_a_declared_law_holds_and_any_other_fails(name, law):
    if law in g.METRICS[name].laws:
        assert excess(name, law, 400) < 1e-10
    else:
        assert excess(name, law, 300) > 1e-2


# --- values against exact and independent ones ---


def oracle(name: str, p: np.ndarray, q: np.ndarray) -> float:
    """The definition, word by word, in 60 digits, on the exact values of the floats."""
    with mpmath.workdps(60):
        x, y = ([mpmath.mpf(float(v)) for v in row] for row in (p, q))
        x, y = ([v / sum(row) for v in row] for row in (x, y))
        pairs = list(zip(x, y))
        if name == "cosine":
            dot = sum(a * b for a, b in pairs)
            return float(1 - dot / mpmath.sqrt(sum(a * a for a in x) * sum(b * b for b in y)))
        if name == "jensen_shannon":
            value = mpmath.mpf(0)
            for a, b in pairs:
                m = (a + b) / 2
                value += (a * mpmath.log(a / m) if a else 0) + (b * mpmath.log(b / m) if b else 0)
            return float(value / 2)
        if name == "euclidean":
            return float(mpmath.sqrt(sum((a - b) ** 2 for a, b in pairs)))
        if name in ("hellinger", "fisher_rao"):
            bc = sum(mpmath.sqrt(a * b) for a, b in pairs)
            return float(mpmath.sqrt(1 - bc) if name == "hellinger" else 2 * mpmath.acos(bc))
        ratios = [mpmath.log(a) - mpmath.log(b) for a, b in pairs]
        content = ratios[1:]
        mean = sum(content) / len(content)
        inside = sum((v - mean) ** 2 for v in content)
        balance = (len(p) - 1) * (ratios[0] - mean) ** 2 / len(p)
        weight = {"content": 0, "aitchison": 1, "aitchison_weighted": weights("aitchison_weighted")[0]}[name]
        return float(mpmath.sqrt(inside + weight * balance))


@settings(max_examples=40, deadline=None)
@given(rows(2, least=3, most=8, spread=6))
def test_values_agree_with_the_definitions_in_sixty_digits(x):
    p, q = x
    noise = 4 * np.finfo(float).eps * (1 + np.abs(np.log(x)).max())  # what the rows' own rounding allows
    for name in METRICS:
        expected = oracle(name, p, q)
        root = name not in ("cosine", "jensen_shannon")
        slack = noise if root else noise * (noise + 2 * math.sqrt(expected))
        assert g.dissimilarity(p, q, **options(name)) == pytest.approx(expected, rel=1e-12, abs=slack), name


@pytest.mark.parametrize("step", [1e-3, 1e-6, 1e-9, 1e-12])
def test_jensen_shannon_of_nearly_equal_rows_keeps_its_digits(step):
    p = np.array([0.5, 0.25, 0.125, 0.125])
    q = p + step * np.array([1, -1, 0.5, -0.5])  # sums to one in binary up to one rounding
    value = g.dissimilarity(p, q, "jensen_shannon")
    assert value == pytest.approx(oracle("jensen_shannon", p, q), rel=1e-3 if step < 1e-10 else 1e-6)
    matrix = g.pairwise(np.stack([p, q]), "jensen_shannon")
    assert matrix[0, 1] == pytest.approx(value, rel=1e-12)
    assert value > 0


def test_jensen_shannon_at_disjoint_and_far_rows():
    assert g.dissimilarity(np.array([1.0, 0.0]), np.array([0.0, 1.0]), "jensen_shannon") == pytest.approx(
        math.log(2)
    )
    for tiny in (1e-8, 1e-15, 1e-17, 1e-300):
        p, q = np.array([1 - tiny, tiny]), np.array([tiny, 1 - tiny])
        expected = oracle("jensen_shannon", p, q)
        assert g.dissimilarity(p, q, "jensen_shannon") == pytest.approx(expected, rel=1e-13)
        assert g.pairwise(np.stack([p, q]), "jensen_shannon")[0, 1] == pytest.approx(expected, rel=1e-13)


def test_the_table_1_witness_digit_for_digit():
    """All 16 entries; cosine is printed as the similarity."""
    p, q, r = np.array([0.9, 0.08, 0.02]), np.array([0.7, 0.24, 0.06]), np.array([0.9, 0.02, 0.08])
    printed = {
        "cosine": "0.9693 0.9956 1.0000 0.4706",
        "jensen_shannon": "0.0324 0.0193 0.0000 0.1927",
        "euclidean": "0.2592 0.0849 0.0000 0.8485",
        "aitchison": "1.1022 1.9605 0.0000 1.9605",
    }
    for name, line in printed.items():
        values = [g.dissimilarity(p, x, name, sink=0, policy=policy) for policy in POLICIES for x in (q, r)]
        shown = [1 - v if name == "cosine" else v for v in values]
        assert " ".join(f"{v:.4f}" for v in shown) == line
    # Proposition 3 in rationals: ‖p−r‖² = 18/2500 < ‖p−q‖² = 168/2500 < ‖q−r‖² = 222/2500.
    exact = [
        [Fraction(9, 10), Fraction(2, 25), Fraction(1, 50)],
        [Fraction(7, 10), Fraction(6, 25), Fraction(3, 50)],
    ]
    exact.append([Fraction(9, 10), Fraction(1, 50), Fraction(2, 25)])
    square = lambda a, b: sum((x - y) ** 2 for x, y in zip(exact[a], exact[b]))  # noqa: E731
    assert [square(0, 2), square(0, 1), square(1, 2)] == [Fraction(n, 2500) for n in (18, 168, 222)]
    matrix = g.pairwise(np.stack([p, q, r]), "euclidean")
    np.testing.assert_allclose(
        matrix[[0, 0, 1], [2, 1, 2]] ** 2, [18 / 2500, 168 / 2500, 222 / 2500], rtol=1e-13
    )


@pytest.mark.parametrize("name", METRICS)
def test_gradients_agree_with_differences(name):
    logits = torch.randn(
        4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    for policy in POLICIES:
        pairs = torch.triu_indices(4, 4, 1)

        def upper(x, policy=policy, pairs=pairs):
            return g.pairwise(torch.softmax(x, -1), **options(name, policy))[pairs[0], pairs[1]]

        def single(x, policy=policy):
            return g.dissimilarity(x[:2], x[2:], **options(name, policy), log=True)

        # The grid of 46 bits makes differences of Hellinger rough; a wider step goes over it.
        step = 1e-4 if name in ("hellinger", "fisher_rao") else 1e-6
        assert torch.autograd.gradcheck(upper, logits, eps=step, atol=1e-4)
        assert torch.autograd.gradcheck(single, logits, eps=step, atol=1e-4)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_orders_like_another_does_so_for_all_pairs(name):
    like = g.METRICS[name].orders_like
    if like is None:
        return
    generator = np.random.default_rng(5)
    tight = np.exp(generator.normal(0, 1e-7, (300, 6)))  # distances that differ in their last digits
    for x in (tight / tight.sum(-1, keepdims=True), softmax(generator.normal(0, 3, (300, 6)))):
        first, second = (
            np.unique(g.pairwise(x, n)[np.triu_indices(300, 1)], return_inverse=True) for n in (name, like)
        )
        np.testing.assert_array_equal(first[1], second[1])


@settings(max_examples=50, deadline=None)
@given(rows(3, least=3), SEEDS)
def test_content_verdicts_are_the_same_with_the_sink_kept_and_dropped(x, seed):
    size = int(np.random.default_rng(seed).integers(1, x.shape[-1] - 1))
    for sink in (0, list(range(size))):
        keep = g.pairwise(x, "content", sink=sink)
        np.testing.assert_array_equal(keep, g.pairwise(x, "content", sink=sink, policy="drop"))
        np.testing.assert_array_equal(keep, g.pairwise(x, "aitchison", sink=sink, policy="drop"))
        scale = 1 + np.abs(g.clr(x)).max()
        np.testing.assert_allclose(keep[0, 1], g.content_distance(x[0], x[1], sink), atol=1e-13 * scale)
        re_closed = g.pairwise(g.content(x, sink), "aitchison")
        np.testing.assert_allclose(keep, re_closed, rtol=1e-7, atol=1e-12 * scale)


@settings(max_examples=50, deadline=None)
@given(rows(4, least=3), st.floats(0, 100))
def test_the_weighted_family_runs_from_content_to_full_distance(x, weight):
    scale = 1 + np.abs(g.clr(x)).max()
    close = {"rtol": 1e-9, "atol": 1e-12 * scale}
    member = lambda w, sink=0: g.pairwise(x, "aitchison_weighted", sink=sink, weight=w)  # noqa: E731
    np.testing.assert_allclose(member(0), g.pairwise(x, "content", sink=0), **close)
    np.testing.assert_allclose(member(1), g.pairwise(x, "aitchison"), **close)
    balance = g.sink_balance(x)
    expected = member(0) ** 2 + weight * (balance[:, None] - balance) ** 2
    np.testing.assert_allclose(member(weight) ** 2, expected, rtol=1e-8, atol=1e-12 * scale**2)


def test_padding_with_epsilon_breaks_dominance_beyond_three_parts():
    """Appendix C: the witness padded by k parts of ε, for JS, Euclid and cosine at any D > 3."""
    p, r = np.array([0.9, 0.08, 0.02]), np.array([0.9, 0.02, 0.08])
    for k in (1, 4, 30):
        epsilon = 1e-4 / k
        pad = lambda x, k=k, e=epsilon: np.append((1 - k * e) * x, np.full(k, e))  # noqa: E731
        for name in ("cosine", "jensen_shannon", "euclidean", "hellinger", "fisher_rao"):
            whole = g.dissimilarity(pad(p), pad(r), name)
            part = g.dissimilarity(g.closure(pad(p)[1:3]), g.closure(pad(r)[1:3]), name)
            assert part > 2 * whole, name
        assert g.aitchison_distance(p[1:], r[1:]) <= g.aitchison_distance(pad(p), pad(r)) * (1 + 1e-15)


@pytest.mark.slow
def test_the_js_matrix_is_faster_than_scipy():
    """A sixth of the benchmark's size; the margin asked of the benchmark is 5 ×, shown there."""
    import time

    x = softmax(np.random.default_rng(0).normal(size=(800, 64)))

    def clock(function) -> float:
        times = []
        for _ in range(2):
            start = time.process_time()
            function()
            times.append(time.process_time() - start)
        return min(times)

    ours, theirs = clock(lambda: g.pairwise(x, "jensen_shannon")), clock(lambda: cdist(x, x, "jensenshannon"))
    assert ours * 2 < theirs
    np.testing.assert_allclose(
        g.pairwise(x[:200], "jensen_shannon"),
        cdist(x[:200], x[:200], "jensenshannon") ** 2,
        rtol=1e-6,
        atol=1e-15,
    )


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(2, 150), st.integers(2, 70))
def test_blocks_of_any_shape_cover_the_js_matrix(seed, count, parts):
    x = softmax(np.random.default_rng(seed).normal(size=(count, parts)))
    np.testing.assert_allclose(
        g.pairwise(x, "jensen_shannon"), cdist(x, x, "jensenshannon") ** 2, rtol=1e-6, atol=1e-14
    )


def test_small_js_values_come_from_the_exact_formula():
    """The guard of the precision above: without it the fast formula loses what the exact one keeps."""
    p = np.array([[0.5, 0.25, 0.25], [0.5, 0.25 + 1e-9, 0.25 - 1e-9]])
    expected = oracle("jensen_shannon", *p)
    assert g.pairwise(p, "jensen_shannon")[0, 1] == pytest.approx(expected, rel=1e-6)
    half = torch.from_numpy(p) / 2
    fast = (half * torch.from_numpy(p).log()).sum() - ((m := half.sum(0)) * m.log()).sum()
    assert abs(float(fast) - expected) > 0.1 * expected
    assert expected < jensen_shannon.EXACT_BELOW


# --- what is refused ---


def test_what_cannot_be_compared_is_refused():
    x = np.full((3, 4), 0.25)
    with pytest.raises(InputError, match="did you mean 'jensen_shannon'"):
        g.pairwise(x, "jenson_shannon")
    with pytest.raises(InputError, match="pass sink=0"):
        g.pairwise(x, "content")
    with pytest.raises(InputError, match="needs to know the sink"):
        g.pairwise(x, "cosine", policy="drop")
    with pytest.raises(InputError, match="unknown sink policy 'mask'"):
        g.pairwise(x, "cosine", sink=0, policy="mask")
    with pytest.raises(InputError, match="needs a weight"):
        g.pairwise(x, "aitchison_weighted", sink=0)
    with pytest.raises(InputError, match="needs a weight"):
        g.pairwise(x, "aitchison_weighted", sink=0, weight=-1.0)
    with pytest.raises(InputError, match="takes no weight"):
        g.pairwise(x, "cosine", weight=1.0)
    with pytest.raises(InputError, match=r"\(\.\.\., n, parts\)"):
        g.pairwise(x[0], "cosine")
    with pytest.raises(InputError, match="common support"):
        g.dissimilarity(x, x[:, :3], "aitchison")
    for name in ("cosine", "jensen_shannon", "euclidean", "hellinger", "fisher_rao"):
        with pytest.raises(InputError, match="3 rows that do not sum to one"):
            g.pairwise(2 * x, name)
    for name in ("aitchison", "content", "aitchison_weighted"):
        np.testing.assert_allclose(g.pairwise(2 * x, **{**options(name), "sink": 0}), 0)
        broken = x.copy()
        broken[1, 2] = 0
        with pytest.raises(InputError, match=r"1 zero \(first at index \(1, 2\)\).*replace_zeros"):
            g.pairwise(broken, **{**options(name), "sink": 0})


# --- one file a metric, and what the docs say of them ---


def test_a_file_is_a_metric(tmp_path, monkeypatch):
    from perpend.geometry import metrics

    (tmp_path / "chebyshev.py").write_text(
        "from perpend.geometry.metrics import Metric, METRICS\n"
        "euclid = METRICS['euclidean']\n"
        "METRIC = Metric('chebyshev', 'Chebyshev', euclid.between, euclid.matrix, frozenset({'triangle'}))\n"
    )
    (tmp_path / "misnamed.py").write_text("from perpend.geometry.metrics.cosine import METRIC\n")
    monkeypatch.setattr(metrics, "__path__", [str(tmp_path), *metrics.__path__])
    with pytest.raises(ValueError, match=r"misnamed\.py must define METRIC named 'misnamed'"):
        metrics._discover()
    (tmp_path / "misnamed.py").unlink()
    assert metrics._discover().keys() == {*g.METRICS, "chebyshev"}


def test_the_documented_table_of_laws_is_the_registrys():
    page = (Path(__file__).parents[2] / "docs" / "method" / "geometry.md").read_text("utf-8")
    lines = [
        line.strip("| ").split("|")
        for line in page.split("## Laws")[1].split("## ")[0].splitlines()
        if "|" in line
    ]
    titles = {
        "Euclid": "euclidean",
        "JS": "jensen_shannon",
        "Fisher–Rao": "fisher_rao",
        "Hellinger": "hellinger",
    }
    titles |= {"cosine": "cosine", "d_A": "aitchison", "d_A⊥": "content"}
    axioms = {"A2": "perturbation", "A3": "powering", "A4": "parallelogram", "A5": "permutation"}
    laws = [axioms.get(cell.strip(), cell.strip()) for cell in lines[0]][-len(LAWS) :]
    assert set(laws) == set(LAWS)
    told = {}
    for name, *cells in lines[2:]:
        kept = {law for law, cell in zip(laws, cells, strict=True) if cell.strip() == "✓"}
        told |= {titles[title.strip()]: kept for title in name.split(",")}
    assert told == {n: set(m.laws) for n, m in g.METRICS.items() if not m.takes_weight}


def test_the_documented_example_runs():
    page = (Path(__file__).parents[2] / "docs" / "method" / "geometry.md").read_text("utf-8")
    names: dict = {}
    exec(page.split("```python")[1].split("```")[0], names)
    assert f"{names['aitchison_distance'](names['p'], names['q']):.4f}" == "1.1022"
    split = names["split_entropy"](names["p"])
    assert [f"{v:.3f}" for v in (split.total, split.binary, split.content)] == ["0.375", "0.325", "0.500"]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5)])
def test_no_rows_have_no_dissimilarities(metric: str, shape: tuple[int, ...]) -> None:
    (weight, *_) = weights(metric)
    found = g.pairwise(np.zeros(shape), metric, sink=0, weight=weight)
    assert found.shape == (*shape[:-1], shape[-2])

"""Results as Markdown: a table a job, growth, who cannot and why; and their place in the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from peers.jobs import Job, jobs
from peers.results import CONFIDENCE, ROOM, US, Result, by_length, ends, results

BEGIN, END = "<!-- begin: python benchmarks/run.py --write -->", "<!-- end -->"
GOAL = 1.1  # × the plain pass


def page(book: Mapping[str, Any]) -> str:
    """Everything that was measured, as Markdown."""
    done = results(book, jobs())
    if not done:
        return "Nothing has been measured yet."
    models = [cells for cells in done.values() if cells[0].job.sizes is None]
    others = [cells for cells in done.values() if cells[0].job.sizes is not None]
    parts = [_how(book, done), _verdict(done), *(_model_table(cells) for cells in models)]
    if growth := _growth(models):
        parts.append(growth)
    if others:
        parts.append(_rates(others))
    return "\n\n".join(parts)


def rewritten(text: str, part: str) -> str:
    """`text` with what stands between the two marks replaced. ValueError where the marks are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def _how(book: Mapping[str, Any], done: Mapping[str, Sequence[Result]]) -> str:
    machine = book["machine"]
    units = {True: "with bf16 units", False: "without bf16 units", None: "bf16 units unknown"}
    versions = ", ".join(f"{name} {number}" for name, number in sorted(book["versions"].items()))
    rounds = sorted({len(cell.rounds) for cells in done.values() for cell in cells})
    noise = next(iter(done.values()))[0].noise
    counted = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    kept = (
        "The allocator keeps what is freed."
        if machine["keeps_freed"]
        else "The allocator is left as it comes: it gives pages back after some passes and not after others, "
        "the plain one among the slower, so that ratios below 1 are its doing."
    )
    return (
        f"{machine['cores']} cores of {machine['processor']}, {units[machine['bf16']]}; fp32, one thread; "
        f"Python {machine['python']}, {versions}. Medians of {counted} alternating rounds, with quartiles "
        f"in the A/A row. {kept} Memory is measured in processes whose allocator gives back what is freed."
        "\n\n**Bold**: the first of those that do the job, and who is level with it. Level in time: the "
        f"median of its ratios to the first, round by round, is at most {noise:.1%} above 1, which is what "
        f"the plain pass differs by from itself in 19 of 20 cells; or its {CONFIDENCE:.0%} "
        "interval holds 1 or lies below (the sign test's, which needs six rounds; of fewer, "
        f"all are level). Level in memory, which hardly varies: within {ROOM:.0%} of the first, or within "
        "what the plain pass differs by from itself where that is more."
    )


def _verdict(done: Mapping[str, Sequence[Result]]) -> str:
    """How often perpend is first, and within the goal of the plain pass; where it is not, by job."""
    cells = [cell for cells in done.values() for cell in cells if US in cell.ranked]
    total, behind = _behind([cell.of_tools for cell in cells])
    _, of_all = _behind(cells)
    by_hand = {
        title: [told for told in cases if told not in behind.get(title, ())]
        for title, cases in of_all.items()
    }
    over: dict[str, list[str]] = {}
    for cell, what, values, _ in _comparisons(cells):
        if cell.job.sizes is None and values[US] > GOAL:
            over.setdefault(cell.job.title, []).append(f"{_where(cell, what)} ({values[US]:.2f})")
    missed = sum(map(len, behind.values()))
    text = (
        f"Of the tools, perpend is first, or level with the first, in {total - missed} of {total} comparisons"
    )
    text += ". It is not in:\n\n" + _bullets(behind) + "\n\n" if behind else ". "
    if over:
        text += f"It takes more than {GOAL} × the plain pass in:\n\n{_bullets(over)}"
    else:
        text += f"It stays within {GOAL} × the plain pass everywhere."
    if any(by_hand.values()):
        text += "\n\nHooks written by hand for this one model are ahead of it in:\n\n" + _bullets(by_hand)
    return text


Values = Mapping[str, float]


def _comparisons(cells: Iterable[Result]) -> Iterator[tuple[Result, str, Values, Sequence[str]]]:
    """What perpend is compared in: (cell, time or memory, its values, who is first or level)."""
    for cell in cells:
        for what, values, level in (
            ("time", cell.times, cell.quickest),
            ("memory", cell.memory, cell.leanest),
        ):
            if US in values:
                yield cell, what, values, level


def _behind(cells: Sequence[Result]) -> tuple[int, dict[str, list[str]]]:
    """How many comparisons there are, and by job those in which perpend is not level with the first."""
    total, behind = 0, {}
    for cell, what, values, level in _comparisons(cell for cell in cells if len(cell.ranked) > 1):
        total += 1
        if US not in level:
            first, ours = _apart(values[level[0]], values[US])
            told = f"{_where(cell, what)} ({level[0]} {first}, perpend {ours})"
            behind.setdefault(cell.job.title, []).append(told)
    return total, behind


def _where(cell: Result, what: str) -> str:
    return f"{what} at {_sizes(cell.sizes)}"


def _apart(low: float, high: float) -> tuple[str, str]:
    """Both to two decimals, to three where two do not tell them apart."""
    digits = 2 if f"{low:.2f}" != f"{high:.2f}" else 3
    return f"{low:.{digits}f}", f"{high:.{digits}f}"


def _bullets(cases: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f"- {title}: {'; '.join(told)}" for title, told in cases.items() if told)


def _order(job: Job) -> list[str]:
    return [job.baseline, job.again, *(name for name in job.contenders if name != job.baseline)]


def _label(job: Job, name: str) -> str:
    return f"{name} (A/A)" if name == job.again else name


def _model_table(cells: Sequence[Result]) -> str:
    """One row a contender: time and memory at each length, over the plain pass."""
    job, shown = cells[0].job, by_length(cells)
    rows = []
    for name in _order(job):
        values = [_time(cell, name) for cell in shown] + [_memory(cell, name) for cell in shown]
        if any(values):
            rows.append([_label(job, name), *(value or "–" for value in values)])
    lengths = [f"T = {cell.sizes['length']:,}" for cell in shown]
    heads = ["", *(f"time, {head}" for head in lengths), *(f"memory, {head}" for head in lengths)]
    layers = ", ".join(f"{cell.sizes['layers']} at T = {cell.sizes['length']:,}" for cell in shown)
    return f"### {job.title}\n\n{job.about} Layers: {layers}.\n\n{_table(heads, rows)}{_absent(cells)}"


def _time(cell: Result, name: str) -> str:
    times = cell.times
    if name not in times:
        return "failed" if name in cell.failed else ""
    if name == cell.job.baseline and name not in cell.gap:
        return f"1 ({_duration(cell.seconds(name))})"
    if name == cell.job.again:
        low, high = cell.quartiles(name)
        return f"{times[name]:.2f} ({low:.2f} to {high:.2f})"
    if cell.disagrees(name):
        return f"disagrees by {cell.gap[name]:.1g}"
    return _bold(f"{times[name]:.2f}", name in cell.quickest)


def _memory(cell: Result, name: str) -> str:
    memory = cell.memory
    if name not in memory or cell.disagrees(name):
        return ""
    if name == cell.job.baseline:
        return f"1 ({(cell.weights + cell.added[name]) / 2**20:.0f} MiB)"
    return _bold(f"{memory[name]:.2f}", name in cell.leanest)


def _growth(models: Sequence[Sequence[Result]]) -> str:
    """Seconds at the largest over seconds at the smallest of one size, the others equal."""
    axes = {"length": "T", "layers": "layers", "sequences": "sequences"}
    heads, rows = dict(axes), []
    for cells in models:
        job = cells[0].job
        lines = {axis: line for axis in axes if (line := ends(cells, axis))}
        for axis, (small, large) in lines.items():
            heads[axis] = f"{axes[axis]} {small.sizes[axis]:,} to {large.sizes[axis]:,}"
        for name in (name for name in _order(job) if name != job.again):
            row = [_grown(lines[axis], name) if axis in lines else "–" for axis in axes]
            if set(row) != {"–"}:
                rows.append([job.title, name, *row])
    if not rows:
        return ""
    about = "Time at the larger size over time at the smaller, the other sizes equal."
    return f"### Growth\n\n{about}\n\n{_table(['', '', *heads.values()], rows)}"


def _grown(line: tuple[Result, Result], name: str) -> str:
    low, high = (cell.seconds(name) for cell in line)
    return "–" if low is None or high is None else f"{high / low:.1f}"


def _rates(others: Sequence[Sequence[Result]]) -> str:
    """Jobs without a model: one row a contender and size, with how many of its unit a second."""
    rows, absent = [], []
    for cells in others:
        job = cells[0].job
        for cell in cells:
            for name in (name for name in _order(job) if name in cell.times):
                spent = cell.seconds(name)
                rate = f"{job.count(cell.sizes) / spent:,.0f} {job.unit}"
                row = [job.title, _sizes(cell.sizes), _label(job, name), _duration(spent)]
                rows.append([*row, _time(cell, name), rate])
        absent.append(_absent(cells))
    heads = ["", "", "", "time", "ratio", "a second"]
    return "### Distances, trees, masks\n\n" + _table(heads, rows) + "".join(dict.fromkeys(absent))


def _absent(cells: Sequence[Result]) -> str:
    """Who cannot do a job, and why; who failed at it, and with what words."""
    reasons = {name: why for name, why in cells[0].job.contenders.items() if isinstance(why, str)}
    for cell in cells:
        reasons |= {name: f"failed at {_sizes(cell.sizes)}: {why}" for name, why in cell.failed.items()}
    told = "; ".join(f"{name} ({why})" for name, why in reasons.items())
    return f"\n\nNot here: {told}." if told else ""


def _sizes(sizes: Mapping[str, int]) -> str:
    words = []
    for key, size in sizes.items():
        if key == "length":
            words.append(f"T = {size:,}")
        elif not (key == "sequences" and size == 1):
            words.append(f"{size:,} {key if size != 1 else key.rstrip('s')}")
    return ", ".join(words)


def _duration(spent: float) -> str:
    return f"{spent:.2f} s" if spent >= 1 else f"{1000 * spent:.3g} ms"


def _bold(text: str, is_first: bool) -> str:
    return f"**{text}**" if is_first else text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

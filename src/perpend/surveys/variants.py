"""What one pass over the text reads beside the main rows: other supports, weights, conventions, lengths.

Each variant is a survey of its own, with its own support and sums, taken from the same calls of the model:

    windows       the first W keys for several W, and how much of the whole row each holds
    value_weights rows weighted by ‖v_j‖ or ‖W_O^h v_j‖ before closure
    drop_both     rows of all queries but the sink's own (encoders and image models)

and two readings have forms of their own: `whole_rows` (all keys that a query sees), `row_sample` (single
rows). Without any of them the survey does what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from perpend.errors import InputError, PerpendError
from perpend.models.attention import AttentionCall, AttentionSite
from perpend.surveys.batches import Sequences
from perpend.surveys.blocks import finish, kept_rows
from perpend.surveys.capture import NO_DOUBLE, Capture, on_cpu
from perpend.surveys.places import Places, Reservoir
from perpend.surveys.supports import Support, plan_support
from perpend.surveys.whole_rows import WholeCapture, bin_edges


@dataclass(frozen=True)
class Extras:
    """What was asked for, as `survey_attention` takes it."""

    windows: tuple[int, ...] = ()
    drop_both: bool = False
    value_weights: tuple[str, ...] = ()
    whole_rows: str | tuple[int, ...] | None = None
    row_sample: int = 0
    seed: int = 0

    @property
    def any(self) -> bool:
        """Whether anything was."""
        return bool(
            self.windows or self.drop_both or self.value_weights or self.whole_rows or self.row_sample
        )


@dataclass(frozen=True)
class Variant:
    """One further survey: its name, its support, and what weighs its rows."""

    name: str
    support: Support
    weigh: Callable[[AttentionCall, int, int], Tensor] | None = None
    retained: bool = False


@dataclass(frozen=True)
class Plan:
    """The variants, the bins of whole rows, and the places whose rows are kept."""

    variants: tuple[Variant, ...] = ()
    edges: tuple[int, ...] | None = None
    sink: tuple[int, ...] = ()
    places: Places | None = None

    @property
    def retained(self) -> bool:
        """Whether a variant needs the log-sum-exp of whole rows."""
        return any(variant.retained for variant in self.variants)


def plan(
    extras: Extras,
    support: Support,
    data: Sequences,
    options: Mapping[str, Any],
    weights: Mapping[str, Any],
) -> Plan:
    """What a pass reads beside `support`; `options` are those of `plan_support`, without sink and window.

    Raises InputError for a window that does not fit, for value weights with a learned sink, for drop_both in
    a causal model, and for a sink without a fixed position.
    """
    if not extras.any:
        return Plan()
    if support.ragged:
        raise InputError(
            "sequences differ in length, so the sink has no fixed position: windows, value weights, whole "
            "rows and single rows need one (sink=cls)"
        )
    shared = {**options, "sink": support.rule}
    variants = [
        Variant(f"window-{width}", plan_support(**{**shared, "window": width}), retained=True)
        for width in extras.windows
    ]
    if len(set(extras.windows)) != len(extras.windows):
        raise InputError(f"the windows {list(extras.windows)} repeat one")
    if extras.drop_both:
        if support.causal:
            raise InputError(
                "drop-both is for encoders and image models: in a causal model the sink's own row is not "
                "among those of the support, so it is the same as dropping the column"
            )
        variants.append(Variant("drop-both", replace(support, without=support.sink)))
    if weights and support.virtual:
        raise InputError(
            "a learned sink logit has no value, so rows that hold it cannot be weighted by values; choose "
            "another, such as sink=first"
        )
    variants += [Variant(kind, support, weigh) for kind, weigh in weights.items()]
    length = int(options["length"])
    edges = None
    if extras.whole_rows is not None:
        edges = bin_edges(extras.whole_rows, length, support.first, support.last)
    places = None
    if extras.row_sample:
        places = choose_places(support, data, length, extras.row_sample, extras.seed)
    return Plan(tuple(variants), edges, () if support.virtual else support.sink, places)


def choose_places(support: Support, data: Sequences, length: int, size: int, seed: int) -> Places:
    """A seeded uniform sample of (sequence, query) among the real queries of the support."""
    reservoir, rows = Reservoir(size, seed), support.rows(length)
    queries = list(range(length)[rows]) if isinstance(rows, slice) else rows.tolist()
    for sequence in range(data.count):
        real = length if data.lengths is None else int(data.lengths[sequence])
        reservoir.offer(sequence, [t for t in queries if t < real])
    return reservoir.places


@dataclass
class Reader:
    """Everything one block of sequences is read into; its `hook` is for `attach`."""

    main: Capture
    plan: Plan
    span: range
    others: dict[str, Capture] = field(default_factory=dict)
    whole: WholeCapture | None = None

    def __post_init__(self) -> None:
        if self.plan.places is not None:
            self.main.wanted = self.plan.places.of(self.span)
        for variant in self.plan.variants:
            self.others[variant.name] = Capture(
                variant.support,
                None,
                self.main.want_rows,
                variant.retained,
                work=self.main.work,
                weigh=variant.weigh,
                importance=False,
            )
        if self.plan.edges is not None:
            self.whole = WholeCapture(self.plan.sink, self.plan.edges)

    def batch(self, lengths: Tensor | None, first: int) -> None:
        """A new batch begins with sequence `first`."""
        self.settle()
        for capture in (self.main, *self.others.values()):
            capture.batch(lengths, first)

    def settle(self) -> None:
        """A batch is over: what waits is added. PerpendError for the first layer that is not finite."""
        captures = [self.main, *self.others.values()]
        for capture in captures:
            capture.settle()
        readers = captures if self.whole is None else [*captures, self.whole]
        found = [damage for reader in readers if (damage := reader.damage()) is not None]
        if found:
            raise PerpendError(min(found, key=lambda damage: damage[0])[1])

    def hook(self, call: AttentionCall, output: Tensor) -> None:
        """Read one call."""
        self.main.hook(call, output)
        if not self.others and self.whole is None:
            return
        if call.query.device.type in NO_DOUBLE:
            call = on_cpu(call, self.plan.retained)
            for capture in self.others.values():
                capture.forget()  # its masks are copies, of no use to the next layer
        for capture in self.others.values():
            capture.hook(call, output)
        if self.whole is not None:
            self.whole.hook(call, output)

    def finish(self, sites: tuple[AttentionSite, ...]) -> dict[str, Any]:
        """The block's sums: those of the main rows, and under `variants`, `whole` and `kept` the others'."""
        self.settle()
        count = len(self.span)
        block: dict[str, Any] = finish(self.main, sites, count)
        if self.others:
            block["variants"] = {name: finish(capture, sites, count) for name, capture in self.others.items()}
        if self.whole is not None:
            block["whole"] = self.whole.finish(sites)
        if self.plan.places is not None:
            block["kept"] = kept_rows(self.main, sites)
        return block


def read_windows(text: str | Sequence[int] | None) -> tuple[int, ...]:
    """Windows as `32,64,128` or a sequence of numbers."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else list(text)
    try:
        return tuple(int(part) for part in parts)
    except ValueError as error:
        raise InputError(f"{text!r} is no list of windows; write 32,64,128") from error

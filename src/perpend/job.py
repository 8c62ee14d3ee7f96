"""What every verb does around its study: load, cut the text, record the request, open the run, answer.

job = Job("attention", options)
tokens = job.tokens()                                # [n, T]; loads model and text on first use
if job.planned(tokens, passes=1):                    # --plan: the cost is shown, nothing is run
    return
with job.run() as run:
    survey = survey_attention(job.model, tokens, store=run.step, progress=job.progress)
    run.finish(survey.results, ...)
job.answer(run, ("Per layer", table))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perpend import distributed, output
from perpend.batching import order
from perpend.errors import InputError
from perpend.progress import duration, note, progress, short

if TYPE_CHECKING:
    from torch import Tensor

    from perpend.runs import Run

# Options that say where and how a run is told, not what it computes: they may differ on --resume.
TELLING = {"out", "resume", "json", "quiet", "plan", "device", "max_memory"}
PROBED = (
    "the time is that of forward passes alone, from one batch timed on this machine as busy as it is now; "
    "loading, what is read and computed between the passes, statistics and the report come on top"
)
_MODEL = {"model", "revision", "dtype", "trust_remote_code"}
_TEXT = {"text", "sequences", "length", "bos", "images"}


class Job:
    """One invocation of a verb: its options, and model and text as they are needed."""

    def __init__(self, command: str, options: Mapping[str, Any]) -> None:
        self.command, self.options = command, dict(options)
        self.progress = progress

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from perpend.models.load import load
        from perpend.models.placement import places

        chosen = {key: self.options.get(key) for key in ("revision", "dtype")}
        model, tokenizer = load(
            self.options.get("model"),
            device=self.options.get("device") or distributed.local_device(),
            trust_remote_code=bool(self.options.get("trust_remote_code")),
            max_memory=self.options.get("max_memory"),
            **chosen,
        )
        size = short(model.num_parameters())
        note(f"{self.model_name}: {size} parameters, {_dtype(model)} on {places(model)}")
        return model, tokenizer

    @property
    def model(self) -> Any:
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        return self._loaded[1]

    @property
    def model_name(self) -> str:
        from perpend.models.catalog import DEFAULT

        return self.options.get("model") or DEFAULT

    @cached_property
    def sequences(self) -> Any:
        """The text, tokenized as one stream and cut; `.take(count, seed)` chooses sequences."""
        from perpend import texts

        text = texts.read_text(self.options.get("text"))
        if self.tokenizer is None:
            raise InputError(f"{self.model_name} has no tokenizer, so it cannot read text")
        cut = {"length": self.options["length"], "bos": self.options["bos"]}
        return texts.sequences(text, self.tokenizer, model=self.model, **cut)

    @cached_property
    def images(self) -> Any:
        """The readable images of --images, all of them in memory; None where the option is not given."""
        if not self.options.get("images"):
            return None
        from perpend.images import read_images

        if not self.reads_images:
            raise InputError(f"{self.model_name} is a language model: it reads --text, not --images")
        return read_images(self.options["images"], self.tokenizer, label2id=self.model.config.label2id)

    @property
    def reads_images(self) -> bool:
        """Whether the model is an image model."""
        return getattr(self.model, "main_input_name", "input_ids") == "pixel_values"

    def tokens(self, seed: int = 0, count: int | None = None) -> Tensor:
        """[n, T] token ids of this seed; n is --sequences unless `count` says otherwise.

        With --images [n, 3, height, width]: n of them, or all where the folder holds fewer.
        """
        count = count or self.options["sequences"]
        if self.images is None:
            if "images" in self.options and self.reads_images:
                raise InputError(f"{self.model_name} is an image model: give it a folder, --images DIR")
            return self.sequences.take(count, seed)
        return self.images.pixels[order(len(self.images), seed)[:count]]

    def model_record(self) -> dict[str, Any]:
        """What run.json says of the model."""
        from perpend.models.weights import weights_hash

        config = self.model.config
        return {
            "name": self.model_name,
            "class": type(self.model).__name__,
            "family": getattr(config, "model_type", None),
            "revision": self.options.get("revision"),
            "dtype": _dtype(self.model),
            "parameters": self.model.num_parameters(),
            "layers": getattr(config, "num_hidden_layers", None),
            "weights_sha256": weights_hash(self.model),
        }

    def data_record(self) -> dict[str, Any]:
        """What run.json says of the text, or of the images."""
        if self.images is not None:
            told = self.images.describe()
            used = min(self.options["sequences"], len(self.images))
            return {"name": told.pop("images"), **told, "sequences": used, "available": len(self.images)}
        cut = self.sequences
        return {
            "name": cut.text.name,
            "sha256": cut.text.sha256,
            "length": cut.length,
            "bos": cut.bos,
            "opening": list(cut.opening),
            "notes": list(cut.notes),
            "sequences": self.options["sequences"],
            "available": len(cut.tokens),
        }

    def request(self, **more: Any) -> dict[str, Any]:
        """Everything that decides the results; what a resumed run must share with the first."""
        own = {
            key: value
            for key, value in self.options.items()
            if key not in TELLING | _MODEL | _TEXT | {"seeds"}
        }
        asked: dict[str, Any] = {}
        if "model" in self.options:
            asked["model"] = self.model_record()
        if "text" in self.options:
            asked["data"] = self.data_record()
        if "seeds" in self.options:
            asked["seeds"] = list(self.options["seeds"])
        return {**asked, **own, **more}

    def run(self, **more: Any) -> Run:
        """The run folder, for a `with`; `more` joins the request."""
        from perpend.runs import Run

        return Run.start(
            self.options.get("out"),
            command=self.command,
            request=self.request(**more),
            resume=bool(self.options.get("resume")),
        )

    def planned(
        self,
        tokens: Tensor,
        *,
        passes: float = 1,
        forward: Callable[[Tensor], Any] | None = None,
        remarks: Sequence[str] = (),
    ) -> bool:
        """With --plan: measures one batch, shows what the whole would cost, and returns True (stop here).

        `passes` counts forward passes of all of `tokens`; `forward(batch)` is the work of one batch (default:
        the plain model). Time is that of the second call, the first one warms up.
        """
        if not self.options.get("plan"):
            return False
        cost = probe(self.model, tokens, int(self.options.get("batch") or 1), passes, forward)
        import pandas as pd

        images = tokens.is_floating_point()
        unit = "images" if images else "tokens"
        shown = pd.DataFrame(
            [
                (
                    "forward passes",
                    f"{cost['forward_passes']:,} of {cost['batch']} "
                    + ("images" if images else f"× {tokens.shape[1]} tokens"),
                ),
                (unit, f"{cost['tokens']:,}"),
                ("expected time of the passes", duration(cost["seconds"])),
                ("throughput", f"{short(cost['tokens_per_second'])} {unit}/s"),
                ("peak memory", f"{cost['peak_bytes'] / 2**30:.2f} GiB ({cost['memory_of']})"),
            ],
            columns=["cost", self.model_name],
        )
        told = [*remarks, PROBED]
        output.answer({"plan": cost, "command": self.command, "remarks": told}, shown, *told)
        return True

    def answer(self, run: Any, *parts: Any) -> None:
        """The answer on stdout: run.json with --json, else tables, findings and where the rest is."""
        findings = run.document.get("findings", [])
        where = f"report: {run.folder / 'report.html'}"
        told = [output.lines("Findings", findings)] if findings else []
        output.answer({**run.document, "folder": str(run.folder)}, *parts, *told, where)


def probe(
    model: Any,
    tokens: Tensor,
    batch: int,
    passes: float = 1,
    forward: Callable[[Tensor], Any] | None = None,
) -> dict[str, Any]:
    """Cost of `passes` passes of all `tokens` (or images), from one batch measured: passes, tokens, seconds,
    bytes."""
    import torch

    from perpend.models.placement import input_device

    device = input_device(model)
    run = forward or (lambda ids: model(ids.to(device)))
    first, on_gpu = tokens[:batch], device.type == "cuda"
    gpus = range(torch.cuda.device_count()) if on_gpu else ()  # a spread model may have weights on all
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    with torch.inference_mode():
        run(first)
        started = time.perf_counter()
        run(first)
        if on_gpu:
            torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    batches = -(-len(tokens) // batch)
    each = 1 if tokens.is_floating_point() else tokens.shape[1]  # an image counts as one
    total = round(len(tokens) * each * passes)
    share = len(first) * each / seconds
    return {
        "forward_passes": round(batches * passes),
        "batch": len(first),
        "tokens": total,
        "seconds": total / share / distributed.world(),
        "tokens_per_second": share,
        "peak_bytes": sum(map(torch.cuda.max_memory_allocated, gpus)) if on_gpu else _peak_resident(),
        "memory_of": "accelerator" if on_gpu else "process",
    }


def _peak_resident() -> int:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")

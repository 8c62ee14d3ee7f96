"""What `perpend prune` reads: something for signatures, and something else to judge by, never overlapping."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perpend.batching import order
from perpend.errors import InputError

if TYPE_CHECKING:
    from perpend.job import Job

FOR_SIGNATURES = 0.6  # of the text or the images; the rest is held out where nothing else is named
FEWEST_IMAGES = 5


class Inputs:
    """Texts or images of one run."""

    def __init__(self, job: Job) -> None:
        self.job, self.options = job, job.options

    @cached_property
    def language(self) -> bool:
        """Whether there is a perplexity to take."""
        return bool(getattr(self.job.model, "can_generate", lambda: False)())

    @cached_property
    def texts(self) -> tuple[Any, Any]:
        """Text for signatures and text for losses, never overlapping."""
        from perpend.texts import read_text

        whole = read_text(self.options["text"])
        if self.options["held_out"]:
            return whole, read_text(self.options["held_out"])
        cut = int(FOR_SIGNATURES * len(whole.text))
        first, last = read_text([whole.text[:cut]]), read_text([whole.text[cut:]])
        return replace(first, name=whole.name), replace(last, name=f"the end of {whole.name}")

    @cached_property
    def pictures(self) -> tuple[Any, Any]:
        """Images for signatures and images to judge by, [n, 3, height, width] each, never overlapping."""
        pixels = self.job.images.pixels
        if self.options["held_out"]:
            return pixels, self.others.pixels
        if len(pixels) < FEWEST_IMAGES:
            raise InputError(
                f"{self.options['images']} holds {len(pixels)} images; pruning reads some and judges by "
                f"others: give {FEWEST_IMAGES} or more, or a second folder with --held-out"
            )
        cut = int(FOR_SIGNATURES * len(pixels))
        return pixels[:cut], pixels[cut:]

    @cached_property
    def others(self) -> Any:
        """The images of --held-out."""
        from perpend.images import read_images

        own = self.job.model.config.label2id
        return read_images(self.options["held_out"], self.job.tokenizer, label2id=own)

    @property
    def labels(self) -> Any:
        """The classes of the images to judge by, in the classifier's own numbering; None without any.

        A folder's classes count only where the classifier knows every one of them by name.
        """
        if self.job.images is None:
            return None
        source = self.others if self.options["held_out"] else self.job.images
        known = self.job.model.config.label2id or {}
        if source.labels is None or not all(name in known for name in source.classes):
            return None
        return source.labels if self.options["held_out"] else source.labels[-len(self.pictures[1]) :]

    @cached_property
    def judged(self) -> Any:
        """What the sets are judged by: `Windows` of a language model, else images or token ids."""
        from perpend.evaluation.windows import as_windows
        from perpend.models.limits import check_positions
        from perpend.texts import sequences

        if self.job.images is not None:
            return self.pictures[1]
        context = self.options["context"]
        check_positions(self.job.model, context, "context")
        cut = sequences(
            self.texts[1], self.job.tokenizer, length=context, bos=self.options["bos"], model=self.job.model
        )
        count = max(1, self.options["token_count"] // context)
        if count > len(cut.tokens):
            raise InputError(
                f"{self.texts[1].name} holds {len(cut.tokens)} windows of {context} tokens to judge by and "
                f"{count} were asked for: lower --tokens or name a longer --held-out"
            )
        chosen = cut.take(count, 0)
        return as_windows(chosen, bos=cut.bos, split=self.split) if self.language else chosen

    @property
    def split(self) -> str:
        """Where the sets are judged, in words."""
        if self.options["held_out"]:
            return Path(self.options["held_out"]).name
        kind = "images" if self.job.images is not None else "text"
        return f"the last {1 - FOR_SIGNATURES:.0%} of the {kind}, which no signature reads"

    @property
    def seeds_differ(self) -> bool:
        """Whether another seed reads something else: a folder of images can be read whole."""
        return self.job.images is None or len(self.pictures[0]) > self.options["sequences"]

    @property
    def remarks(self) -> list[str]:
        """What is to be said of the inputs."""
        if self.seeds_differ or len(self.options["seeds"]) == 1:
            return []
        return [
            f"One seed: every one of the {len(self.pictures[0])} images there for signatures is read, "
            "so seeds would choose the same."
        ]

    def read(self, seed: int) -> Any:
        """What signatures of a seed are taken from."""
        if self.job.images is None:
            return self.job.tokens(seed)
        pool = self.pictures[0]
        return pool[order(len(pool), seed)[: self.options["sequences"]]]

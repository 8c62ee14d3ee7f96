"""Three losses of a text, by name: C4-style fixed loss, token perplexity, WikiText's word perplexity.

    fixed_loss(model, tokenizer, "c4.jsonl", length=2048)              # documents in one stream, disjoint
    windows token_perplexity(model, tokenizer, "wiki.raw", context=1024, stride=512)
    word_perplexity(model, tokenizer, "wiki.raw")              # the harness' `wikitext` 2.0

They are three different numbers of one text; each result says which it is and with what context and stride.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from perpend import texts
from perpend.errors import InputError
from perpend.evaluation.losses import token_nll
from perpend.evaluation.perplexity import Perplexity, perplexity
from perpend.evaluation.scoring import Encoder, context_length
from perpend.evaluation.windows import as_windows, cut, rolling
from perpend.progress import Progress, silent

Source = texts.Text | str | os.PathLike | Sequence[str] | None


def fixed_loss(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    *,
    length: int = 2048,
    sequences: int | None = None,
    bos: str = "auto",
    batch: int = 4,
    progress: Progress = silent,
) -> Perplexity:
    """Mean loss per token on consecutive windows of `length` tokens cut from all documents in one stream.

    `sequences`: the first so many, None for all; the rest of the stream shorter than a window is left out.
    The first token of each window is not predicted.
    """
    held = texts.sequences(source, tokenizer, length, bos, model=model)
    windows = as_windows(held.take(sequences), bos=held.bos, split=held.text.name)
    return perplexity("fixed_loss", token_nll(model, windows, batch=batch, progress=progress))


def token_perplexity(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    *,
    context: int | None = None,
    stride: int | None = None,
    bos: str = "auto",
    sequences: int | None = None,
    batch: int = 4,
    progress: Progress = silent,
) -> Perplexity:
    """exp of the mean loss per token of a text read as one stream through windows of `context` tokens.

    context: None is what the model states, at most 2048. stride: tokens newly scored per window; None makes
    the windows disjoint. sequences: the first so many windows.
    """
    text = texts.read_text(source)
    encoder = Encoder(tokenizer, bos)
    opening = encoder.bos_id if encoder.opens_with_bos() else None
    width = context or min(2048, context_length(model, tokenizer))
    windows = cut(texts.encode(tokenizer, text.text), width, stride, bos=opening, split=text.name)
    if sequences is not None:
        windows = windows.take(sequences)
    return perplexity("token_perplexity", token_nll(model, windows, batch=batch, progress=progress))


def word_perplexity(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    *,
    context: int | None = None,
    documents: int | None = None,
    batch: int = 4,
    progress: Progress = silent,
) -> Perplexity:
    """exp(-Σ log p / words): the harness' word perplexity of WikiText, whatever the tokenizer.

    Articles are scored apart, after BOS (or EOS), in rolling windows of `context` tokens (None: what the
    model states, as the harness takes it). Words are counted in the article as it was before detokenizing;
    a list of strings is taken as one article each. Unlike the harness, a BOS that the tokenizer adds is not
    scored too.
    """
    if isinstance(source, (list, tuple)):
        articles, name = [str(one) for one in source], f"{len(source)} strings"
    else:
        text = texts.read_text(source)
        articles, name = pages(text.text), text.name
    if documents is not None:
        if not 1 <= documents <= len(articles):
            raise InputError(f"{documents} documents asked for, {name} holds {len(articles)}")
        articles = articles[:documents]
    encoder = Encoder(tokenizer, "never")
    encoded = [encoder(detokenize(article)) for article in articles]
    windows = rolling(
        encoded,
        context or context_length(model, tokenizer),
        encoder.prefix,
        words=[len(re.split(r"\s+", article)) for article in articles],
        split=name,
    )
    nll = token_nll(model, windows, batch=batch, progress=progress)
    return perplexity("word_perplexity", nll, unit="word")


_TITLE = re.compile(r"^ = [^=\n].*[^=\n] = $", re.M)


def pages(text: str) -> list[str]:
    """WikiText's articles, each from its " = Title = " line on; a text without such lines is one article."""
    starts = [found.start() for found in _TITLE.finditer(text)]
    if not starts:
        return [text]
    ends = [*starts[1:], len(text)]
    return [text[start:end] for start, end in zip(starts, ends)]


# (pattern, replacement) in the harness' order; WikiText has blanks around punctuation and @-@ inside numbers
_PLAIN = (
    [("s '", "s'")],
    [(" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), *((f" {mark} ", f"{mark} ") for mark in ":;.!?,")],
    [
        *(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
        *((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
    ],
)
_PAIRED = [
    (re.compile(opening + r"\s*([^" + closing + r"]*?)\s*" + closing), left + r"\1" + right)
    for opening, closing, left, right in (
        (r"\(", r"\)", "(", ")"),
        (r"\[", r"\]", "[", "]"),
        ("{", "}", "{", "}"),
        ('"', '"', '"', '"'),
        ("'", "'", "'", "'"),
    )
]


def detokenize(article: str) -> str:
    """WikiText's article as prose, by the replacements of the harness' `wikitext` task."""
    first, second, third = _PLAIN
    for old, new in first:
        article = article.replace(old, new)
    article = re.sub(r"/' [0-9]/", r"/'[0-9]/", article)
    for old, new in second:
        article = article.replace(old, new)
    for pattern, new in _PAIRED:
        article = pattern.sub(new, article)
    for old, new in third:
        article = article.replace(old, new)
    return article

"""Token windows and which of their tokens count: the part of a perplexity that papers leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perpend.errors import InputError


@dataclass(frozen=True)
class Windows:
    """Token windows and which of their tokens are scored, with the words that a result has to carry.

    tokens: [n, T] int64; scored: [n, T] bool, `scored[i, t]` means that token t is predicted from tokens <
    t of its window and counts (column 0 never does). `sequence`: [n] the unit of resampling each window
    belongs to. `words`: whitespace words per sequence, where a word perplexity is wanted.
    """

    tokens: Tensor
    scored: Tensor
    sequence: Tensor
    context: int
    stride: int
    bos: bool
    split: str = "unnamed"
    words: Tensor | None = None

    def __post_init__(self) -> None:
        if bool(self.scored[:, 0].any()):
            raise InputError("token 0 of a window has nothing before it and cannot be scored")

    def take(self, count: int) -> Windows:
        """The windows of the first `count` sequences."""
        names = torch.unique(self.sequence)
        if not 1 <= count <= len(names):
            raise InputError(f"{count} sequences asked for, the text holds {len(names)}")
        keep = self.sequence < names[count - 1] + 1
        words = None if self.words is None else self.words[: int(names[count - 1]) + 1]
        return replace(
            self,
            tokens=self.tokens[keep],
            scored=self.scored[keep],
            sequence=self.sequence[keep],
            words=words,
        )


def as_windows(tokens: Tensor | Windows, *, bos: bool = False, split: str = "unnamed") -> Windows:
    """Windows of a plain [n, T] tensor: disjoint sequences, every token but the first scored."""
    if isinstance(tokens, Windows):
        return tokens
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < 2:
        raise InputError(
            f"token sequences must be a LongTensor [n, T] with T >= 2, got {getattr(tokens, 'shape', tokens)}"
        )
    scored = torch.ones_like(tokens, dtype=torch.bool)
    scored[:, 0] = False
    n, length = tokens.shape
    return Windows(tokens, scored, torch.arange(n), context=length, stride=length, bos=bos, split=split)


def cut(
    stream: Sequence[int] | Tensor,
    context: int,
    stride: int | None = None,
    *,
    bos: int | None = None,
    split: str = "unnamed",
) -> Windows:
    """One stream of tokens -> windows of at most `context` tokens, a new one every `stride` scored tokens.

    `stride` None: disjoint windows (stride = context), the fast form most papers use. A smaller stride
    gives every scored token at least context - stride tokens of context and costs context/stride times as
    much. Each token is scored once; the first of the stream (of every window when they are disjoint and
    have no BOS) has no context and is not. `bos`: an id that opens every window and counts in its length.
    The tail shorter than a window is padded on the right, which a causal model cannot see, and only real
    tokens are scored.
    """
    flat = torch.as_tensor(stream, dtype=torch.long).flatten()
    room = context - (bos is not None)
    stride = room if stride is None else stride
    if not 1 <= stride <= room or room < 1 or context < 2:
        raise InputError(f"stride must lie in 1..{room} (context {context} without the BOS), got {stride}")
    if len(flat) < 2 and bos is None:
        raise InputError(f"{len(flat)} tokens are too few for a perplexity")
    shift = int(bos is not None)
    rows, masks = [], []
    done = 0  # tokens of the stream already scored or passed by
    begin = 0
    while done < len(flat):
        end = min(begin + room, len(flat))
        row = torch.zeros(context, dtype=torch.long)
        mask = torch.zeros(context, dtype=torch.bool)
        if bos is not None:
            row[0] = bos
        row[shift : shift + end - begin] = flat[begin:end]
        mask[shift + done - begin : shift + end - begin] = True
        mask[0] = False
        if mask.any():
            rows.append(row)
            masks.append(mask)
        done = end
        begin += stride
    order = torch.arange(len(rows))
    return Windows(
        torch.stack(rows), torch.stack(masks), order, context, stride, bos is not None, split=split
    )


def rolling(
    documents: Sequence[Sequence[int]],
    context: int,
    prefix: int,
    *,
    words: Sequence[int],
    split: str = "unnamed",
) -> Windows:
    """Documents -> the rolling windows of the evaluation harness, every token of every document scored once.

    The first window of a document opens with `prefix` (BOS, or EOS where there is none); later windows open
    with the last token of the one before, and the last one reaches back so that its context is as long as
    it can be. Windows hold context + 1 tokens: the model reads `context`, the last is only predicted. The
    resampling unit is the document.
    """
    if context < 1:
        raise InputError("context must be positive")
    if len(documents) != len(words):
        raise InputError(f"{len(documents)} documents but {len(words)} word counts")
    rows, masks, unit = [], [], []
    for index, document in enumerate(documents):
        full = [prefix, *map(int, document)]
        for start in range(0, len(full) - 1, context):
            stop = min(start + context, len(full) - 1)  # predicts full[start + 1 .. stop]
            begin = max(0, stop - context)
            row = torch.zeros(context + 1, dtype=torch.long)
            row[: stop + 1 - begin] = torch.tensor(full[begin : stop + 1])
            mask = torch.zeros(context + 1, dtype=torch.bool)
            mask[start + 1 - begin : stop + 1 - begin] = True
            rows.append(row)
            masks.append(mask)
            unit.append(index)
    if not rows:
        raise InputError("no document holds a token")
    return Windows(
        torch.stack(rows),
        torch.stack(masks),
        torch.tensor(unit),
        context,
        context,
        True,
        split=split,
        words=torch.tensor(list(words)),
    )

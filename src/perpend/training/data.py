"""Text, tokenized once, as one memory-mapped array of token ids; and the batches of every step.

A prepared folder holds `train.bin` and `valid.bin` (uint16 or uint32, one stream each, an end-of-text token
after every document), `tokenizer/` in the form transformers loads, and `data.json`, written last. Preparing
can be killed at any moment and goes on where it was.

Documents longer than 64 kB are cut at blank lines, and each piece counts as a document; whole documents, one
in `round(1 / valid)`, spread evenly, are kept for validation.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from perpend import distributed
from perpend.errors import InputError, PerpendError
from perpend.progress import Progress, silent
from perpend.runs.files import TEMPORARY, explained, write_atomically

END = "<|endoftext|>"
PIECE = 1 << 16
VERSION = 1
# name -> (repository, configuration, text column); any other hub data set is given as hub:OWNER/NAME[:CONFIG]
HUB = {
    "openwebtext": ("Skylion007/openwebtext", None, "text"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-100BT", "text"),
}
TEXT_FILES = (".txt", ".text", ".md", ".rst", ".pod", ".jsonl")


@dataclass(frozen=True)
class TokenData:
    """A prepared folder, opened."""

    folder: Path
    document: dict[str, Any]  # data.json: source, vocab, tokens of each part, digest of the text, ...

    @property
    def vocab(self) -> int:
        return self.document["vocab"]

    @cached_property
    def train(self) -> np.ndarray:
        return self._part("train")

    @cached_property
    def valid(self) -> np.ndarray:
        return self._part("valid")

    def _part(self, name: str) -> np.ndarray:
        stream = np.memmap(self.folder / f"{name}.bin", dtype=self.document["dtype"], mode="r")
        if len(stream) != self.document["tokens"][name]:
            raise InputError(
                f"{self.folder / name}.bin holds {len(stream)} tokens where data.json says "
                f"{self.document['tokens'][name]}; delete the folder and prepare the data again"
            )
        return stream

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    def identity(self) -> dict[str, Any]:
        """What decides the tokens, for a run's request; where the text lay does not."""
        return {name: self.document[name] for name in ("text_digest", "vocab", "tokens")}


def open_data(folder: str | Path) -> TokenData:
    """A folder that `prepare` has finished."""
    path = Path(folder) / "data.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no data.json: give a folder that `perpend train` has prepared")
    document = _document(path)
    if document.get("version") != VERSION:
        raise InputError(f"{path} is of version {document.get('version')}, not {VERSION}; prepare it again")
    return TokenData(Path(folder), document)


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path} is damaged; delete {path.parent} and prepare the data again")
    return found


def begun(folder: str | Path) -> bool:
    """Whether `folder` holds tokens of a preparation that was stopped, with which `prepare` would go on."""
    partial = Path(folder) / "partial.json"
    return partial.is_file() and bool(_document(partial).get("documents"))


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab: int = 4096,
    valid: float = 0.01,
    limit: int | None = None,
    progress: Progress = silent,
) -> TokenData:
    """Tokenizes `source` into the folder `out`, or opens it where that is done already.

    Args:
        source: a text or .jsonl file (key "text"), a folder of them, `openwebtext`, `fineweb`, or
            `hub:OWNER/NAME[:CONFIG]`; hub data is streamed and never stored as text.
        tokenizer: a folder or hub name that transformers' AutoTokenizer loads; None trains a byte-level BPE
            of `vocab` entries on the first 64 MB of the training documents.
        valid: the share of documents kept for validation.
        limit: stop after about this many training tokens (a few MB of text at a time).

    Raises:
        InputError: no text, too little of it, or `out` prepared from something else.
    """
    return distributed.main_first(
        lambda: _prepare(str(source), Path(out), tokenizer, vocab, valid, limit, progress)
    )


def _prepare(
    source: str,
    out: Path,
    tokenizer: str | Path | None,
    vocab: int,
    valid: float,
    limit: int | None,
    progress: Progress,
) -> TokenData:
    if not 1e-9 < valid <= 0.5:
        raise InputError(
            f"valid={valid} must be a share of the documents between 0 and 1/2, such as 0.01 or 0.25: one "
            "document in a round number is kept"
        )
    asked = {
        "version": VERSION,
        "source": source,
        "tokenizer": str(tokenizer) if tokenizer else f"byte-level BPE of {vocab}, trained on this text",
        "valid": valid,
        "limit": limit,
    }
    if (out / "data.json").exists():
        data = open_data(out)
        _same(out, data.document, asked)
        return data
    with explained("create", out):
        out.mkdir(parents=True, exist_ok=True)
    every = round(1 / valid)
    done = {"documents": 0, "train": 0, "valid": 0, "text_digest": "", "bytes": 0, "asked": asked}
    partial = out / "partial.json"
    if partial.exists():  # before a tokenizer that lies there is used: it may be of something else
        done = _document(partial)
        _same(out, done.get("asked", {}), asked)
    else:
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
        write_atomically(partial, json.dumps(done))
    try:
        return _tokenized(source, out, tokenizer, vocab, every, limit, progress, done)
    except InputError:
        if not begun(out):  # a mistake, not an interruption: the corrected request finds nothing in its way
            partial.unlink(missing_ok=True)
        raise


def _tokenized(
    source: str,
    out: Path,
    tokenizer: str | Path | None,
    vocab: int,
    every: int,
    limit: int | None,
    progress: Progress,
    done: dict[str, Any],
) -> TokenData:
    """The rest of a preparation, from what is `done`."""
    partial = out / "partial.json"
    encoder = _tokenizer(out, source, tokenizer, vocab, every)
    size = len(encoder)
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    end = encoder.eos_token_id
    if end is None:
        raise InputError(f"the tokenizer {tokenizer} has no end-of-text token to put between documents")

    files = {name: (out / f"{name}.bin").open("ab") for name in ("train", "valid")}
    try:
        for name, file in files.items():  # what was written after the last count is written again
            file.truncate(done[name] * np.dtype(dtype).itemsize)
        with progress(total=limit, unit="tokens", description="tokenizing") as advance:
            advance(done["train"])
            pieces = itertools.islice(documents(source), done["documents"], None)
            for batch in _batched(pieces, 1 << 22):
                ids = encoder(batch, add_special_tokens=False, return_attention_mask=False)["input_ids"]
                before = done["train"]
                for text, row in zip(batch, ids, strict=True):
                    part = "valid" if done["documents"] % every == every - 1 else "train"
                    np.asarray([*row, end], dtype=dtype).tofile(files[part])
                    done[part] += len(row) + 1
                    done["documents"] += 1
                    done["bytes"] += len(text.encode())
                # a chain of digests instead of one: it can be continued after a kill
                chain = done["text_digest"] + "".join(hashlib.sha256(t.encode()).hexdigest() for t in batch)
                done["text_digest"] = hashlib.sha256(chain.encode()).hexdigest()
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                write_atomically(partial, json.dumps(done))
                advance(done["train"] - before)
                if limit is not None and done["train"] >= limit and done["valid"]:
                    break
    finally:
        for file in files.values():
            file.close()
    if not done["train"] or not done["valid"]:
        partial.unlink()  # nothing to go on with: another share finds nothing in its way
        raise InputError(
            f"{source} holds {done['documents']} documents of at most {PIECE} bytes, too few to keep one in "
            f"{every} for validation; give more text or a larger share, valid="
        )
    document = done["asked"] | {
        "vocab": size,
        "dtype": dtype,
        "tokens": {name: done[name] for name in ("train", "valid")},
        "documents": done["documents"],
        "bytes": done["bytes"],
        "text_digest": done["text_digest"],
    }
    write_atomically(out / "data.json", json.dumps(document, indent=1))
    partial.unlink(missing_ok=True)
    return open_data(out)


def _same(out: Path, before: dict[str, Any], asked: dict[str, Any]) -> None:
    differ = [f"{k} is {before.get(k)!r}, not {v!r}" for k, v in asked.items() if before.get(k) != v]
    if differ:
        raise InputError(
            f"{out} was prepared from something else ({'; '.join(differ)}); choose another folder"
        )


def documents(source: str) -> Iterator[str]:
    """The documents of a source, in a fixed order, pieces of at most about 64 kB."""
    for text in _whole_documents(source):
        while len(text) > PIECE:
            cut = text.rfind("\n\n", PIECE // 2, PIECE) + 2
            cut = cut if cut > 1 else PIECE
            yield text[:cut]
            text = text[cut:]
        if text.strip():
            yield text


def _whole_documents(source: str) -> Iterator[str]:
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in TEXT_FILES)
        if not files:
            raise InputError(f"{source} holds no text file ({', '.join(TEXT_FILES)})")
        yield from itertools.chain.from_iterable(map(_read, files))
    elif path.is_file():
        yield from _read(path)
    elif source in HUB or source.startswith("hub:"):
        yield from _stream(source)
    else:
        raise InputError(
            f"no text at {source!r}: give a file, a folder, {', '.join(HUB)} or hub:OWNER/NAME[:CONFIG]"
        )


def _read(path: Path) -> Iterator[str]:
    try:
        if path.suffix.lower() != ".jsonl":
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise InputError(f'{path}, line {number}: no string under the key "text"')
                yield record["text"]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not .jsonl: {error}") from error


def _stream(source: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise PerpendError("hub data sets need `pip install perpend[train]`") from error
    if source in HUB:
        repository, configuration, column = HUB[source]
    else:
        repository, _, configuration = source.removeprefix("hub:").partition(":")
        configuration, column = configuration or None, "text"
    try:
        for record in datasets.load_dataset(repository, configuration, split="train", streaming=True):
            if column not in record:
                raise InputError(f"{source} has no column {column!r}; it has {', '.join(record)}")
            yield record[column]
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise PerpendError(
            f"the data set {source} cannot be read ({first}); what was tokenized is kept: go on with "
            "resume=True once the hub can be reached, or give a file or folder, text="
        ) from error


def _batched(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenizer(out: Path, source: str, given: str | Path | None, vocab: int, every: int) -> Any:
    """The tokenizer in `out/tokenizer`, put there first if it is not."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = out / "tokenizer"
    if not folder.exists():
        if given is not None:
            encoder = _loaded(str(given))
        else:
            encoder = PreTrainedTokenizerFast(
                tokenizer_object=_train_bpe(source, vocab, every), eos_token=END, bos_token=None
            )
        encoder.model_max_length = int(1e30)  # the stream is cut later, whole documents are encoded here
        unfinished = out / f"{TEMPORARY}tokenizer"
        shutil.rmtree(unfinished, ignore_errors=True)
        with explained("write", folder):
            encoder.save_pretrained(unfinished)
            os.replace(unfinished, folder)
    return AutoTokenizer.from_pretrained(folder)


def _loaded(name: str) -> Any:
    """The tokenizer of a folder or of a hub model."""
    from transformers import AutoTokenizer

    from perpend.models._source import TOKENIZER_FILES, hub_reachable

    path, remedy = Path(name), "leave tokenizer= out to train one on the text"
    local = path.exists()
    if local and not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise InputError(f"{name} is no folder with a tokenizer ({', '.join(TOKENIZER_FILES)}); {remedy}")
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=local or not hub_reachable())
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the tokenizer {name!r} cannot be loaded ({first}); give a folder that transformers' "
            f"AutoTokenizer loads, or {remedy}"
        ) from error


def _train_bpe(source: str, vocab: int, every: int, characters: int = 1 << 26) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if next(documents(source), None) is None:
        raise InputError(f"{source} holds no text to train on")

    def texts() -> Iterator[str]:
        used = 0
        for index, text in enumerate(documents(source)):
            if index % every != every - 1:
                yield text
                used += len(text)
            if used >= characters:
                return

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(), trainer)
    if bpe.get_vocab_size() != vocab:
        raise InputError(
            f"{source} yields a vocabulary of {bpe.get_vocab_size()}, not {vocab}; ask for a smaller one "
            f"with vocab={bpe.get_vocab_size()} (at least 257, the bytes and the end of text), or give "
            "more text"
        )
    return bpe


def batch_at(stream: np.ndarray, step: int, batch: int, context: int, seed: int) -> np.ndarray:
    """The sequences of one step: [batch, context + 1], int64, inputs and targets overlapping by one token.

    The stream is cut into non-overlapping sequences; each epoch is a permutation drawn from (seed, epoch). A
    function of its arguments alone, so resuming needs no state and any number of processes sees one order.
    """
    count = (len(stream) - 1) // context
    if count < 1:
        raise InputError(f"{len(stream)} tokens hold no sequence of {context} and its target; give more text")
    wanted = range(step * batch, (step + 1) * batch)
    starts = [int(_order(seed, i // count, count)[i % count]) * context for i in wanted]
    return np.stack([stream[s : s + context + 1] for s in starts]).astype(np.int64)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    kind = np.uint32 if count <= 1 << 32 else np.uint64
    return np.random.default_rng([seed, epoch]).permutation(count).astype(kind)

"""Images in, pixel batches out, through the model's own image processor.

    images = read_images("val2017/", processor, count=256)
    images.pixels                                  # float32 [256, 3, 224, 224]
    for batch in image_batches("val2017/", processor, size=32): ...      # without holding all of them

Subfolders are classes where every image lies in one. A file that cannot be decoded is left out, counted and
named; it never becomes an empty picture.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perpend.batching import order, starts
from perpend.errors import InputError

if TYPE_CHECKING:
    import torch

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageBatch:
    """Decoded images in the order they were chosen."""

    pixels: torch.Tensor  # float32 [n, channels, height, width], as the model takes them
    labels: tuple[int, ...] | None  # index of each one's class, None for an unlabelled folder
    files: tuple[str, ...]  # relative to the folder
    failures: tuple[str, ...]  # "file: why", met on the way to these
    digests: tuple[str, ...]  # sha256 of each file


@dataclass(frozen=True)
class Images:
    """A chosen set of images, all in memory."""

    name: str
    pixels: torch.Tensor  # float32 [n, channels, height, width]
    labels: torch.Tensor | None  # int64 [n]
    classes: tuple[str, ...]
    files: tuple[str, ...]
    failures: tuple[str, ...]
    sha256: str  # over the names and contents of the files used, in order

    def __len__(self) -> int:
        return len(self.pixels)

    def describe(self) -> dict[str, Any]:
        """What a result says of its images."""
        return {
            "images": self.name,
            "sha256": self.sha256,
            "count": len(self),
            "classes": len(self.classes),
            "failed": len(self.failures),
            "failures": list(self.failures[:20]),
        }


@dataclass(frozen=True)
class Folder:
    """The image files under a folder, sorted by path; a class each where the folder is labelled."""

    root: Path
    files: tuple[Path, ...]
    classes: tuple[str, ...]  # empty for an unlabelled folder

    def class_of(self, file: Path) -> str:
        return file.relative_to(self.root).parts[0]


def image_folder(folder: str | os.PathLike[str]) -> Folder:
    """The images under `folder`. InputError where there are none."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise InputError(f"there is no folder of images {root}")
    files = tuple(sorted(f for f in root.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file()))
    if not files:
        raise InputError(f"{root} holds no image ({', '.join(SUFFIXES)})")
    inside = all(len(f.relative_to(root).parts) > 1 for f in files)
    classes = tuple(sorted({f.relative_to(root).parts[0] for f in files})) if inside else ()
    return Folder(root, files, classes)


def read_images(
    folder: str | os.PathLike[str],
    processor: Any,
    *,
    count: int | None = None,
    seed: int = 0,
    label2id: Mapping[str, int] | None = None,
) -> Images:
    """`count` images of a folder (None: all), in memory: 0.6 MB each at 224 × 224.

    Seed 0 takes them in the order of their paths, a seed > 0 shuffles first. `label2id` (a classifier's own)
    numbers the classes where it knows all of them; otherwise they are numbered in alphabetical order.

    Raises InputError: no images, fewer readable ones than asked for, no processor, pillow not installed.
    """
    import torch

    batches = list(image_batches(folder, processor, size=64, count=count, seed=seed, label2id=label2id))
    listed = image_folder(folder)
    labels = [label for batch in batches for label in batch.labels or ()]
    files = tuple(name for batch in batches for name in batch.files)
    total = hashlib.sha256()
    for name, digest in zip(files, (d for batch in batches for d in batch.digests)):
        total.update(f"{name}\n{digest}\n".encode("utf-8", "surrogateescape"))
    return Images(
        name=os.fspath(folder),
        pixels=torch.cat([batch.pixels for batch in batches]),
        labels=torch.tensor(labels) if listed.classes else None,
        classes=listed.classes,
        files=files,
        failures=tuple(failure for batch in batches for failure in batch.failures),
        sha256=total.hexdigest(),
    )


def image_batches(
    folder: str | os.PathLike[str],
    processor: Any,
    *,
    size: int = 32,
    count: int | None = None,
    seed: int = 0,
    label2id: Mapping[str, int] | None = None,
) -> Iterator[ImageBatch]:
    """The same images as `read_images`, `size` at a time. Arguments are checked on the first batch."""
    import torch

    pillow = _pillow()
    _check_processor(processor)
    listed = image_folder(folder)
    held = len(listed.files)
    if size < 1 or (count is not None and count < 1):
        raise InputError("the number of images and the batch size must be at least 1")
    if count is not None and count > held:
        raise InputError(f"{listed.root} holds {held} images and {count} were asked for")
    drawn = order(held, seed).tolist()
    numbers = _numbers(listed.classes, label2id)

    wanted = held if count is None else count
    done, shape = 0, None
    pixels: list[torch.Tensor] = []
    used: list[Path] = []
    digests: list[str] = []
    failures: list[str] = []
    ready: ImageBatch | None = None  # held back: failures after the last batch belong to it

    def batch() -> ImageBatch:
        made = ImageBatch(
            pixels=torch.stack(pixels),
            labels=tuple(numbers[listed.class_of(f)] for f in used) if numbers else None,
            files=tuple(str(f.relative_to(listed.root)) for f in used),
            failures=tuple(failures),
            digests=tuple(digests),
        )
        for kept in (pixels, used, digests, failures):
            kept.clear()
        return made

    for position in drawn:
        if done == wanted:
            break
        file = listed.files[position]
        data = file.read_bytes()
        try:
            with pillow.Image.open(BytesIO(data)) as opened:
                picture = opened.convert("RGB")
        except pillow.UnidentifiedImageError:
            failures.append(f"{file.relative_to(listed.root)}: not an image in a known format")
            continue
        except (OSError, ValueError, SyntaxError, pillow.Image.DecompressionBombError) as error:
            failures.append(f"{file.relative_to(listed.root)}: {error}")
            continue
        values = torch.as_tensor(processor(images=picture, return_tensors="pt")["pixel_values"])[0].float()
        if shape is not None and values.shape != shape:
            raise InputError(
                f"the image processor gives images of several sizes ({tuple(shape)}, then "
                f"{tuple(values.shape)}); use one that resizes or crops to one size"
            )
        shape = values.shape
        pixels.append(values)
        used.append(file)
        digests.append(hashlib.sha256(data).hexdigest())
        done += 1
        if len(pixels) == size:
            if ready is not None:
                yield ready
            ready = batch()
    if done == 0 or (count is not None and done < count):
        raise InputError(
            f"{listed.root} holds {done} readable images and {wanted} were asked for; {len(failures)} could "
            f"not be decoded, first {failures[0]}"
        )
    if pixels:
        if ready is not None:
            yield ready
        ready = batch()
    assert ready is not None  # at least one image was decoded, or this has raised
    yield replace(ready, failures=(*ready.failures, *failures))


def _numbers(classes: tuple[str, ...], label2id: Mapping[str, int] | None) -> dict[str, int]:
    if label2id and all(name in label2id for name in classes):
        return {name: int(label2id[name]) for name in classes}
    return {name: index for index, name in enumerate(classes)}


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise InputError("reading images needs pillow: pip install 'perpend[vision]'") from error
    return PIL


def _check_processor(processor: Any) -> None:
    if processor is None:
        raise InputError(
            "the model came without an image processor (preprocessor_config.json), or pillow was not "
            "installed when it was loaded (pip install 'perpend[vision]')"
        )
    if hasattr(processor, "convert_ids_to_tokens"):
        raise InputError("this is a language model: it reads text, not images")


def classify(model: Any, pixels: torch.Tensor, *, batch: int = 8) -> torch.Tensor | None:
    """The class that `model` gives each image, int64 [n]; None for a model without a classifier.

    pixels: [n, channels, height, width], as `read_images` makes them.
    """
    import torch

    from perpend.models.placement import input_device

    found, device = [], input_device(model)
    with torch.inference_mode():
        for start in starts(len(pixels), batch):
            made = model(pixel_values=pixels[start : start + batch].to(device, model.dtype))
            logits = getattr(made, "logits", None)
            if logits is None or logits.ndim != 2:
                return None
            found.append(logits.argmax(-1).cpu())
    return torch.cat(found)


def accuracy(model: Any, images: Images, *, batch: int = 8) -> dict[str, Any]:
    """Top-1 accuracy on a labelled folder: `accuracy`, `low`, `high` (95 %, images resampled), `images`.

    `accuracy` is None, with `why` in words, without a classifier, without labels, and where the folder's
    classes are not all among the model's own (`config.label2id`): another numbering scores nothing.
    """
    import numpy as np

    from perpend.studies.resampling import draws

    undefined: dict[str, Any] = {"accuracy": None, "images": len(images)}
    predicted = classify(model, images.pixels, batch=batch)
    if predicted is None:
        return undefined | {"why": "the model has no classifier"}
    if images.labels is None:
        return undefined | {"why": "the folder has no subfolders as classes"}
    known = getattr(model.config, "label2id", None) or {}
    strange = [name for name in images.classes if name not in known]
    if strange:
        return undefined | {"why": f"the model knows no class {strange[0]!r} (of {len(known)} it has)"}
    labels = [int(known[images.classes[index]]) for index in _class_index(images)]
    right = np.asarray(predicted.numpy() == np.asarray(labels), np.float64)
    low, high = np.quantile(draws(len(right), 1000) @ right, [0.025, 0.975])
    return {"accuracy": float(right.mean()), "low": float(low), "high": float(high), "images": len(right)}


def _class_index(images: Images) -> list[int]:
    """The place of each image's class in `images.classes`, from its file's first folder."""
    place = {name: index for index, name in enumerate(images.classes)}
    return [place[Path(file).parts[0]] for file in images.files]

"""Image folders as pixel batches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny
from perpend.errors import InputError
from perpend.images import image_batches, image_folder, read_images

PIL = pytest.importorskip("PIL.Image")


def processor(**settings: object):
    try:
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil as Processor
    except ImportError:  # before transformers had one processor a backend
        from transformers import ViTImageProcessor as Processor
    return Processor(**{"size": {"height": 28, "width": 28}, **settings})


def picture(path: Path, seed: int, size: tuple[int, int] = (40, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    PIL.fromarray(values).save(path)
    return path


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Two classes of three images each, one file that is no image and one that is cut short."""
    for number in range(3):
        picture(tmp_path / "cat" / f"{number}.png", number)
        picture(tmp_path / "dog" / f"{number}.jpg", 10 + number, (30 + number, 50))
    (tmp_path / "cat" / "3.png").write_bytes(b"no image")
    whole = picture(tmp_path / "dog" / "9.jpg", 20).read_bytes()
    (tmp_path / "dog" / "9.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


@torch.no_grad()
def test_a_folder_becomes_pixels_that_the_model_takes(labelled: Path) -> None:
    images = read_images(labelled, processor())
    assert images.pixels.shape == (6, 3, 28, 28)
    assert images.pixels.dtype == torch.float32
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.classes == ("cat", "dog")
    assert images.files[0] == "cat/0.png"
    assert tiny.tiny("vit")(images.pixels).logits.shape == (6, 5)


def test_pixels_are_those_of_the_processor(labelled: Path) -> None:
    from torch.nn.functional import mse_loss

    images = read_images(labelled, processor())
    one = PIL.open(labelled / "dog" / "1.jpg").convert("RGB")
    alone = torch.as_tensor(np.array(processor()(images=one)["pixel_values"]))[0]
    assert mse_loss(images.pixels[images.files.index("dog/1.jpg")], alone) == 0


def test_what_cannot_be_decoded_is_counted_and_named(labelled: Path) -> None:
    images = read_images(labelled, processor())
    assert len(images.failures) == 2
    assert images.failures[0] == "cat/3.png: not an image in a known format"
    assert images.failures[1].startswith("dog/9.jpg: ")
    said = images.describe()
    assert (said["count"], said["failed"], said["classes"]) == (6, 2, 2)
    json.dumps(said)
    with pytest.raises(InputError, match=r"holds 6 readable images and 7 were asked for; 2 could not"):
        read_images(labelled, processor(), count=7)
    with pytest.raises(InputError, match="holds 8 images and 9 were asked"):
        read_images(labelled, processor(), count=9)


def test_seeds_choose_and_the_hash_says_which(labelled: Path) -> None:
    first = read_images(labelled, processor(), count=4)
    assert first.files == ("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.jpg")
    other, again = (read_images(labelled, processor(), count=4, seed=1) for _ in range(2))
    assert other.files == again.files != first.files
    assert torch.equal(other.pixels, again.pixels)
    assert other.sha256 == again.sha256 != first.sha256
    expected = hashlib.sha256()
    for name in first.files:
        expected.update(f"{name}\n{hashlib.sha256((labelled / name).read_bytes()).hexdigest()}\n".encode())
    assert first.sha256 == expected.hexdigest()


@pytest.mark.parametrize("size", [1, 4, 100])
def test_batches_are_the_same_images(size: int, labelled: Path) -> None:
    whole = read_images(labelled, processor())
    batches = list(image_batches(labelled, processor(), size=size))
    assert max(len(b.files) for b in batches) <= size
    assert torch.equal(torch.cat([b.pixels for b in batches]), whole.pixels)
    assert [label for b in batches for label in b.labels] == whole.labels.tolist()
    assert tuple(failure for b in batches for failure in b.failures) == whole.failures


def test_classes_are_the_models_where_it_knows_them(labelled: Path) -> None:
    known = read_images(labelled, processor(), label2id={"dog": 3, "cat": 7, "cow": 1})
    assert known.labels.tolist() == [7, 7, 7, 3, 3, 3]
    assert read_images(labelled, processor(), label2id={"dog": 3}).labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0)
    picture(tmp_path / "sub" / "b.png", 1)
    images = read_images(tmp_path, processor())
    assert images.labels is None
    assert images.classes == ()
    assert image_folder(tmp_path).files == (tmp_path / "a.png", tmp_path / "sub" / "b.png")


def test_grey_and_transparent_images_have_three_channels(tmp_path: Path) -> None:
    PIL.new("L", (30, 30), 7).save(tmp_path / "grey.png")
    PIL.new("RGBA", (30, 30), (1, 2, 3, 0)).save(tmp_path / "clear.png")
    assert read_images(tmp_path, processor()).pixels.shape == (2, 3, 28, 28)


def test_a_bomb_is_a_failure_and_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that unpacks to more pixels than is sane."""
    picture(tmp_path / "a.png", 0, (20, 20))
    picture(tmp_path / "b.png", 1, (200, 200))
    monkeypatch.setattr(PIL, "MAX_IMAGE_PIXELS", 1000)
    images = read_images(tmp_path, processor())
    assert images.files == ("a.png",)
    assert "b.png" in images.failures[0]


def test_what_is_no_image_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder of images"):
        read_images(tmp_path / "nowhere", processor())
    with pytest.raises(InputError, match=r"holds no image \(\.jpg"):
        read_images(tmp_path, processor())
    picture(tmp_path / "a.png", 0)
    with pytest.raises(InputError, match="without an image processor"):
        read_images(tmp_path, None)
    with pytest.raises(InputError, match="language model"):
        read_images(tmp_path, SimpleNamespace(convert_ids_to_tokens=None))
    with pytest.raises(InputError, match="at least 1"):
        read_images(tmp_path, processor(), count=0)
    picture(tmp_path / "b.png", 1, (50, 20))
    with pytest.raises(InputError, match="several sizes"):
        read_images(tmp_path, processor(do_resize=False))


@torch.no_grad()
def test_a_trained_image_model_reads_a_folder(labelled: Path, shared: Path) -> None:
    from perpend import load

    model, reader = load(shared / "data" / "models" / "dinov2-small", device="cpu")
    images = read_images(labelled, reader, count=2)
    assert model(images.pixels).last_hidden_state.shape == (2, 257, 384)

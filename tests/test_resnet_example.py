"""The ResNet-34 example: images from disk or from scikit-learn, the same numbers compiled and by hand."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stepgraph.examples import images, resnet

ROOT = Path(__file__).parent.parent
ROWS = 6


def write_cifar(folder: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Five files of random images in one of CIFAR-10's formats; returns all images and labels."""
    generator = np.random.default_rng(0)
    target = folder / f"cifar-10-batches-{kind}"
    target.mkdir()
    everything = []
    for number in range(1, 6):
        pixels = generator.integers(0, 256, (ROWS, 3072), dtype=np.uint8)
        labels = generator.integers(0, 10, ROWS)
        everything.append((pixels, labels))
        if kind == "bin":
            records = np.concatenate([labels[:, None].astype(np.uint8), pixels], 1)
            (target / f"data_batch_{number}.bin").write_bytes(records.tobytes())
        else:
            content = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"training"}
            (target / f"data_batch_{number}").write_bytes(pickle.dumps(content, protocol=2))
    return tuple(np.concatenate(part) for part in zip(*everything, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["bin", "py"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.feature("CLIP-23")
def test_both_formats_of_cifar_are_read(tmp_path: Path, kind: str, nested: bool) -> None:
    pixels, labels = write_cifar(tmp_path, kind)
    found = images.load_images(tmp_path if nested else tmp_path / f"cifar-10-batches-{kind}")
    assert found.name == "CIFAR-10"
    assert found.flips
    assert np.array_equal(found.pixels.reshape(-1, 3072).numpy(), pixels)
    assert found.labels.tolist() == labels.tolist()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, "bin")
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(images.ImagesError, match="no multiple of 3073"):
        images.load_images(tmp_path)
    file.write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(images.ImagesError, match="0 to 9"):
        images.load_images(tmp_path)
    file.unlink()
    with pytest.raises(images.ImagesError, match="4 of CIFAR-10's 5"):
        images.load_images(tmp_path)


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, "py")
    file = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    file.write_bytes(pickle.dumps({b"data": Malicious(), b"labels": [1]}))
    with pytest.raises(images.ImagesError, match="wants to load"):
        images.load_images(tmp_path)


def test_without_cifar_there_are_real_digits(tmp_path: Path) -> None:
    found = images.load_images(tmp_path)
    assert "digits" in found.name
    assert not found.flips
    assert found.pixels.shape == (1797, 3, 32, 32)
    assert found.pixels.float().std() > 50
    assert sorted(set(found.labels.tolist())) == list(range(10))


def test_batches_are_shuffled_cropped_and_mirrored() -> None:
    pixels = torch.arange(4 * 3 * 1024, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(4, 3, 32, 32)
    source = images.Images("ramp", pixels, torch.arange(4), flips=True)
    generator = torch.Generator().manual_seed(0)
    epochs = [list(source.batches(4, generator)) for _ in range(12)]
    orders = {tuple(labels.tolist()) for ((_, labels),) in epochs}
    assert len(orders) > 4
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (images.CIFAR_MEAN, images.CIFAR_STD))
    normalised = (pixels.float() / 255 - mean) / std
    padded = torch.nn.functional.pad(normalised, [4] * 4)
    crops = {}
    for top, left in itertools.product(range(9), range(9)):
        crop = padded[..., top : top + 32, left : left + 32]
        crops[top, left, False], crops[top, left, True] = crop, crop.flip(-1)
    seen = set()
    for ((batch, labels),) in epochs:
        for image, label in zip(batch, labels.tolist(), strict=True):
            matches = [place for place, crop in crops.items() if torch.equal(crop[label], image)]
            assert len(matches) == 1
            seen.add(matches[0])
    assert {flip for _, _, flip in seen} == {False, True}
    assert len({top for top, _, _ in seen}) > 4


def test_it_is_resnet_34() -> None:
    model = resnet.ResNet34()
    assert sum(p.numel() for p in model.parameters()) == 21_289_802, "torchvision's, with ten classes"
    assert sum(isinstance(m, torch.nn.Conv2d) and m.kernel_size != (1, 1) for m in model.modules()) == 33
    assert model(torch.ones(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.feature("CLIP-23")
def test_four_iterations_are_the_same_compiled_and_by_hand(tmp_path: Path) -> None:
    command = [sys.executable, "examples/train_resnet.py", "--batch", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DATA": str(tmp_path)}
    outputs = [
        subprocess.run(
            [*command, *extra], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=True
        ).stdout
        for extra in ([], ["--eager"])
    ]
    lines = [re.findall(r"iteration \d: loss .*", text) for text in outputs]
    assert len(lines[0]) == 4
    assert lines[0] == lines[1]
    assert len({line.partition("first parameter")[2] for line in lines[0]}) == 4
    assert f"no CIFAR-10 in {tmp_path}" in outputs[0]


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DATA": str(tmp_path)}
    for arguments, says in ([["--batch", "0"], "1 or more"], [["--batch", "5000"], "more than the 1797 images"]):
        done = subprocess.run(
            [sys.executable, "examples/train_resnet.py", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode != 0
        assert says in done.stderr
        assert "Traceback" not in done.stderr

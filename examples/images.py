"""CIFAR-10 from disk, or the handwritten digits that ship with scikit-learn, as augmented batches of 32 x 32 colour images."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIDE = 32
PADDING = 4
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)
_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py", "")


class ImagesError(RuntimeError):
    """There are no images to train on, or they are not what they should be."""


@dataclass(frozen=True)
class Images:
    """A training set.

    Attributes:
        name: what it is.
        pixels: uint8 [N, 3, 32, 32].
        labels: int64 [N], 0 to 9.
        flips: whether a mirrored image is as good as the image.
    """

    name: str
    pixels: Tensor
    labels: Tensor
    flips: bool

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of shuffled, augmented, normalised batches; the last, smaller one is left out.

        Each image is padded by 4 and cropped to 32 x 32 at a random place, and mirrored half of the time.
        """
        mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
        order = torch.randperm(len(self.labels), generator=generator)
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            pixels = (self.pixels[chosen].float() / 255 - mean) / std
            yield self._augmented(pixels, generator), self.labels[chosen]

    def _augmented(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        padded = torch.nn.functional.pad(pixels, [PADDING] * 4)
        corners = torch.randint(2 * PADDING + 1, (len(pixels), 2), generator=generator).tolist()
        mirrored = torch.rand(len(pixels), generator=generator) < (0.5 if self.flips else 0.0)
        crops = [
            image[:, top : top + SIDE, left : left + SIDE] for image, (top, left) in zip(padded, corners, strict=True)
        ]
        return torch.stack([crop.flip(-1) if flip else crop for crop, flip in zip(crops, mirrored, strict=True)])


def load_images(folder: Path) -> Images:
    """CIFAR-10 where ``folder`` has it, in its binary or its Python version; otherwise scikit-learn's digits.

    Raises:
        ImagesError: files of CIFAR-10 are damaged, or there is neither.
    """
    for name in _FOLDERS:
        for suffix, read in ((".bin", _read_binary), ("", _read_python)):
            files = [folder / name / f"data_batch_{i}{suffix}" for i in range(1, 6)]
            present = [file for file in files if file.is_file()]
            if present and len(present) < len(files):
                raise ImagesError(f"{folder / name} has {len(present)} of CIFAR-10's 5 training files")
            if present:
                pixels, labels = zip(*(read(file) for file in files), strict=True)
                return Images("CIFAR-10", torch.cat(pixels), torch.cat(labels), flips=True)
    return _digits()


def _read_binary(file: Path) -> tuple[Tensor, Tensor]:
    """Records of one byte for the label and 3 x 32 x 32 for the image."""
    record = 1 + 3 * SIDE * SIDE
    data = file.read_bytes()
    if not data or len(data) % record:
        raise ImagesError(f"{file} has {len(data)} bytes, no multiple of {record}: it is damaged or another file")
    rows = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).reshape(-1, record)
    return _checked(file, rows[:, 1:].reshape(-1, 3, SIDE, SIDE), rows[:, 0].long())


def _read_python(file: Path) -> tuple[Tensor, Tensor]:
    try:
        content = _ArraysOnly(io.BytesIO(file.read_bytes()), encoding="bytes").load()
        pixels = torch.from_numpy(np.ascontiguousarray(content[b"data"], np.uint8)).reshape(-1, 3, SIDE, SIDE)
        labels = torch.tensor(content[b"labels"])
    except (pickle.UnpicklingError, KeyError, ValueError, TypeError, EOFError) as error:
        raise ImagesError(f"{file} is not a file of CIFAR-10's Python version: {error}") from error
    return _checked(file, pixels, labels)


def _checked(file: Path, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if len(pixels) != len(labels) or not bool(((labels >= 0) & (labels < 10)).all()):
        raise ImagesError(f"{file}: {len(pixels)} images, {len(labels)} labels, of which each must be 0 to 9")
    return pixels, labels


class _ArraysOnly(pickle.Unpickler):
    """Loads nothing but what numpy's arrays are pickled with: a downloaded file must not run code."""

    _ALLOWED = frozenset(
        {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}")
        return super().find_class(module, name)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImagesError(
            "CIFAR-10 is not there, and neither is scikit-learn, whose digits would do instead.\n"
            "Set DATA to the folder that holds cifar-10-batches-py or cifar-10-batches-bin, or: pip install scikit-learn"
        ) from error
    digits = load_digits()
    gray = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / 16)  # 8 x 8, values 0 to 16
    pixels = torch.nn.functional.interpolate(gray, size=(SIDE, SIDE), mode="bilinear").round().to(torch.uint8)
    labels = torch.from_numpy(digits.target).long()
    return Images("scikit-learn's handwritten digits", pixels.expand(-1, 3, -1, -1).contiguous(), labels, flips=False)

"""The text the demo learns from: the documentation that every CPython ships, as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

PIECE_BYTES = 1024
HELD_OUT_EVERY = 20

_TYPOGRAPHY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "--", "…": "..."})
_RULER_OR_TABLE = re.compile(r"^[ \t]*(([*=~^\"'#.-])\2{3,}|[|+].*)[ \t]*$", re.MULTILINE)

Batch = tuple[Tensor, Tensor]


class TextError(RuntimeError):
    """There is no text to train on, or too little of it."""


def python_topics() -> str:
    """The text behind `help("TOPIC")`: about half a megabyte of English with examples."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TextError(
            "this Python comes without its help topics (the module pydoc_data.topics), the text that the demo learns "
            "from; some slim distributions strip it.\n"
            "Use a Python from python.org, conda or uv, or give any UTF-8 text of 100 kB or more: --text FILE"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path | None) -> str:
    """The text in `path`, or Python's help topics."""
    if path is None:
        return python_topics()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read the text {path}: {error}") from error


def paragraphs(text: str) -> list[str]:
    """The distinct paragraphs of `text`, plain in typography and without tables.

    The help topics repeat whole sections in one another; a paragraph that came before is dropped, or training text
    would turn up in the held-out part.
    """
    plain = _RULER_OR_TABLE.sub("", text.translate(_TYPOGRAPHY).replace("\r\n", "\n"))
    found = (paragraph.strip("\n").rstrip() for paragraph in re.split(r"\n[ \t]*\n", plain))
    distinct = {" ".join(paragraph.split()): paragraph for paragraph in found if paragraph}
    return list(distinct.values())


def pieces(parts: Iterable[str]) -> list[bytes]:
    """Neighbouring paragraphs, joined into pieces of at least `PIECE_BYTES` bytes; only the last may be shorter."""
    done, current = [], b""
    for part in parts:
        current += part.encode() + b"\n\n"
        if len(current) >= PIECE_BYTES:
            done.append(current)
            current = b""
    return [*done, current] if current else done


def split(text: str) -> tuple[bytes, bytes]:
    """Training and held-out bytes: every `HELD_OUT_EVERY`-th piece is held out, spread over the whole text."""
    parts = pieces(paragraphs(text))
    held_out = parts[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    train = [piece for i, piece in enumerate(parts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    return b"".join(train), b"".join(held_out)


def opening(data: bytes, longest: int) -> bytes:
    """The first words, at most `longest` bytes, of the first full line of prose in `data` (or simply of `data`)."""
    prose = re.search(rb"^[A-Z][a-z ][^\n]{56,}$", data, re.MULTILINE)
    start = data[prose.start() if prose else 0 :][:longest]
    end = start.rfind(b" ", 1)
    return start[:end] if end > 0 else start


class Corpus:
    """Training batches by step number, and fixed windows for evaluation.

    A batch depends on the seed and the step alone: it draws from a generator of its own and leaves torch's alone.
    """

    def __init__(self, text: str, *, context: int, batch_size: int, seed: int) -> None:
        train, held_out = split(text)
        if min(len(train), len(held_out)) <= context + 1:
            raise TextError(
                f"too little text: {len(train)} bytes to learn and {len(held_out)} held out; each needs more than the context "
                f"of {context}, so give a longer --text or a shorter --context"
            )
        self.train, self.held_out = _tensor(train), _tensor(held_out)
        self.prompt = opening(held_out, min(context, 60))
        self.context, self.batch_size, self.seed = context, batch_size, seed

    def batch(self, step: int) -> Batch:
        """The inputs and next-byte targets of training step `step`."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        starts = torch.randint(len(self.train) - self.context, (self.batch_size, 1), generator=generator)
        inputs = starts + torch.arange(self.context)
        return self.train[inputs], self.train[inputs + 1]

    def held_out_windows(self) -> Batch:
        """The whole held-out text, cut into windows that do not overlap."""
        return self._windows(self.held_out, (len(self.held_out) - 1) // self.context)

    def train_windows(self) -> Batch:
        """As many windows of the training text, evenly spread."""
        return self._windows(self.train, (len(self.held_out) - 1) // self.context)

    def _windows(self, data: Tensor, count: int) -> Batch:
        stride = (len(data) - 1) // count
        inputs = (torch.arange(count) * stride).unsqueeze(1) + torch.arange(self.context)
        return data[inputs], data[inputs + 1]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()

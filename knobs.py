"""The environment variables that stepgraph reads; docs/knobs.md lists them, and a test compares."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError

KNOBS: dict[str, str] = {
    "STEPGRAPH_VERIFY": "0: never verify graphs; 1 (default): every rule after every pass; 2: also re-derive all metadata",
    "STEPGRAPH_DUMP": "folder for the graph's text form before and after each pass, in a subfolder for each rewrite",
    "STEPGRAPH_DISABLE": "names of optional passes to leave out, separated by commas",
    "STEPGRAPH_KEEP_HEAP": "0: leave the C library's allocator as it is; 1 (default): what a step on the CPU frees stays with "
    "the process for the next step, where the C library is glibc",
    "STEPGRAPH_CACHE": "folder for what `stepgraph calibrate` measured; by default stepgraph in the user's cache folder",
    "XDG_CACHE_HOME": "the user's cache folder, where it is not ~/.cache",
    "RANK": "rank of this process, as launchers set it: step logs tell it, and rank 0 writes files",
}


def verify_level() -> int:
    """``STEPGRAPH_VERIFY``."""
    text = os.environ.get("STEPGRAPH_VERIFY", "1")
    if text not in ("0", "1", "2"):
        raise ConfigError(f"STEPGRAPH_VERIFY must be 0, 1 or 2, got {text!r}")
    return int(text)


def dump_folder() -> str | None:
    """``STEPGRAPH_DUMP``."""
    return os.environ.get("STEPGRAPH_DUMP") or None


def disabled_passes() -> tuple[str, ...]:
    """``STEPGRAPH_DISABLE``."""
    return tuple(name.strip() for name in os.environ.get("STEPGRAPH_DISABLE", "").split(",") if name.strip())


def keeps_heap() -> bool:
    """``STEPGRAPH_KEEP_HEAP``."""
    text = os.environ.get("STEPGRAPH_KEEP_HEAP", "1")
    if text not in ("0", "1"):
        raise ConfigError(f"STEPGRAPH_KEEP_HEAP must be 0 or 1, got {text!r}")
    return text == "1"


def cache_folder() -> Path:
    """``STEPGRAPH_CACHE``, or a folder in the user's cache folder; it may not exist yet."""
    own = os.environ.get("STEPGRAPH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stepgraph"


def launched_rank() -> int | None:
    """``RANK``, which ``torchrun`` and other launchers set."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None

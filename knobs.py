"""The environment variables that stepgraph reads; docs/knobs.md lists them, and a test compares."""

from __future__ import annotations

import os

from .errors import ConfigError

KNOBS: dict[str, str] = {
    "STEPGRAPH_VERIFY": "0: never verify graphs; 1 (default): every rule after every pass; 2: also re-derive all metadata",
    "STEPGRAPH_DUMP": "folder for the graph's text form before and after each pass, in a subfolder for each rewrite",
    "STEPGRAPH_DISABLE": "names of optional passes to leave out, separated by commas",
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


def launched_rank() -> int | None:
    """``RANK``, which ``torchrun`` and other launchers set."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None

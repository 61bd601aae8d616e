"""What a refusal has to say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stepgraph as sg


def refusal_of(run: Callable[[], Any]) -> str | None:
    """What stepgraph says where it refuses to run; None where it runs."""
    try:
        run()
    except sg.StepGraphError as error:
        return str(error)
    return None


def line_of(marker: str, file: str) -> int:
    """Number of the line of a file that ends with the comment `# marker`."""
    lines = Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, start=1) if line.endswith(f"# {marker}")]
    return number


def assert_says(error: sg.CaptureError, *, module: str | None, marker: str | None, file: str | None = None) -> None:
    """Module path, source line and remedy are there, and in the message; a marker is one of `line_of` in a file."""
    assert error.module_path == module
    if marker is not None:
        assert error.source_line is not None
        filename, _, number = error.source_line.rpartition(":")
        assert os.path.samefile(filename, file)
        assert int(number) == line_of(marker, file)
        assert error.source_line in str(error)
    assert error.remedy
    assert error.remedy in str(error)
    assert (module or "(root)") in str(error)

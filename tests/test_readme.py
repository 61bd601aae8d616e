"""The README's example runs as it is printed, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("bitwise equal to eager (1 loss, 1 gradient norm, 4 parameters")


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", path.read_text()) if "://" not in t]
    missing = [t for t in targets if t and not (path.parent / t).exists()]
    assert not missing

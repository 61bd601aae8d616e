"""The rules of the house, checked from the source."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepgraph
from stepgraph.knobs import KNOBS

ROOT = Path(inspect.getfile(stepgraph)).parent
TESTS = Path(__file__).parent

FLOORS = {
    "errors": 0,
    "torch_compat": 0,
    "device": 0,
    "knobs": 0,
    "graph": 1,
    "planner": 2,
    "capture": 2,
    "passes": 3,
    "runtime": 4,
    "api": 5,
    "tools": 6,
    "__init__": 7,  # the public names
}
"""Imports go down only: a module may import its own package and what is on a lower floor."""

FORBIDDEN = {
    "passes": {"runtime", "capture"},
    "planner": {"capture"},
    "capture": {"planner"},
}
LONGEST_FILE = 600
ALLOWED_PRIVATE_CHAINS = {
    "torch._ops.OpOverload": "the type of an FX target; torch has no public name for it",
}


def _packages() -> list[Path]:
    """The package's folders, the root first."""
    folders = [path.parent for path in ROOT.glob("*/__init__.py")]
    return [ROOT, *sorted(f for f in folders if f.name not in ("tests", "examples", "benchmarks", "docs"))]


SOURCES = [path for folder in _packages() for path in sorted(folder.glob("*.py"))]
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), filename=str(path))


def part_of(path: Path) -> str:
    """The package or the module of the root that a file belongs to."""
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[str, int]]:
    """Parts of the package that a file imports, with line numbers."""
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.ImportFrom) and 0 < node.level < depth:
            yield part_of(path), node.lineno


# Layers.


def test_sources_are_found() -> None:
    assert len(SOURCES) > 30
    assert {"graph", "capture", "passes", "runtime"} <= {part_of(path) for path in SOURCES}


def test_every_part_has_a_floor() -> None:
    assert {part_of(path) for path in SOURCES} <= FLOORS.keys()


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_go_down_only(path: Path) -> None:
    mine = part_of(path)
    for name, line in imported_parts(path):
        assert name in FLOORS, f"line {line} imports {name}, which has no floor"
        is_below = FLOORS[name] < FLOORS[mine] or (FLOORS[name] == FLOORS[mine] == 0)
        assert name == mine or is_below, f"line {line}: {mine} (floor {FLOORS[mine]}) imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_forbidden_imports(path: Path) -> None:
    imported = {name for name, _ in imported_parts(path)}
    assert not imported & FORBIDDEN.get(part_of(path), set())


@pytest.mark.parametrize("path", [p for p in SOURCES if part_of(p) == "passes"], ids=lambda p: p.name)
def test_passes_know_only_the_plan_of_the_planner(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 2 and (node.module or "").startswith("planner"):
            assert {alias.name for alias in node.names} == {"Plan"}


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_inside_the_package_are_relative(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "stepgraph" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] != "stepgraph"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_no_module_imports_a_private_name_of_another_package(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level > 1:
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"line {node.lineno} imports {private}"


# Private names of torch.


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_torch_imports(tree: ast.Module) -> Iterator[str]:
    """Imports of private modules or names of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "torch" and any(map(_is_private, rest)):
                yield name


def private_torch_chains(tree: ast.Module) -> Iterator[str]:
    """Attribute chains such as `torch._C.x`; what follows `torch.ops.namespace` is an operator's name."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        names: list[str] = []
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            names.insert(0, base.attr)
            base = base.value
        if isinstance(base, ast.Name) and base.id == "torch":
            checked = names[:1] if names[0] == "ops" else names
            if any(map(_is_private, checked)):
                yield ".".join(["torch", *names])


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.name != "torch_compat.py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_private_names_of_torch_are_in_one_file(path: Path) -> None:
    assert not list(private_torch_imports(tree_of(path)))
    chains = set(private_torch_chains(tree_of(path)))
    assert chains <= ALLOWED_PRIVATE_CHAINS.keys(), sorted(chains - ALLOWED_PRIVATE_CHAINS.keys())


def test_private_names_are_recognised() -> None:
    source = """
import torch._dynamo
import torch
from torch._C import x
from torch.utils import _pytree
from torch.nn import Module
torch._C._autograd.f()
torch.nn._x.y
torch.ops.aten._foreach_mul_.Tensor
torch._ops.OpOverload
self._torch
"""
    tree = ast.parse(source)
    assert set(private_torch_imports(tree)) == {"torch._dynamo", "torch._C.x", "torch.utils._pytree"}
    assert set(private_torch_chains(tree)) == {"torch._C._autograd.f", "torch.nn._x.y", "torch._ops.OpOverload"}


def test_every_private_import_says_where_it_was_seen() -> None:
    path = ROOT / "torch_compat.py"
    lines = path.read_text().splitlines()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("torch"):
            names = [node.module or "", *(alias.name for alias in node.names)]
            if any(_is_private(part) for name in names for part in name.split(".")):
                assert re.search(r"# seen in \d+\.\d+", lines[node.lineno - 1]), lines[node.lineno - 1]


def test_every_export_of_torch_compat_is_defined_and_used() -> None:
    exported: list[str] = ast.literal_eval(
        next(
            node.value
            for node in tree_of(ROOT / "torch_compat.py").body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
        )
    )
    from stepgraph import torch_compat

    others = "\n".join(path.read_text() for path in SOURCES if path.name != "torch_compat.py")
    for name in exported:
        assert hasattr(torch_compat, name)
        assert re.search(rf"\b{name}\b", others), f"{name} is exported and nobody uses it"
    assert exported == sorted(exported)


# Size and documentation.


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public classes, functions and methods without a docstring; overloads of a base class's method need none."""
    yield from _undocumented_in(tree.body, "", has_bases=False)


def _undocumented_in(body: list[ast.stmt], prefix: str, *, has_bases: bool) -> Iterator[str]:
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        is_class = isinstance(node, ast.ClassDef)
        if ast.get_docstring(node) is None and (is_class or not has_bases):
            yield f"{prefix}{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented_in(node.body, f"{node.name}.", has_bases=bool(node.bases))


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_public_names_are_documented(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "the module says what it is for"
    assert not list(undocumented(tree))


def test_undocumented_names_are_recognised() -> None:
    source = '''
def f(): ...
def g():
    """Says."""
def _h(): ...
class A:
    def m(self): ...
class B(A):
    """Says."""
    def m(self): ...
'''
    assert [name.split(" ")[0] for name in undocumented(ast.parse(source))] == ["f", "A", "A.m"]


# Packaging.


def _listed_packages() -> list[str]:
    """`[tool.setuptools] packages`; read without tomllib, which Python 3.10 lacks."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[tool.setuptools]")[1].split("\n[")[0]
    found = re.search(r"^packages = (\[.*?\])", section, re.MULTILINE | re.DOTALL)
    assert found
    packages: list[str] = ast.literal_eval(found[1])
    return packages


def test_packages_are_listed_and_listed_packages_exist() -> None:
    existing = {".".join(["stepgraph", *folder.relative_to(ROOT).parts]) for folder in _packages()}
    nested = {path.parent.relative_to(ROOT) for path in ROOT.glob("[a-z]*/[a-z]*/__init__.py")}
    assert not nested, "packages are one level deep"
    scripts = {"stepgraph.examples"}  # installed for `stepgraph demo` and the presets; nothing is imported from there
    assert set(_listed_packages()) == existing | scripts
    assert len(_listed_packages()) == len(existing | scripts)


def test_tests_are_no_package() -> None:
    assert not (TESTS / "__init__.py").exists()
    assert (ROOT / "py.typed").exists()


# Markers.


def marker_ids(kind: str) -> dict[str, str]:
    """Ids in `@pytest.mark.feature(...)` or `case(...)` of all tests, each with a file that has it."""
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == kind):
                continue
            if ast.unparse(node.func) == f"pytest.mark.{kind}":
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{path.name}:{node.lineno} has an id that is no literal"
                    assert isinstance(argument.value, str), f"{path.name}:{node.lineno} has an id that is no text"
                    found.setdefault(argument.value, path.name)
    return found


@pytest.mark.parametrize(("kind", "page"), [("feature", "features.md"), ("case", "cases.md")])
def test_marker_ids_are_documented(kind: str, page: str) -> None:
    ids = marker_ids(kind)
    assert ids, f"no test has a {kind} marker"
    text = (ROOT / "docs" / page).read_text()
    known = set(re.findall(r"[A-Z]+-?\d+", text))
    unknown = {name: where for name, where in ids.items() if name not in known}
    assert not unknown, f"not in docs/{page}: {unknown}"


def test_knobs_are_documented() -> None:
    text = (ROOT / "docs" / "knobs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == list(KNOBS)
    assert dict(rows) == KNOBS


@pytest.mark.parametrize("kind", ["feature", "case"])
def test_marker_ids_look_like_ids(kind: str) -> None:
    pattern = r"[A-Z]+-\d+" if kind == "feature" else r"[A-Z]\d+"
    assert all(re.fullmatch(pattern, name) for name in marker_ids(kind))

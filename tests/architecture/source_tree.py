"""The project's files, its modules, and what these import, read from their syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("configs", "engine", "kernels", "kvcache", "server")


@dataclass(frozen=True)
class Module:
    """A module of the package. ``name``: as it is imported, without the leading "radixserve."."""

    path: Path
    name: str

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    def words(self) -> set[str]:
        """All plain names and attributes that occur."""
        nodes = list(ast.walk(self.tree))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}

    def imports(self) -> set[str]:
        """Full names of all modules imported anywhere in this one (``from a import b`` gives ``a.b`` too)."""
        return {name for node in ast.walk(self.tree) for name in _imported(node)}

    def imports_when_loaded(self) -> set[str]:
        """Those imported when this module is imported, that is, not inside functions."""
        return {name for node in _outside_functions(self.tree) for name in _imported(node)}


@cache
def modules(*parts: str) -> list[Module]:
    """All modules, or those of some parts."""
    if parts:
        return [module for module in modules() if module.part in parts]
    return [_module(path) for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]


@cache
def tracked(pattern: str = "*") -> list[Path]:
    """Files of the project, those that are not committed yet too."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.split() if (path := ROOT / name).is_file()]


def project_modules(names: set[str]) -> set[str]:
    """Of imported ``names`` those of this project, without the leading "radixserve."."""
    return {name.removeprefix("radixserve.") for name in names if name.startswith("radixserve.")} - {"__version__"}


def foreign_packages(names: set[str]) -> set[str]:
    """The top-level packages of ``names`` that are neither ours nor the standard library's."""
    return {name.partition(".")[0] for name in names} - {"radixserve", "__future__"} - sys.stdlib_module_names


def _module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return Module(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def _imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases)
        case ast.ImportFrom(module=str(module), level=0, names=aliases):
            yield module
            yield from (f"{module}.{alias.name}" for alias in aliases)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _outside_functions(child)

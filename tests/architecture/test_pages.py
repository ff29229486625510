"""What documentation and docstrings name exists, and the map of the project leaves out nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from radixserve.engine.families.registry import FAMILIES
from radixserve.tests.architecture.source_tree import ROOT, modules, tracked

ARCHITECTURE = ROOT / "docs" / "architecture.md"
_FILE = re.compile(r"(?<![\w./*:-])(?:[\w-]+/)*[\w-]+\.(?:py|md|cpp|sh)\b")
_CLASS = re.compile(r"(?<!`)`{1,2}((?:[A-Z][a-z0-9]+){2,})(?:\([^`]*\))?`{1,2}(?!`)")
_OWNER = re.compile(r"`([\w/]+\.py): ([A-Z]\w+)`(?:, `([A-Z]\w+)`)?")


@cache
def texts() -> dict[Path, str]:
    """All pages, and the modules of the package."""
    paths = [*tracked("*.md"), *(module.path for module in modules())]
    return {path: path.read_text(encoding="utf-8") for path in paths}


@cache
def words_of_code() -> set[str]:
    paths = [*tracked("*.py"), *tracked("*.h")]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


def missing_files(page: Path, text: str) -> Iterator[str]:
    names = {path.name for path in tracked()}
    for name in set(_FILE.findall(text)) - {"llama.cpp"}:
        places = [folder / name for folder in (ROOT, ROOT / "tests", page.parent)]
        if not any(place.exists() for place in places) and ("/" in name or name not in names):
            yield f"{page.relative_to(ROOT)}: {name}"


def test_files_that_are_named_exist() -> None:
    assert [missing for page, text in texts().items() for missing in missing_files(page, text)] == []


def test_classes_that_are_named_exist() -> None:
    named = {name for text in texts().values() for name in _CLASS.findall(text)}
    assert len(named) > 50
    assert named - words_of_code() == set()


def test_owners_of_state_are_classes_of_their_files() -> None:
    owners = _OWNER.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(owners) > 20
    for file, *classes in owners:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert [name for name in classes if name and f"\nclass {name}" not in text] == [], file


def names_on_the_map() -> set[str]:
    """Modules and folders, as "part/name" and "part/folder/"; those of kernels/ stand in a page of their own."""
    rows = re.findall(r"^\| `(\w+/)` \|.*\| (.*) \|$", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    rows.append(("kernels/", (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")))
    return {part + name.removesuffix(".py") for part, names in rows for name in re.findall(r"`([^`\s]+)`", names)}


def test_every_module_is_on_the_map_by_itself_or_with_its_folder() -> None:
    paths = [module.path.relative_to(ROOT) for module in modules() if module.path.name != "__init__.py"]
    patterns = [f"{name}*" if name.endswith("/") else name for name in names_on_the_map()]
    assert [path for path in map(str, paths) if not any(fnmatch(path.removesuffix(".py"), p) for p in patterns)] == []


def test_the_map_names_nothing_that_is_gone() -> None:
    names = {name for name in names_on_the_map() if not name.startswith("kernels/")}
    assert len(names) > 80
    assert [name for name in names if not (ROOT / name if name.endswith("/") else ROOT / f"{name}.py").exists()] == []


def test_the_page_of_models_has_every_class_that_can_be_served() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for family in FAMILIES for name in family.hf_classes if f"`{name}`" not in page] == []


def test_the_readme_lists_the_folders_with_code() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Folders")[2]
    listed, part = set(), ""
    for indent, name in re.findall(r"^( {4}| {6})(\w+)/ ", tree, re.MULTILINE):
        part = name if len(indent) == 4 else part
        listed.add(name if name == part else f"{part}/{name}")
    folders = {str(module.path.parent.relative_to(ROOT)) for module in modules()}
    assert folders <= listed
    assert [name for name in listed if not (ROOT / name).is_dir()] == []

"""Links between the pages of the documentation lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from radixserve.tests.architecture.source_tree import ROOT, tracked

_LINK = re.compile(r"\[[^][]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(target))


def test_links_lead_somewhere() -> None:
    links = [
        (page, link)
        for page in tracked("*.md")
        for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
        if "://" not in link and not link.startswith("mailto:")
    ]
    assert len(links) > 50
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in links if leads_nowhere(page, link)] == []


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    pending = [(ROOT / "README.md").resolve()]
    while pending:
        page = pending.pop()
        reached.add(page)
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in reached:
                pending.append(target)
    assert set((ROOT / "docs").resolve().glob("*.md")) - reached == set()

"""README.md of this folder has every case, and the tests that it names exist."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
INDEX = (FOLDER / "README.md").read_text()


def test_every_case_has_a_line() -> None:
    cases = [line.split("|")[1].strip() for line in INDEX.splitlines() if re.match(r"\| H\d\d ", line)]
    assert cases == [f"H{number:02}" for number in range(1, 45)]


def test_the_tests_named_in_the_index_exist() -> None:
    file = ""
    for name in re.findall(r"`([\w/]*(?:\.py)?(?:::\w+)?)`", INDEX):
        path, _, function = name.partition("::")
        if not path.endswith(".py") and not function:
            continue
        file = path or file
        found = FOLDER / file if (FOLDER / file).exists() else FOLDER.parent / file
        assert found.exists(), name
        assert not function or re.search(rf"def {function}\(", found.read_text()), name

from runpy import run_path

from radixserve.tests.architecture.source_tree import ROOT


def test_the_page_of_options_is_up_to_date() -> None:
    page = run_path(str(ROOT / "scripts" / "configuration_page.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["render"](), "run python scripts/configuration_page.py"

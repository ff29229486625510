from radixserve.engine.loading import ProgressLines, shown_progress


def test_a_phase_is_told_when_it_begins_and_when_it_is_done() -> None:
    lines: list[str] = []
    show = ProgressLines(lines.append)
    for count in range(501):
        show(f"loading weights: {count} of 500 MB", count / 500)
    show("warming up", 0.0)
    assert lines == ["loading weights: 0 of 500 MB (0%)", "loading weights: 500 of 500 MB", "warming up (0%)"]


def test_there_is_no_bar_where_no_terminal_is() -> None:
    lines: list[str] = []
    with shown_progress(lines.append) as show:
        show("sizing the KV cache", 1.0)
    assert lines == ["sizing the KV cache"]

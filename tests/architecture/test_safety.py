"""What the project must never do, whoever asks: unpickle, evaluate, or trust a clock that somebody can set."""

from radixserve.tests.architecture.source_tree import modules

# Names that execute what they read. (``exec`` of a process, as in os.execvp, is another word.)
EXECUTES = {"eval", "exec", "pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "yaml"}
# Who tells the date: timestamps in answers, and the templates' strftime_now. All else counts seconds monotonically.
TELLS_THE_DATE = {
    "server.frontend",
    "server.protocol.answers",
    "server.protocol.responses",
    "engine.text.chat_template",
}


def test_nothing_that_is_read_is_executed() -> None:
    wrong = {}
    for module in modules():
        packages = {name.partition(".")[0] for name in module.imports()}
        if found := EXECUTES & (packages | module.words()):
            wrong[module.name] = found
        assert "torch.load" not in module.path.read_text(), f"{module.name} unpickles"
    assert wrong == {}


def test_a_clock_that_jumps_changes_nothing() -> None:
    dated = {
        module.name
        for module in modules()
        if "time.time(" in (text := module.path.read_text()) or "datetime.now" in text or "utcnow" in text
    }
    assert dated <= TELLS_THE_DATE

"""The option of the browser tests; leaves out the tests marked ``gpu`` on machines without a CUDA device."""

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="Where the browser tests put pictures (docs/images)")


def pytest_configure(config: pytest.Config) -> None:
    """Tests that a script starts in the background shall not ignore Ctrl-C, nor what they start. How long an example of
    hypothesis takes says more of what else the machine does than of us."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):  # it need not be there for the GPU tests
        from hypothesis import HealthCheck, settings

        settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("unhurried")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        items[:] = [item for item in items if item not in on_gpu]
        config.hook.pytest_deselected(items=on_gpu)


def _has_cuda() -> bool:
    import torch  # only when it matters: it takes seconds to load

    return torch.cuda.is_available()

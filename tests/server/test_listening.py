"""The sockets that workers accept from, and how many workers there are."""

import socket
import sys
from contextlib import ExitStack

import pytest

from radixserve.configs.schema import ServeConfig
from radixserve.engine.errors import ConfigError
from radixserve.server.listening import listen, listen_side_by_side, url_of
from radixserve.server.supervisor import default_api_workers


@pytest.mark.skipif(sys.platform != "linux", reason="one socket for all there")
def test_connections_spread_over_the_sockets_of_all_workers() -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listen_side_by_side("127.0.0.1", 0, 4)]
        address = listeners[0].getsockname()
        assert {listener.getsockname() for listener in listeners} == {address}
        for _ in range(200):
            stack.enter_context(socket.create_connection(address))
        accepted = []
        for listener in listeners:
            listener.setblocking(False)
            accepted.append(sum(1 for _ in iter(lambda listener=listener: _accept(stack, listener), None)))
        assert sum(accepted) == 200 and min(accepted) > 20, accepted


def _accept(stack: ExitStack, listener: socket.socket) -> socket.socket | None:
    try:
        return stack.enter_context(listener.accept()[0])
    except BlockingIOError:
        return None


@pytest.mark.parametrize("first_count", [1, 2])
@pytest.mark.parametrize("second_count", [1, 2])
def test_two_servers_never_share_a_port(first_count: int, second_count: int) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listen_side_by_side("127.0.0.1", 0, first_count)]
        port = listeners[0].getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* is taken"):
            listen_side_by_side("127.0.0.1", port, second_count)
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("first_count", [1, 2])
@pytest.mark.parametrize("second_count", [1, 2])
def test_closing_connections_of_the_last_server_do_not_hold_up_the_next(first_count: int, second_count: int) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listen_side_by_side("127.0.0.1", 0, first_count)]
        address = listeners[0].getsockname()
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(8)]
        for listener in listeners:
            listener.setblocking(False)
            while (connection := _accept(stack, listener)) is not None:
                connection.close()  # whoever closes first is left waiting for a minute
        for client in clients:
            client.close()
    for listener in listen_side_by_side(*address, second_count):
        listener.close()


def test_the_url_can_be_opened_on_this_machine() -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost")):
        with listen(host, 0) as listener:
            assert url_of(listener) == f"http://{shown}:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("cores", "gpu", "options", "expected"),
    [
        (2, False, {}, 1),
        (64, False, {}, 1),
        (16, True, {"device": "cpu"}, 1),
        (2, True, {}, 1),
        (8, True, {}, 2),
        (16, True, {}, 4),
        (128, True, {}, 4),
        (16, True, {"tensor_parallel_size": 8}, 2),
    ],
)
def test_workers_by_default(cores: int, gpu: bool, options: dict[str, object], expected: int) -> None:
    config = ServeConfig.model_validate(options)
    assert config.api_workers is None
    assert default_api_workers(config, cores, gpu=gpu) == expected

"""Requests that end together all the same each have an end of their own."""

from collections.abc import Callable

import pytest

from radixserve.engine.messages import Submit, TokenEvent
from radixserve.engine.sampling_params import SamplingParams
from radixserve.server.errors import RequestFailed
from radixserve.server.metrics import Numbers
from radixserve.server.open_requests import OpenRequests


class Failing:
    """Raises its error, as the task of each request does."""

    def __init__(self) -> None:
        self.error: RequestFailed | None = None

    def on_token(self, token_id: int) -> None: ...

    def on_tokens(self, event: TokenEvent) -> None: ...

    def on_failed(self, error: RequestFailed) -> None:
        with pytest.raises(RequestFailed) as caught:
            raise error
        self.error = caught.value


@pytest.mark.parametrize("end_all", [OpenRequests.fail_all, OpenRequests.lose_all])
def test_requests_that_fail_together_share_no_traceback(
    end_all: Callable[[OpenRequests, RequestFailed], None],
) -> None:
    requests = OpenRequests(lambda message: True, Numbers.zero(), ())
    sinks = [Failing() for _ in range(3)]
    for uid, sink in enumerate(sinks):
        requests.add(Submit(uid, "r", b"", SamplingParams(max_tokens=1)), sink)
    end_all(requests, RequestFailed("gone", code="engine_dead", retry_after_s=2))
    assert len(requests) == 0
    for sink in sinks:
        error = sink.error
        assert error is not None and error.__traceback__ is not None and error.__traceback__.tb_next is None
        assert (error.message, error.code, error.status, error.retry_after_s) == ("gone", "engine_dead", 503, 2)
    assert len({id(sink.error) for sink in sinks}) == 3

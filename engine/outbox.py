"""What is to be told to the frontends, and the counters that go with it. No torch."""

from collections import defaultdict
from collections.abc import Callable

from radixserve.engine.messages import Counters, FinishReason, Outputs, TokenEvent, TokenLogprobs
from radixserve.engine.request import Request


class Outbox:
    """Owns what the frontends have not been sent yet, and the counters. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.counters = Counters()
        self._outputs: dict[bytes, Outputs] = defaultdict(Outputs)

    def tokens(
        self, request: Request, tokens: list[int], finish: FinishReason | None, logprobs: TokenLogprobs | None
    ) -> None:
        """``tokens`` were appended to the output of ``request``, all but the first by force, and ended it if ``finish``
        is set. ``logprobs``: only of a single one."""
        self.counters.generated_tokens += len(tokens)
        self.counters.forced_tokens += len(tokens) - 1
        frontend, uid = request.key
        is_first = len(request.output) == len(tokens)
        if len(tokens) == 1 and finish is None and logprobs is None and not is_first:  # by far the most frequent
            outputs = self._outputs[frontend]
            outputs.uids.append(uid)
            outputs.tokens.append(tokens[0])
            return
        by_stop_id = finish is FinishReason.STOP and tokens[-1] in request.submit.sampling.stop_token_ids
        event = TokenEvent(
            uid,
            tokens,
            finish,
            cached_tokens=request.cached_tokens or 0,
            stop_token_id=tokens[-1] if by_stop_id else None,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=(request.prompt_logprobs or None) if is_first else None,
            queue_s=request.admitted_at - request.arrived_at if is_first else None,
            prefill_s=self._clock() - request.admitted_at if is_first else None,
        )
        self._outputs[frontend].events.append(event)
        self.counters.finished += finish is not None

    def aborted(self, request: Request) -> None:
        self.counters.aborted += 1
        self._end(request, FinishReason.ABORT, None)

    def failed(self, request: Request, error: str) -> None:
        self.counters.failed += 1
        self._end(request, FinishReason.ERROR, error)

    def take(self) -> dict[bytes, Outputs]:
        """What came since the last call, by frontend. Due after each step: tokens of two would lose their order."""
        outputs, self._outputs = self._outputs, defaultdict(Outputs)
        return outputs

    def forget(self, frontend: bytes) -> None:
        """There is nobody left to tell."""
        self._outputs.pop(frontend, None)

    def _end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        event = TokenEvent(request.uid, [], reason, cached_tokens=request.cached_tokens or 0, error=error)
        self._outputs[request.key[0]].events.append(event)

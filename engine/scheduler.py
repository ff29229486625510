"""Decides which requests run, what each step computes, and what ends a request. Plain Python and numpy, no torch.

``docs/scheduler.md`` explains the rules; in short, a step is the decodes of all running requests and, within the
token budget, chunks of the prompts that are being computed.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass

import numpy as np

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.admission import Admission
from radixserve.engine.constraint import ConstraintFailed, TokenConstraint, mask_words
from radixserve.engine.messages import EngineStats, FinishReason, Outputs, Rejected, Submit, TokenLogprobs
from radixserve.engine.outbox import Outbox
from radixserve.engine.pace import PrefillPace
from radixserve.engine.planner import StepPlanner, decode_limit
from radixserve.engine.policy import POLICIES
from radixserve.engine.request import Request, RequestKey, overloaded, refusal
from radixserve.engine.running import RunningRequests
from radixserve.engine.step import Int32s, PrefillChunk, StepPlan, StepResult
from radixserve.kvcache.manager import CacheManager

# Forced tokens for which a request leaves the decodes. The same with and without overlap, so that tokens are the same.
_LEAST_JUMP = 2

_NOT_FINITE = "the model's output for this request was not finite"

PromptLogprobs = dict[int, list[TokenLogprobs | None]]  # by row


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes in tokens, once "auto" is resolved. ``step_tokens``: the budget of one step; ``target_itl_s``: seconds that
    a step with decodes should take at most, however many prompts wait (None: no limit)."""

    max_model_len: int
    vocab_size: int
    step_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    target_itl_s: float | None = None


class Scheduler:
    """Owns all requests, waiting and running, and what their frontends have not been sent yet.

    Use: ``submit`` and ``abort`` at any time; ``schedule`` a plan, launch it, and ``complete`` (or ``fail``) the plans
    in the order they were made. The next plan may be made before the last one is completed. ``take_outputs``, due
    after each, returns what there is to tell. Every accepted request ends in exactly one event with a ``finish``.

    ``shares_prefixes``: requests wait for a prefix that another one computes right now. ``tells_shared``: plans say
    which decode rows share a prefix.
    """

    def __init__(
        self,
        cache: CacheManager,
        limits: SchedulerLimits,
        options: SchedulerOptions,
        *,
        shares_prefixes: bool = True,
        tells_shared: bool = False,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policy = POLICIES[options.schedule_policy]
        self._cache = cache
        self._limits = limits
        self._rank = policy.rank
        self._options = options
        self._clock = clock
        self._pace = PrefillPace(limits.target_itl_s, clock)
        self._pool_tokens = cache.stats().total_tokens
        self._seeds = random.Random(seed)
        self._requests: dict[RequestKey, Request] = {}  # accepted and not ended
        self._running = RunningRequests(cache, tells_shared=tells_shared)
        self._planner = StepPlanner(cache, self._running, limits.eos_token_ids)
        self._admission = Admission(
            cache,
            self._running,
            policy,
            max_running=decode_limit(len(cache.page_table), limits.step_tokens),
            shares_prefixes=shares_prefixes,
        )
        self._arrivals = 0
        self._outbox = Outbox(clock)

    # ---- requests come and go ----

    @property
    def requests(self) -> Collection[Request]:
        """Accepted and not ended, in the order of their arrival."""
        return self._requests.values()

    @property
    def steps_in_flight(self) -> int:
        return self._outbox.counters.steps - self._running.completed_step

    def submit(self, frontend: bytes, submit: Submit, constraint: TokenConstraint | None = None) -> Rejected | None:
        """Accept a request (None), or say why not. ``constraint`` limits its tokens. Raises ValueError when
        ``prompt_ids`` are not whole int32s."""
        prompt = np.frombuffer(submit.prompt_ids, np.dtype("<i4")).astype(np.int32, copy=False)
        rejected = self._refusal((frontend, submit.uid), submit, prompt)
        if rejected is not None:
            self._outbox.counters.rejected += 1
            return rejected
        sampling = submit.sampling
        room = min(self._limits.max_model_len, self._pool_tokens)
        # The end of a structure is an end all the same: a constraint allows the token nowhere else.
        eos = () if sampling.ignore_eos and constraint is None else self._limits.eos_token_ids
        request = Request(
            key=(frontend, submit.uid),
            submit=submit,
            prompt=prompt,
            arrival=self._arrivals,
            arrived_at=self._clock(),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            max_total=room if sampling.max_tokens is None else min(room, len(prompt) + sampling.max_tokens),
            stops_on=frozenset((*eos, *sampling.stop_token_ids)),
            constraint=constraint,
        )
        self._arrivals += 1
        self._requests[request.key] = request
        self._admission.waiting.add(request)
        return None

    def abort(self, frontend: bytes, uid: int) -> None:
        """End one request, in whatever state it is; nothing happens if it has ended or never was."""
        request = self._requests.get((frontend, uid))
        self._abort([] if request is None else [request])

    def abort_request(self, request_id: str) -> None:
        """End the requests that users know as ``request_id``, or all if it is ""."""
        self._abort([r for r in self._requests.values() if request_id in ("", r.submit.request_id)])

    def forget_frontend(self, frontend: bytes) -> None:
        """Abort all requests of a frontend that is gone, and tell it nothing."""
        self._abort([r for r in self._requests.values() if r.key[0] == frontend])
        self._outbox.forget(frontend)

    def expire(self) -> list[tuple[bytes, Rejected]]:
        """End the requests that have waited too long for their first admission; returns what to tell which frontend."""
        limit_s = self._options.max_queue_time
        latest = self._clock() - limit_s
        expired = [r for r in self._admission.waiting if r.cached_tokens is None and r.arrived_at < latest]
        for request in expired:
            self._outbox.counters.rejected += 1
            self._end(request)
        why = f"the request waited {limit_s:g} s for its turn"
        return [(r.key[0], overloaded(r.uid, why, code="queue_timeout", status=503)) for r in expired]

    def take_outputs(self) -> dict[bytes, Outputs]:
        """What came since the last call, by frontend."""
        return self._outbox.take()

    def stats(self) -> EngineStats:
        cache = self._cache.stats()
        return EngineStats(
            running=len(self._requests) - len(self._admission.waiting),
            waiting=len(self._admission.waiting),
            kv_total_tokens=cache.total_tokens,
            kv_free_tokens=cache.free_tokens,
            kv_evictable_tokens=cache.evictable_tokens,
            evicted_tokens=cache.evicted_tokens,
            **asdict(self._outbox.counters),
        )

    def flush_cache(self) -> int:
        """Forget every prefix that no request holds; returns how many tokens that were."""
        return self._cache.flush()

    def check_integrity(self) -> None:
        """Raise AssertionError if a page or row is lost, or shared by mistake."""
        self._cache.check_integrity()
        assert self._cache.num_free_rows + len(self._running) == len(self._cache.page_table), "a row is lost"

    # ---- steps ----

    def schedule(self) -> StepPlan | None:
        """The next step, or None: then nothing can be launched before a launched step is completed or a request comes.

        When pages run out the youngest running request is retracted, and so is one of a tenant that has more than its
        share of the seats while another waits. That needs all tokens to be known, so with steps in flight the answer is
        None, which makes the caller complete them.
        """
        now_s = self._clock()
        if (over_share := self._admission.seat_to_take_back(now_s)) is not None:
            if self.steps_in_flight:
                return None
            self._retract(over_share)
            self._admission.took_back(over_share, now_s)
        retracted = False
        while True:
            decode_rows = self._running.decodes.due()
            budget = self._limits.step_tokens - len(decode_rows)
            if len(decode_rows):
                budget = self._pace.limit(budget)
            if not retracted:  # else who had to step back would return at once
                self._count_prompts(self._admission.admit(budget))
            shares = self._planner.share(budget)
            if not len(decode_rows) and not shares:
                return None
            if self._planner.reserve_pages(decode_rows, shares):
                self._outbox.counters.steps += 1
                self._pace.planned()
                return self._planner.plan(self._outbox.counters.steps, decode_rows, shares)
            if self.steps_in_flight:
                return None
            self._retract(max(self._running.by_row.values(), key=self._rank))
            retracted = True

    def masks(self, plan: StepPlan) -> Int32s:
        """Which tokens the ``masked`` samples of ``plan`` may be, as ``PendingStep.sample`` takes it. All earlier plans
        are completed."""
        masks = np.full((len(plan.masked), mask_words(self._limits.vocab_size)), -1, np.int32)
        sampled, passed = plan.sampled_rows, self._passed(plan)
        for words, sample in zip(masks, plan.masked, strict=True):
            request = self._running.by_row[sampled[sample]]
            if not request.ended and sample not in passed:
                try:
                    request.fill_mask(words)
                except ConstraintFailed as error:
                    words.fill(-1)
                    self._fail(request, str(error))
        return masks

    def complete(self, plan: StepPlan, result: StepResult) -> None:
        """Take in the tokens of the oldest launched plan."""
        self._running.complete_step(plan.step)
        self._pace.completed(plan)
        tokens = result.token_ids.tolist()
        failed = result.failed.tolist()
        logprobs = result.logprobs or [None] * len(tokens)
        by_row, num_decodes, passed = self._running.by_row, len(plan.decode_rows), self._passed(plan)
        for index, row in enumerate(plan.decode_rows.tolist()):
            if index not in passed or failed[index]:
                self._take_token(by_row[row], tokens[index], failed[index], logprobs[index])
        index = num_decodes
        for chunk in plan.chunks:
            request = by_row[chunk.row]
            if not request.ended and not (chunk.samples and failed[index]):
                self._take_chunk(request, chunk, result.prompt_logprobs)
            if chunk.samples:
                self._take_token(request, tokens[index], failed[index], logprobs[index])
                index += 1
        self._running.release_leaving()

    def fail(self, plan: StepPlan, reason: str) -> None:
        """The oldest launched plan raised: its requests end with an error, the others go on."""
        self._running.complete_step(plan.step)
        self._pace.completed(plan)
        rows = [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks)]
        for row in rows:
            self._fail(self._running.by_row[row], reason)
        self._running.release_leaving()

    def _refusal(self, key: RequestKey, submit: Submit, prompt: Int32s) -> Rejected | None:
        if key in self._requests:
            return Rejected(submit.uid, f"request {submit.uid} of this frontend still runs", code="duplicate_uid")
        waiting, options = self._admission.waiting, self._options
        if not waiting.has_room(
            submit.tenant,
            submit.weight,
            len(prompt),
            # Who gets a seat in the next step does not wait.
            max_requests=options.max_num_queued_reqs + self._admission.free_seats,
            max_tokens=options.max_num_queued_tokens,
        ):
            return overloaded(submit.uid, f"{len(waiting)} requests with {waiting.num_tokens} tokens wait already")
        return refusal(submit, prompt, self._limits.max_model_len, self._pool_tokens, self._limits.vocab_size)

    def _count_prompts(self, started: Iterable[Request]) -> None:
        for request in started:
            if request.cached_tokens is None:  # not when it comes back from a retraction
                request.cached_tokens, request.admitted_at = request.computed, self._clock()
                self._outbox.counters.prompt_tokens += request.prompt_len
                self._outbox.counters.cached_tokens += request.cached_tokens

    def _retract(self, request: Request) -> None:
        """Take the row and pages of a running request and let it wait again. What it computed stays in the prefix
        cache while there is room; its output stays, and goes on as if nothing had happened."""
        assert len(self._running) > 1, "a request that runs alone does not fit"
        self._running.leave(request)
        self._admission.waiting.add(request)
        self._outbox.counters.retracted += 1

    # ---- results ----

    def _take_chunk(self, request: Request, chunk: PrefillChunk, prompt_logprobs: PromptLogprobs | None) -> None:
        """A chunk is computed: from now on others may use its KV."""
        end = chunk.start + len(chunk.token_ids)
        assert request.lease is not None
        if request.lease.namespace == request.submit.namespace:
            self._cache.commit(request.lease, request.known[:end])
            request.published = end
        if request.needs_prompt_logprobs and prompt_logprobs is not None:
            # After a retraction the prompt is computed again: what comes now takes the place of what was there.
            request.prompt_logprobs[chunk.start :] = prompt_logprobs[chunk.row]
        if chunk.samples:
            self._running.prefilled(request)

    def _take_token(self, request: Request, token: int, failed: bool, logprobs: TokenLogprobs | None) -> None:
        """A sampled token belongs to ``request``, which may have ended since the step was launched."""
        if failed:
            self._fail(request, _NOT_FINITE)
        if request.ended:
            return
        tokens = [token]
        try:
            finish = request.take(token)
            if finish is None and request.constraint is not None:
                finish = self._jump(request, tokens)
        except ConstraintFailed as error:
            self._fail(request, str(error))
            return
        self._outbox.tokens(request, tokens, finish, logprobs)
        if finish is not None:
            self._end(request)

    def _jump(self, request: Request, tokens: list[int]) -> FinishReason | None:
        """Append to the output of ``request``, and to ``tokens``, what must come next, if that saves a step; whether
        that ends it. A step in flight has computed the last sampled token already, so a single one saves none."""
        forced = request.forced() if request.may_jump else []
        if len(forced) < _LEAST_JUMP:
            return None
        for token in forced:
            tokens.append(token)
            if (finish := request.take(token)) is not None:
                return finish
        self._running.jumped(request)
        return None

    def _passed(self, plan: StepPlan) -> set[int]:
        """Samples of ``plan``, launched before its request jumped, of places that now have a token."""
        if not plan.masked:
            return set()
        rows, lens, by_row = plan.sampled_rows, plan.sample_lens, self._running.by_row
        return {sample for sample in plan.masked if by_row[rows[sample]].total_len != lens[sample]}

    # ---- ends ----

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._outbox.aborted(request)
            self._end(request)

    def _fail(self, request: Request, reason: str) -> None:
        request.sound = False
        if not request.ended:
            self._outbox.failed(request, reason)
            self._end(request)

    def _end(self, request: Request) -> None:
        """The final event is out."""
        request.ended = True
        del self._requests[request.key]
        self._admission.waiting.shares.settle([request])
        if request.lease is None:
            self._admission.waiting.remove(request)
        else:
            self._running.leave(request)

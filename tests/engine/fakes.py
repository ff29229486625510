"""A runner without a model that checks every plan against a model of the device, and a harness that drives steps.

The device's KV memory holds, for each slot, a hash of the token there and of all tokens before it. A query may only
see slots that hold the hash of its own text: so wrong pages, KV that was never computed, and pages given away too
early are all seen at the read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.constraint import ConstraintFailed, TokenConstraint, forbid, mask_words
from radixserve.engine.errors import InvalidRequest
from radixserve.engine.messages import FinishReason, Rejected, Submit, TokenEvent, TokenLogprobs
from radixserve.engine.pipeline import StepPipeline
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.scheduler import Scheduler, SchedulerLimits
from radixserve.engine.step import RowSetup, StepPlan, StepResult
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.naive import NaivePrefixCache
from radixserve.kvcache.radix import RadixPrefixCache

EOS = 0
_MASK = (1 << 62) - 1
_START = 0x2545F4914F6CDD1D & _MASK


def chain(before: int, token: int) -> int:
    """The hash of a text that ends in ``token``, after a text with hash ``before``."""
    mixed = (before ^ (token + 1) * 0x9E3779B97F4A7C15) & _MASK
    return ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 ^ (mixed >> 31)) & _MASK


def next_token(text_hash: int, num_output: int, sampling: SamplingParams, seed: int, vocab_size: int) -> int:
    """What the fake model says after a text. Depends on nothing but the text and, unless greedy, on the seed."""
    drawn = chain(text_hash, 0 if sampling.greedy else seed & _MASK)
    token = drawn % vocab_size
    stops = {EOS, *sampling.stop_token_ids}
    if num_output < sampling.min_tokens:
        while token in stops:
            token = (token + 1) % vocab_size
    return token


def masked_token(token: int, words: np.ndarray, vocab_size: int) -> int:
    """What the fake model says in the place of ``token`` when only the tokens of a mask may come."""
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return int(allowed[token % np.count_nonzero(allowed < vocab_size)])


def expected_output(
    prompt: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
    max_total: int,
    constraint: TokenConstraint | None = None,
) -> tuple[list[int], FinishReason]:
    """What the engine must answer to a request that nobody aborts."""
    text_hash, output = _START, []
    for token in prompt:
        text_hash = chain(text_hash, token)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    limit = max_total if sampling.max_tokens is None else min(max_total, len(prompt) + sampling.max_tokens)
    words = np.empty(mask_words(vocab_size), np.int32)
    while True:
        output.append(next_token(text_hash, len(output), sampling, sampling.seed or 0, vocab_size))
        if constraint is not None:
            constraint.fill_mask(words)
            if len(output) <= sampling.min_tokens:
                forbid(words, frozenset(stops))
            output[-1] = masked_token(output[-1], words, vocab_size)
        text_hash = chain(text_hash, output[-1])
        if output[-1] in stops and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if constraint is not None and constraint.accept(output[-1]):
            return output, FinishReason.STOP
        if len(prompt) + len(output) >= limit:
            return output, FinishReason.LENGTH


@dataclass
class _Row:
    setup: RowSetup
    tokens: list[int]
    hashes: list[int]  # after each token
    kv_len: int
    spoiled: bool = False

    def goes_on_as(self, other: _Row) -> bool:
        """Whether ``other`` is the same request after a jump."""
        count = self.kv_len
        return (
            other.kv_len == count
            and other.tokens[:count] == self.tokens[:count]
            and self.setup.seed == other.setup.seed
        )

    def append(self, token: int) -> None:
        self.hashes.append(chain(self.hashes[-1] if self.hashes else _START, token))
        self.tokens.append(token)


@dataclass
class FakePendingStep:
    outcome: StepResult | Exception | None
    choose: Callable[[np.ndarray], StepResult] | None = None  # of a step that waits for its masks

    def sample(self, masks: np.ndarray) -> None:
        assert self.choose is not None, "a step that waits for no masks"
        chosen, self.choose = self.choose(masks), None
        self.outcome = self.outcome or chosen

    def result(self) -> StepResult:
        assert self.outcome is not None and self.choose is None, "the step was not given its masks"
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class FakeRunner:
    """``broken_steps`` raise instead of giving a result; requests whose seed is in ``broken_seeds`` fail alone."""

    page_size: int
    num_pages: int
    num_rows: int
    max_pages_per_row: int
    vocab_size: int
    step_tokens: int
    broken_steps: set[int] = field(default_factory=set)
    broken_seeds: set[int] = field(default_factory=set)
    masks_stops: bool = True  # as min_tokens asks for
    plans: list[StepPlan] = field(default_factory=list)
    violation: Exception | None = None

    def __post_init__(self) -> None:
        self.table = np.full((self.num_rows, self.max_pages_per_row), -1, np.int64)
        self.memory = np.zeros(self.num_pages * self.page_size, np.int64)
        self.rows: dict[int, _Row] = {}

    def launch(self, plan: StepPlan) -> FakePendingStep:
        try:
            return self._execute(plan)
        except Exception as error:  # the engine takes this for a failed step, so it is kept for the test
            self.violation = self.violation or error
            raise

    def _execute(self, plan: StepPlan) -> FakePendingStep:
        self.plans.append(plan)
        self.table[plan.page_rows, plan.page_cols] = plan.page_ids
        self._check_form(plan)
        first_starts = {chunk.row: chunk.start for chunk in plan.chunks}
        for setup in plan.setups:
            row, last = _Row(setup, [], [], first_starts[setup.row]), self.rows.get(setup.row)
            for token in setup.token_ids.tolist():
                row.append(token)
            row.spoiled = last is not None and last.spoiled and last.goes_on_as(row)
            self.rows[setup.row] = row
        self._store(plan)
        self._attend(plan)
        pending = FakePendingStep(None if plan.masked else self._sample(plan))
        if plan.masked:
            pending.choose = lambda masks: self._sample(plan, dict(zip(plan.masked, masks, strict=True)))
        if plan.step in self.broken_steps:
            self._spoil(plan)
            pending.outcome = RuntimeError(f"the device lost step {plan.step}")
        return pending

    def _spoil(self, plan: StepPlan) -> None:
        """The KV of a broken step is worthless; the rows of that step may see it while they last, nobody else."""
        for row_id, kv_len in zip(plan.decode_rows.tolist(), plan.decode_lens.tolist(), strict=True):
            self.memory[self._slots(row_id, kv_len - 1, kv_len)] = -1
            self.rows[row_id].spoiled = True
        for chunk in plan.chunks:
            self.memory[self._slots(chunk.row, chunk.start, chunk.start + len(chunk.token_ids))] = -1
            self.rows[chunk.row].spoiled = True

    def _check_form(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.step_tokens, "the token budget is exceeded"
        rows = [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks)]
        assert len(set(rows)) == len(rows), "a row occurs twice in a step"
        assert all(len(chunk.token_ids) for chunk in plan.chunks), "an empty chunk"
        self._check_shared(plan)
        assert {setup.row for setup in plan.setups} <= {chunk.row for chunk in plan.chunks}

    def _check_shared(self, plan: StepPlan) -> None:
        """Rows of a group show the same full pages at their beginning, and none of it is only another group's."""
        if plan.shared is None:
            return  # the scheduler was not asked to tell
        members, starts = plan.shared.members.tolist(), plan.shared.starts.tolist()
        assert len(set(members)) == len(members) == starts[-1], "a row is in two groups"
        for group, num_pages in enumerate(plan.shared.num_pages.tolist()):
            indices = members[starts[group] : starts[group + 1]]
            assert len(indices) > 1 and num_pages > 0, "a group that shares nothing"
            lines = self.table[plan.decode_rows[indices], :num_pages]
            assert (lines == lines[0]).all(), "rows of a group begin with different pages"
            assert (plan.decode_lens[indices] > num_pages * self.page_size).all(), "a shared page is not full"

    def _store(self, plan: StepPlan) -> None:
        """All tokens of a step store their KV before any of them attends."""
        for row_id, kv_len in zip(plan.decode_rows.tolist(), plan.decode_lens.tolist(), strict=True):
            row = self.rows[row_id]
            assert kv_len == row.kv_len + 1 == len(row.tokens), "a decode must feed the row's last token, once"
            self._write(row_id, row.kv_len, kv_len)
        for chunk in plan.chunks:
            row, end = self.rows[chunk.row], chunk.start + len(chunk.token_ids)
            assert chunk.start == row.kv_len, "each token is computed exactly once"
            assert chunk.token_ids.tolist() == row.tokens[chunk.start : end], "a chunk has other tokens than its row"
            assert chunk.samples == (end == len(row.tokens)), "the last chunk samples, and no other"
            self._write(chunk.row, chunk.start, end)

    def _slots(self, row_id: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        pages = self.table[row_id, positions // self.page_size]
        assert (pages >= 0).all(), "a row lacks pages"
        return pages * self.page_size + positions % self.page_size

    def _write(self, row_id: int, start: int, end: int) -> None:
        row = self.rows[row_id]
        self.memory[self._slots(row_id, start, end)] = row.hashes[start:end]
        row.kv_len = end

    def _attend(self, plan: StepPlan) -> None:
        for row_id in [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks)]:
            row = self.rows[row_id]
            if row.spoiled:
                continue
            seen = self.memory[self._slots(row_id, 0, row.kv_len)]
            assert (seen == np.array(row.hashes[: row.kv_len])).all(), f"row {row_id} reads the KV of another text"

    def _sample(self, plan: StepPlan, masks: Mapping[int, np.ndarray] = {}) -> StepResult:
        tokens, failed, logprobs = [], [], []
        for sample, row_id in enumerate(plan.sampled_rows):
            row = self.rows[row_id]
            setup, sampling = row.setup, row.setup.sampling
            num_output = len(row.tokens) - setup.prompt_len if self.masks_stops else sampling.min_tokens
            token = next_token(row.hashes[-1], num_output, sampling, setup.seed, self.vocab_size)
            if sample in masks:
                token = masked_token(token, masks[sample], self.vocab_size)
            row.append(token)
            tokens.append(token)
            failed.append(setup.seed in self.broken_seeds)
            logprobs.append(None if sampling.logprobs is None else TokenLogprobs(token, -0.5))
        return StepResult(
            np.array(tokens, np.int32),
            np.array(failed, np.bool_),
            logprobs if any(logprobs) else None,
            self._prompt_logprobs(plan),
        )

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs | None]] | None:
        wanted = {}
        for chunk in plan.chunks:
            if self.rows[chunk.row].setup.sampling.prompt_logprobs is not None:
                entries = [
                    TokenLogprobs(token, -float(chunk.start + i)) if chunk.start + i else None
                    for i, token in enumerate(chunk.token_ids.tolist())
                ]
                wanted[chunk.row] = entries
        return wanted or None


class Counting:
    """A constraint: token number n leaves the rest n % 7 when divided by 7; after ``length`` tokens comes the end."""

    def __init__(self, length: int, *, fails_at: int | None = None) -> None:
        self._num_accepted = 0
        self._length = length
        self._fails_at = fails_at

    def fill_mask(self, words: np.ndarray) -> None:
        count = self._num_accepted
        if count == self._fails_at:
            raise ConstraintFailed("too hard")
        bits = np.zeros(len(words) * 32, np.uint8)
        bits[[EOS] if count == self._length else np.arange(7 + count % 7, 50, 7)] = 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        assert self._num_accepted == self._length or (token_id - self._num_accepted) % 7 == 0
        self._num_accepted += 1
        return self._num_accepted > self._length

    def forced(self) -> list[int]:
        return []


class Reciting:
    """A constraint: of each ten tokens it forces the last seven, of the others three in four are allowed; after
    ``length`` tokens comes the end. ``on_forced`` is called when it is asked what it forces."""

    def __init__(self, length: int, *, jumps: bool = True, on_forced: Callable[[], None] = lambda: None) -> None:
        self._num_accepted = 0
        self._length = length
        self._jumps = jumps
        self._on_forced = on_forced

    def fill_mask(self, words: np.ndarray) -> None:
        bits = np.zeros(len(words) * 32, np.uint8)
        bits[self._allowed(self._num_accepted)] = 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        assert token_id in self._allowed(self._num_accepted)
        self._num_accepted += 1
        return self._num_accepted > self._length

    def forced(self) -> list[int]:
        self._on_forced()
        found: list[int] = []
        while self._jumps and len(tokens := self._allowed(self._num_accepted + len(found))) == 1 and tokens != [EOS]:
            found += tokens
        return found

    def _allowed(self, count: int) -> list[int]:
        if count == self._length:
            return [EOS]
        if count % 10 >= 3:
            return [1 + count * count % 11]
        return [token for token in range(1, 12) if (token + count) % 4]


class FakeGrammars:
    """Grammars are the lengths of ``Counting``. "slow 5" is compiled only when ``release`` is set, "bad" never is."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.compiled: list[str] = []

    def cached(self, grammar: str) -> TokenConstraint | None:
        return Counting(int(grammar.split()[-1])) if grammar in self.compiled else None

    def compile(self, grammar: str) -> TokenConstraint:
        if grammar == "bad":
            raise InvalidRequest("cannot be compiled", param="grammar", code="invalid_grammar")
        if grammar.startswith("slow"):
            self.release.wait(60)
        self.compiled.append(grammar)
        return Counting(int(grammar.split()[-1]))


@dataclass
class Answer:
    """What one request was told, and in which step (counted in calls of ``Harness.advance``)."""

    prompt: list[int]
    sampling: SamplingParams
    events: list[TokenEvent] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # of each token
    rejected: Rejected | None = None
    constraint: TokenConstraint | None = None  # as it was at first

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish if self.events else None


@dataclass(frozen=True)
class Arrival:
    """A request among random ones, see ``Harness.play``."""

    steps_before: int
    sampling: SamplingParams
    aborted_after: int | None  # further arrivals


AnArrival = TypeVar("AnArrival", bound=Arrival)


class Harness:
    """A scheduler with a real cache manager and the fake runner; integrity is checked after every step."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 256,
        max_model_len: int = 512,
        vocab_size: int = 50,
        step_tokens: int = 64,
        overlap: bool = True,
        radix: bool = True,
        options: SchedulerOptions | None = None,
        target_itl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options or SchedulerOptions(max_num_seqs=16)
        self.vocab_size = vocab_size
        num_rows, max_pages = self.options.max_num_seqs or 16, -(-max_model_len // page_size)
        prefixes = RadixPrefixCache(page_size) if radix else NaivePrefixCache(page_size)
        self.cache = CacheManager(prefixes, num_pages, num_rows, max_pages)
        self.max_total = min(max_model_len, num_pages * page_size)
        self.runner = FakeRunner(page_size, num_pages, num_rows, max_pages, vocab_size, step_tokens)
        limits = SchedulerLimits(max_model_len, vocab_size, step_tokens, (EOS,), target_itl_s)
        self.scheduler = Scheduler(
            self.cache, limits, self.options, shares_prefixes=radix, tells_shared=True, clock=clock
        )
        self.pipeline = StepPipeline(self.scheduler, self.runner, overlap=overlap)
        self.answers: dict[tuple[bytes, int], Answer] = {}
        self.time = 0

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        uid: int | None = None,
        frontend: bytes = b"f",
        request_id: str = "",
        namespace: str = "",
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        constraint: TokenConstraint | None = None,
    ) -> Answer:
        uid = len(self.answers) if uid is None else uid
        sampling = sampling or SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answer = self.answers[frontend, uid] = Answer(list(prompt), sampling, constraint=deepcopy(constraint))
        ids = np.array(prompt, "<i4").tobytes()
        message = Submit(uid, request_id or f"r{uid}", ids, sampling, priority, namespace, tenant, weight)
        answer.rejected = self.scheduler.submit(frontend, message, constraint)
        return answer

    def play(self, arrivals: Sequence[AnArrival], submit: Callable[[AnArrival], object]) -> None:
        """Submit each in its turn, abort those that are to be, and see all of them end rightly."""
        to_abort: dict[int, list[int]] = {}
        for number, arrival in enumerate(arrivals):
            for _ in range(arrival.steps_before):
                self.advance()
            submit(arrival)
            if arrival.aborted_after is not None:
                to_abort.setdefault(number + arrival.aborted_after, []).append(number)
            for uid in to_abort.pop(number, ()):
                self.scheduler.abort(b"f", uid)
                self.collect()
        self.run()
        self.check_outputs()

    def advance(self) -> bool:
        self.time += 1
        busy = self.pipeline.advance()
        if self.runner.violation is not None:
            raise self.runner.violation
        self.collect()
        self.scheduler.check_integrity()
        return busy

    def collect(self) -> None:
        for frontend, outputs in self.scheduler.take_outputs().items():
            for event in outputs.each():
                answer = self.answers[frontend, event.uid]
                assert answer.finish is None, "an event after the final one"
                answer.events.append(event)
                answer.times.extend([self.time] * len(event.token_ids))

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.advance():
                self.check_idle()
                return
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def check_idle(self) -> None:
        """Every request is over, and no page is held."""
        stats = self.scheduler.stats()
        assert not self.scheduler.requests and stats.running == stats.waiting == 0
        assert stats.kv_free_tokens + stats.kv_evictable_tokens == stats.kv_total_tokens, "pages are still held"
        assert all(answer.rejected or answer.finish for answer in self.answers.values()), "a request without an end"
        ended = stats.finished + stats.aborted + stats.failed + stats.rejected
        assert ended == len(self.answers), "each request ends once"

    def check_outputs(self) -> None:
        """Whoever was not stopped from outside got exactly what the fake model says; the others got its beginning."""
        for answer in self.answers.values():
            if answer.rejected:
                continue
            fresh = deepcopy(answer.constraint)
            tokens, finish = expected_output(answer.prompt, answer.sampling, self.vocab_size, self.max_total, fresh)
            if answer.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert (answer.tokens, answer.finish) == (tokens, finish)
            else:
                assert answer.tokens == tokens[: len(answer.tokens)]

"""What each sampling rule does to the choice of the next token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.engine.constraint import mask_words
from radixserve.engine.messages import TokenLogprobs
from radixserve.engine.parallel import ParallelLogits
from radixserve.engine.sampler import SampleBatch, Sampled, Sampler, TokenMasks, uniform
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.sharding import Shard
from radixserve.engine.step import RowSetup
from radixserve.kernels.interface import LogitPart, SamplingKernels
from radixserve.kernels.select import select_sampling
from radixserve.tests.engine.test_parallel import ThreadRanks, ThreadSeat

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CPU = torch.device("cpu")
VOCAB = 12
EOS = 3


class TorchSampling:
    """The ``SamplingKernels`` of a CPU."""

    def draw(
        self, logits: Tensor, rows: Tensor, floats: Tensor, ints: Tensor, num_known: Tensor, last_tokens: Tensor
    ) -> Tensor:
        return draw_in_torch(logits, rows, floats, ints, num_known, last_tokens)

    def forbid(self, logits: Tensor, lines: Tensor) -> None:
        bits = np.unpackbits(lines[:, :-1].numpy().copy().view(np.uint8), axis=1, bitorder="little")
        forbidden = torch.from_numpy(bits[:, : logits.shape[1]] == 0)
        logits[lines[:, -1]] = logits[lines[:, -1]].masked_fill(forbidden, -torch.inf)

    def lines_of_part(
        self, logits: Tensor, rows: Tensor, floats: Tensor, ints: Tensor, num_known: Tensor, part: LogitPart
    ) -> Tensor:
        lines = torch.zeros(len(rows), part.vocab)
        lines[:, part.first : part.first + part.columns] = logits[:, : part.columns]
        return lines

    def pick(
        self,
        lines: Tensor,
        rows: Tensor,
        floats: Tensor,
        ints: Tensor,
        num_known: Tensor,
        last_tokens: Tensor,
        part: LogitPart,
    ) -> Tensor:
        return draw_in_torch(lines, rows, floats, ints, num_known, last_tokens)

    def penalize(self, logits: Tensor, rows: Tensor, floats: Tensor, produced: Tensor, in_prompt: Tensor) -> None:
        repetition, frequency, presence = floats[rows, 3:].chunk(3, dim=-1)
        seen = in_prompt[rows] | (produced[rows] > 0)
        logits[:] = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits -= produced[rows] * frequency + (produced[rows] > 0) * presence

    def count(self, rows: Tensor, token_ids: Tensor, produced: Tensor) -> None:
        produced[rows, token_ids] += 1


def draw_in_torch(
    logits: Tensor, rows: Tensor, floats: Tensor, ints: Tensor, num_known: Tensor, last_tokens: Tensor
) -> Tensor:
    vocab = logits.shape[1]
    temperature, top_p, min_p = floats[rows, :3].chunk(3, dim=-1)
    seeds, top_k = ints[rows].chunk(2, dim=-1)
    numbers = uniform(seeds, num_known[:, None] * vocab + torch.arange(vocab))
    gumbel = -torch.log(-torch.log(numbers.clamp(min=1e-12)))
    drawn = temperature > 0
    scaled = logits / temperature.clamp(min=1e-9)
    probs, order = scaled.softmax(-1).sort(descending=True, stable=True)
    top = probs.masked_fill(torch.arange(vocab) >= top_k, 0.0)
    outside = (top.cumsum(-1) - top >= top_p * top.sum(-1, keepdim=True)) | (top < min_p * top[:, :1]) | (top == 0)
    floor = probs.masked_fill(outside, 2.0).amin(-1, keepdim=True).minimum(probs[:, :1])  # equal ones stay together
    kept = torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, probs >= floor)
    scores = torch.where(drawn, (scaled + gumbel).masked_fill(~kept, -torch.inf), logits)
    failed = logits.isnan().any(1) | (logits.amax(1).isinf())
    tokens = scores.nan_to_num().max(1).indices.masked_fill(failed, 0)
    last_tokens[rows] = tokens
    return torch.stack((tokens, failed)).int()


class Rows:
    """A sampler with one row for each request."""

    device = CPU
    kernels: SamplingKernels | None = None

    def __init__(
        self,
        *requests: SamplingParams,
        seeds: list[int] | None = None,
        known: tuple[int, ...] = (1, 2),
        vocab: int = VOCAB,
        parallel: ParallelLogits | None = None,
    ):
        self.vocab = vocab
        self.sampler = Sampler(max(64, len(requests)), vocab, self.device, type(self).kernels, parallel)
        ids = np.array(known, np.int32)
        self.sampler.set_rows(
            [
                RowSetup(row, sampling, seeds[row] if seeds else row, ids, len(ids), (EOS,))
                for row, sampling in enumerate(requests)
            ]
        )

    def sample(
        self,
        logits: Tensor,
        rows: list[int] | None = None,
        num_known: int = 2,
        allowed: dict[int, list[int]] | None = None,
    ) -> Sampled:
        rows_host = np.array(range(len(logits)) if rows is None else rows, np.int32)
        lens = np.full(len(rows_host), num_known, np.int32)
        on_device = (torch.from_numpy(array).to(self.device) for array in (rows_host, lens))
        return self.sampler.sample(
            logits.clone().to(self.device), SampleBatch(*on_device, rows_host, lens), _masks(allowed, self.vocab)
        )

    def tokens(self, logits: Tensor, **options: Any) -> list[int]:
        return self.sample(logits, **options).token_ids.tolist()


def _masks(allowed: dict[int, list[int]] | None, vocab: int) -> TokenMasks | None:
    if allowed is None:
        return None
    bits = np.zeros((len(allowed), mask_words(vocab) * 32), np.uint8)
    for line, tokens in zip(bits, allowed.values(), strict=True):
        line[tokens] = 1
    return TokenMasks(np.array(list(allowed)), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.fixture(autouse=True, params=["torch", "kernels", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every rule holds on a CPU, and where kernels sample."""
    name: str = request.param
    if name == "kernels":
        monkeypatch.setattr(Rows, "kernels", TorchSampling())
    elif name == "cuda":
        device = torch.device("cuda")
        monkeypatch.setattr(Rows, "device", device)
        monkeypatch.setattr(Rows, "kernels", select_sampling(device))
    return name


def logprobs_of(result: Sampled) -> list[TokenLogprobs]:
    """Once they are on the host."""
    assert result.logprobs is not None
    arriving = result.logprobs.to_host()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return arriving.messages()


def some_logits(rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2


def frequencies(sampling: SamplingParams, logits: Tensor, draws: int = 4000) -> Tensor:
    """Share of each token over many positions of one request, logits [vocab]."""
    rows = Rows(sampling, vocab=len(logits))
    row = np.zeros(draws, np.int32)
    lens = np.arange(2, draws + 2, dtype=np.int32)
    on_device = (torch.from_numpy(array).to(Rows.device) for array in (row, lens))
    batch = SampleBatch(*on_device, row, lens)
    tokens = rows.sampler.sample(logits.to(Rows.device).repeat(draws, 1), batch).token_ids
    return torch.bincount(tokens.cpu(), minlength=len(logits)) / draws


def sampled(**rules: Any) -> SamplingParams:
    return SamplingParams(**rules)


# ---- the choice ----


def test_greedy_takes_the_largest_logit() -> None:
    logits = some_logits(3)
    assert Rows(*[sampled(temperature=0)] * 3).tokens(logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "rules", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"temperature": 1e-6}, {"min_p": 1.0}]
)
def test_rules_that_leave_one_token_are_greedy(rules: dict[str, float]) -> None:
    logits = some_logits(8)
    assert Rows(*[sampled(**rules)] * 8).tokens(logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_the_scaled_logits(temperature: float) -> None:
    logits = some_logits()[0]
    expected = (logits / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(sampled(temperature=temperature), logits), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("vocab", [12, 3000])
@pytest.mark.parametrize(
    ("rules", "kept"),
    [({"top_k": 2}, [0, 1]), ({"top_p": 0.69}, [0, 1]), ({"top_p": 0.71}, [0, 1, 2]), ({"min_p": 0.3}, [0, 1, 2]),
     ({"top_k": 3, "top_p": 0.5}, [0, 1]), ({"top_k": 10_000}, [0, 1, 2, 3])],
)  # fmt: skip
def test_filters_keep_the_right_tokens_in_proportion(rules: dict[str, Any], kept: list[int], vocab: int) -> None:
    probs = torch.full((vocab,), 1e-12)
    probs[:4] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(vocab)
    expected[kept] = probs[kept] / probs[kept].sum()
    found = frequencies(sampled(**rules), probs[order].log())
    torch.testing.assert_close(found, expected[order], atol=0.03, rtol=0)
    assert (found[expected[order] == 0] == 0).all()


def test_top_p_of_a_flat_distribution_needs_more_than_the_head() -> None:
    """0.9 of 1000 equal tokens is 900 of them; equal ones stay together."""
    found = frequencies(sampled(top_p=0.9), torch.zeros(1000), draws=8000)
    assert (found > 0).sum() > 950  # all 1000 but for chance


def test_top_p_sets_of_a_smooth_distribution_match_a_sort() -> None:
    logits = torch.linspace(0, 6, 3000)
    probs = logits.softmax(-1).sort(descending=True).values
    size = int((probs.cumsum(0) < 0.8).sum()) + 1
    found = frequencies(sampled(top_p=0.8), logits, draws=4000)
    assert found[: 3000 - size].sum() == 0
    assert found[3000 - size :].sum() == pytest.approx(1.0)


def test_requests_of_a_batch_do_not_disturb_each_other() -> None:
    requests = [
        sampled(temperature=0), sampled(temperature=0.7), sampled(top_k=3), sampled(top_p=0.6), sampled(min_p=0.2),
        sampled(top_k=4, top_p=0.9), sampled(logit_bias={5: 3.0}), sampled(frequency_penalty=1.5),
        sampled(temperature=0, repetition_penalty=1.7), sampled(temperature=1.3, logprobs=2),
    ]  # fmt: skip
    logits = some_logits(len(requests))
    together = Rows(*requests).tokens(logits)
    for row in range(len(requests)):
        assert Rows(*requests).tokens(logits[row : row + 1], rows=[row]) == together[row : row + 1]
    backwards = list(range(len(requests)))[::-1]
    assert Rows(*requests).tokens(logits[backwards], rows=backwards) == together[::-1]


# ---- seeds ----


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    logits = torch.zeros(40, VOCAB)
    requests = [sampled()] * 40
    one, same, other = (Rows(*requests, seeds=[s] * 40) for s in (7, 7, 8))
    assert one.tokens(logits) == same.tokens(logits)
    assert one.tokens(logits, num_known=2) != one.tokens(logits, num_known=3)
    draws = [[rows.tokens(logits[:1], num_known=n)[0] for n in range(2, 60)] for rows in (one, other)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_any_64_bit_seed_works(seed: int) -> None:
    assert 0 <= Rows(sampled(), seeds=[seed]).tokens(some_logits())[0] < VOCAB


def test_hashed_numbers_are_uniform_and_uncorrelated() -> None:
    seeds, counters = torch.arange(200)[:, None], torch.arange(200)[None]
    numbers = uniform(seeds, counters)
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    counts = torch.histc(numbers, 20, 0, 1) / numbers.numel()
    torch.testing.assert_close(counts, torch.full((20,), 0.05), atol=0.005, rtol=0)
    for a, b in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 0.02


# ---- changes of the logits ----


def test_penalties_count_prompt_and_output_as_documented() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.9, 0.0] + [-9.0] * 8])
    rules = sampled(temperature=0, logprobs=0, repetition_penalty=2.0, frequency_penalty=0.0)
    # token 0 and 1 are in the prompt: 2.0 -> 1.0, so token 2 wins, then 2 was produced: 1.9 -> 0.95
    rows = Rows(rules, known=(0, 1))
    assert [rows.tokens(logits)[0] for _ in range(3)] == [2, 0, 0]

    rows = Rows(sampled(temperature=0, frequency_penalty=0.5), known=(0, 0, 0))
    # the prompt does not count: 2.0, then 1.5 < 1.9, then 1.5 > 1.4, ...
    assert [rows.tokens(logits)[0] for _ in range(4)] == [0, 2, 0, 2]

    rows = Rows(sampled(temperature=0, presence_penalty=1.95), known=(5,))
    assert [rows.tokens(logits)[0] for _ in range(4)] == [0, 2, 0, 0]


def test_penalties_know_the_output_that_a_retracted_request_brings_back() -> None:
    logits = torch.tensor([[2.0, 1.0] + [-9.0] * 10])
    rows = Rows(vocab=VOCAB)
    rows.sampler.set_rows(
        [RowSetup(0, sampled(temperature=0, presence_penalty=1.5), 0, np.array([7, 8, 0], np.int32), 2, (EOS,))]
    )
    assert rows.tokens(logits) == [1]


def test_logit_bias_moves_the_choice_and_minus_100_forbids_it() -> None:
    logits = some_logits()
    best = int(logits.argmax())
    other = (best + 1) % VOCAB
    assert Rows(sampled(temperature=0, logit_bias={other: 100.0})).tokens(logits) == [other]
    assert frequencies(sampled(logit_bias={best: -100.0}), logits[0])[best] == 0


def test_no_stop_before_min_tokens() -> None:
    logits = some_logits()
    logits[0, EOS], logits[0, 5] = 30.0, 20.0
    rows = Rows(sampled(temperature=0, min_tokens=2, stop_token_ids=(5,)))
    chosen = [rows.tokens(logits, num_known=2 + produced)[0] for produced in range(3)]
    assert not {EOS, 5} & set(chosen[:2]) and chosen[2] == EOS
    ignoring = Rows(sampled(temperature=0, min_tokens=2, ignore_eos=True))
    assert ignoring.tokens(logits) == [EOS]


def test_masked_samples_are_allowed_tokens_and_the_others_are_as_without_masks() -> None:
    vocab = 77  # bits of several words, the last one not full
    logits = some_logits(5, vocab)
    rules = [
        sampled(temperature=0),
        sampled(temperature=0),
        sampled(temperature=1.5, top_p=0.9),
        sampled(),
        sampled(logit_bias={7: 100.0}),
    ]
    rows = Rows(*rules, vocab=vocab)
    free = rows.tokens(logits)
    allowed = {1: [31, 76], 2: [32, 40], 4: [3, 76]}
    masked = rows.tokens(logits, allowed=allowed)
    assert [masked[0], masked[3]] == [free[0], free[3]]
    assert masked[1] == max(allowed[1], key=lambda token: logits[1, token])
    assert all(masked[sample] in tokens for sample, tokens in allowed.items())
    assert rows.sampler.last_tokens[:5].tolist() == masked
    assert not rows.sample(logits, allowed={2: [5]}).failed.any()


def test_a_mask_that_allows_only_the_end_wins_over_min_tokens() -> None:
    rows = Rows(sampled(temperature=0, min_tokens=5), sampled(temperature=0, min_tokens=5))
    logits = torch.zeros(2, VOCAB).index_fill(1, torch.tensor([EOS]), 9.0)
    assert rows.tokens(logits, allowed={0: [EOS]})[0] == EOS
    assert rows.tokens(logits, allowed={0: [EOS]})[1] != EOS


def test_a_row_forgets_the_rules_of_its_last_request() -> None:
    logits = some_logits()
    rows = Rows(sampled(temperature=0, logit_bias={0: 100.0}, presence_penalty=2.0, min_tokens=9))
    rows.tokens(logits)
    rows.sampler.set_rows([RowSetup(0, sampled(temperature=0), 0, np.array([1], np.int32), 1, ())])
    assert rows.tokens(logits) == logits.argmax(-1).tolist()


def test_last_tokens_are_those_of_the_rows() -> None:
    logits = some_logits(3)
    rows = Rows(*[sampled(temperature=0)] * 5)
    tokens = rows.tokens(logits, rows=[4, 0, 2])
    assert rows.sampler.last_tokens[[4, 0, 2]].tolist() == tokens


def test_rows_are_plain_whose_rules_a_draw_kernel_knows() -> None:
    rules = [
        sampled(temperature=0), sampled(temperature=0.7), sampled(temperature=0, top_p=0.5), sampled(top_k=1),
        sampled(top_k=20, top_p=0.95), sampled(min_p=0.1), sampled(logprobs=0), sampled(logit_bias={1: 1.0}),
        sampled(presence_penalty=1.0), sampled(min_tokens=3),
    ]  # fmt: skip
    sampler = Rows(*rules).sampler

    def plain(num_known: int) -> list[bool]:
        lens = np.full(1, num_known, np.int32)
        return [sampler.are_plain(np.array([row], np.int32), lens) for row in range(len(rules))]

    assert plain(2) == [True] * 6 + [False] * 4
    assert plain(5) == [True] * 6 + [False] * 3 + [True]
    assert not sampler.are_plain(np.arange(7, dtype=np.int32), np.full(7, 2, np.int32))


# ---- ranks ----

RULES = [
    sampled(temperature=0), sampled(), sampled(temperature=0, top_p=0.5), sampled(top_k=3), sampled(top_p=0.4),
    sampled(min_p=0.3), sampled(presence_penalty=1.0), sampled(logit_bias={11: 9.0}), sampled(logprobs=2),
    sampled(min_tokens=3),
]  # fmt: skip


class CountedSeat(ThreadSeat):
    gathered = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.gathered += 1
        return super().all_gather(tensor)


@pytest.mark.parametrize(
    ("rows", "allowed", "gathers"),
    [([0, 1, 2, 3], None, 0), ([2, 4, 1], None, 1), ([*range(10)], None, 1), ([1, 0], {1: [0, 11]}, 1)],
    ids=["top-k or none", "top-p", "all rules", "masked"],
)
def test_ranks_with_parts_of_the_logits_choose_what_one_chooses_from_all(
    rows: list[int], allowed: dict[int, list[int]] | None, gathers: int, implementation: str
) -> None:
    """56 tokens, of which the last of five ranks has eight, and the others twelve."""
    logits = some_logits(len(rows), vocab=56)
    expected = Rows(*RULES, vocab=56)
    one = expected.sample(logits, rows=rows, allowed=allowed)
    ranks = ThreadRanks(5)
    seats = [CountedSeat(rank, ranks) for rank in range(5)]

    def choose(rank: int) -> tuple[Rows, Sampled]:
        ours = Rows(*RULES, vocab=56, parallel=ParallelLogits(Shard(rank, 5), seats[rank], 56))
        part = torch.full((len(rows), 12), 99.0)  # padding, which nobody may choose
        columns = logits[:, 12 * rank : 12 * rank + 12]
        part[:, : columns.shape[1]] = columns
        return ours, ours.sample(part, rows=rows, allowed=allowed)

    with ThreadPoolExecutor(5) as threads:
        for ours, found in threads.map(choose, range(5)):
            assert torch.equal(found.drawn, one.drawn)
            assert torch.equal(ours.sampler.last_tokens, expected.sampler.last_tokens)
            assert (found.logprobs is None) == (one.logprobs is None)
            if found.logprobs is not None and one.logprobs is not None:
                assert torch.equal(found.logprobs.logprobs, one.logprobs.logprobs)
    assert [seat.gathered for seat in seats] == [1 if implementation == "torch" else gathers] * 5


# ---- failures and logprobs ----


@pytest.mark.parametrize(
    ("value", "where"), [(torch.nan, 4), (torch.inf, 4), (torch.nan, slice(None)), (-torch.inf, slice(None))]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_row_with_bad_logits_fails(value: float, where: int | slice, temperature: float) -> None:
    logits = some_logits(3)
    good = Rows(*[sampled(temperature=temperature)] * 3).tokens(logits)
    logits[1, where] = value
    result = Rows(*[sampled(temperature=temperature)] * 3).sample(logits)
    assert result.failed.tolist() == [False, True, False]
    tokens = result.token_ids.tolist()
    assert (tokens[0], tokens[2]) == (good[0], good[2]) and 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_without_a_chance_harms_no_other(temperature: float) -> None:
    logits = some_logits(1)
    logits[0, 4] = -torch.inf
    result = Rows(sampled(temperature=temperature)).sample(logits)
    assert not result.failed.any() and result.token_ids.tolist() != [4]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = some_logits(3)
    rules = sampled(temperature=0.3, top_k=2, logprobs=4, logit_bias={1: 20.0}, repetition_penalty=1.4)
    result = Rows(rules, sampled(), sampled(temperature=0, logprobs=0)).sample(logits)
    assert result.logprob_samples.tolist() == [0, 2]
    first, last = logprobs_of(result)
    expected = logits.log_softmax(-1)
    assert first.rank == 1 + int((expected[0] > expected[0, 1]).sum()) and last.rank == 1
    assert first.token_id == 1 and first.logprob == pytest.approx(float(expected[0, 1]), abs=1e-5)
    best = expected[0].topk(4)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert last.top == [] and last.logprob == pytest.approx(float(expected[2].max()), abs=1e-5)


def test_each_of_many_rows_with_rules_is_as_if_alone() -> None:
    """More than are looked at together."""
    count = 150
    rules = [sampled(temperature=0, logprobs=i % 4, presence_penalty=1.5) for i in range(count)]
    logits, allowed = some_logits(count), {i: [i % VOCAB, (i + 5) % VOCAB] for i in range(0, count, 2)}
    result = Rows(*rules).sample(logits, allowed=allowed)
    assert result.logprob_samples.tolist() == list(range(count))
    messages = logprobs_of(result)
    for i in (0, 63, 64, 129, 149):
        alone = Rows(rules[i]).sample(logits[i : i + 1], allowed={0: allowed[i]} if i in allowed else None)
        (expected,) = logprobs_of(alone)
        assert result.token_ids[i] == alone.token_ids[0] == expected.token_id == messages[i].token_id
        assert messages[i].top == expected.top and messages[i].rank == expected.rank


def test_nobody_gets_logprobs_who_did_not_ask() -> None:
    assert Rows(sampled()).sample(some_logits()).logprobs is None

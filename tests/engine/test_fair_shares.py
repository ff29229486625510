"""API keys share the engine by weight: what a flood of one costs the others, in tokens served."""

from collections import Counter

import pytest

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import Answer, Harness

WORK = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def harness_of(num_seats: int = 2, policy: str = "fcfs", **options: int) -> Harness:
    scheduling = SchedulerOptions(max_num_seqs=num_seats, schedule_policy=policy, **options)  # type: ignore[arg-type]
    return Harness(num_pages=128, options=scheduling)


def ask(
    harness: Harness,
    tenant: str,
    count: int,
    weight: float = 1.0,
    *,
    size: int = 10,
    priority: int = 0,
    work: SamplingParams = WORK,
) -> list[Answer]:
    """``count`` different prompts."""
    start = len(harness.answers)
    prompts = [[i % 49 + 1, i // 49 + 1, *(j % 49 + 1 for j in range(size - 2))] for i in range(start, start + count)]
    return [harness.submit(prompt, work, tenant=tenant, weight=weight, priority=priority) for prompt in prompts]


def served(answers: dict[str, list[Answer]], until: int) -> Counter[str]:
    """Tokens that each tenant got before the step ``until``."""
    return Counter({t: sum(time < until for answer in own for time in answer.times) for t, own in answers.items()})


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_flood_of_one_key_does_not_delay_another(policy: str) -> None:
    harness = harness_of(policy=policy)
    flood = ask(harness, "flood", 100, priority=-5)
    harness.advance()
    other = ask(harness, "other", 1)
    harness.run()
    harness.check_outputs()
    first_seat_free = flood[0].times[-1]
    assert other[0].times[0] <= first_seat_free + 4
    assert sum(answer.times[0] < other[0].times[0] for answer in flood) <= 3


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 0.5, "b": 2.0, "c": 0.5}])
def test_keys_that_always_ask_are_served_by_their_weights(weights: dict[str, float]) -> None:
    harness = harness_of()
    answers = {tenant: ask(harness, tenant, 80, weight) for tenant, weight in weights.items()}
    harness.run()
    harness.check_outputs()
    first_ready = min(own[-1].times[-1] for own in answers.values())
    got = served(answers, first_ready)
    for tenant, weight in weights.items():
        share = weight / sum(weights.values())
        assert got[tenant] / got.total() == pytest.approx(share, abs=0.05)


def test_long_requests_count_for_more_than_short_ones() -> None:
    harness = harness_of()
    answers = {"long": ask(harness, "long", 30, size=90), "short": ask(harness, "short", 150, size=10)}
    harness.run()
    end = min(own[-1].times[-1] for own in answers.values())
    finished = {tenant: sum(answer.times[-1] <= end for answer in own) for tenant, own in answers.items()}
    cost_long, cost_short = 90 + 2 * 10, 10 + 2 * 10
    assert finished["short"] / finished["long"] == pytest.approx(cost_long / cost_short, rel=0.15)


def test_nobody_saves_up_a_claim_while_idle() -> None:
    harness = harness_of()
    ask(harness, "late", 1)
    harness.run()
    answers = {"busy": ask(harness, "busy", 100)}
    for _ in range(150):
        harness.advance()
    came = harness.time
    answers["late"] = ask(harness, "late", 50)
    harness.run()
    end = min(own[-1].times[-1] for own in answers.values())
    before = served(answers, came)["busy"]
    got = served(answers, end)
    assert got["late"] <= (got["busy"] - before) * 1.2


def test_work_goes_on_when_only_one_key_asks() -> None:
    alone, among = harness_of(), harness_of()
    ask(alone, "", 40)
    ask(among, "b", 1)
    among.run()
    start = among.time
    ask(among, "a", 40)
    alone.run()
    among.run()
    assert abs((among.time - start) - alone.time) <= 2


def test_a_queue_that_one_key_has_filled_still_takes_others_up_to_their_share() -> None:
    harness = harness_of(1, max_num_queued_reqs=40)
    flood = ask(harness, "flood", 100)
    other = ask(harness, "other", 100, weight=1.0)
    third = ask(harness, "third", 100, weight=2.0)
    taken = [sum(answer.rejected is None for answer in own) for own in (flood, other, third)]
    assert taken == [41, 20, 20]
    assert all(answer.rejected.code == "queue_full" for answer in [*flood, *other, *third] if answer.rejected)
    harness.run()
    harness.check_outputs()


def test_requests_that_come_back_from_a_retraction_are_not_charged_again() -> None:
    harness = Harness(num_pages=80, max_model_len=300, options=SchedulerOptions(max_num_seqs=4))
    work = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    answers = {tenant: ask(harness, tenant, 8, size=20, work=work) for tenant in ("a", "b")}
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.stats().retracted
    got = served(answers, min(own[-1].times[-1] for own in answers.values()))
    assert got["a"] == pytest.approx(got["b"], rel=0.25)

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


STEP_S = 0.1


class Timed(Harness):
    """Each step takes ``STEP_S`` of the scheduler's clock, so that it takes seats back after ten, then each third."""

    def __init__(self, num_seats: int, **sizes: int | bool) -> None:
        self.time = 0
        options = SchedulerOptions(max_num_seqs=num_seats)
        super().__init__(options=options, clock=lambda: self.time * STEP_S, **sizes)  # type: ignore[arg-type]

    def running(self, answers: list[Answer]) -> int:
        """How many of ``answers`` got a token in the last step."""
        return sum(answer.times[-1:] == [self.time] for answer in answers)


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


LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flood_gives_back_the_seats_above_its_share(overlap: bool) -> None:
    harness = Timed(4, num_pages=400, overlap=overlap)
    flood = ask(harness, "flood", 12, work=LONG)
    for _ in range(30):
        harness.advance()
    others = ask(harness, "other", 6, work=LONG)
    for _ in range(9):
        harness.advance()
    assert not harness.running(others), "a seat might still become free by itself"
    for _ in range(20):
        harness.advance()
    assert (harness.running(flood), harness.running(others)) == (2, 2)
    retracted = harness.scheduler.stats().retracted
    assert retracted == 2, "each has its share: nobody steps back again"
    for _ in range(100):
        harness.advance()
    assert harness.scheduler.stats().retracted == retracted
    harness.run()
    harness.check_outputs()


def test_weights_decide_how_many_seats_are_given_back() -> None:
    harness = Timed(8, num_pages=800)
    heavy = ask(harness, "heavy", 10, 3.0, work=LONG)
    harness.advance()
    light = ask(harness, "light", 10, 1.0, work=LONG)
    for _ in range(60):
        harness.advance()
    assert (harness.running(heavy), harness.running(light)) == (6, 2)


def test_a_flood_gives_back_pages_too() -> None:
    """Seats are plenty; what the flood holds all of is KV."""
    harness = Timed(16, num_pages=100, max_model_len=400)
    flood = ask(harness, "flood", 10, size=60, work=SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    for _ in range(30):
        harness.advance()
    sent = harness.time
    (other,) = ask(harness, "other", 1, size=60)
    harness.run()
    harness.check_outputs()
    assert other.times[0] - sent < 30
    assert min(answer.times[-1] for answer in flood) > other.times[-1]


def test_each_request_steps_back_once_at_most_however_many_keys_come() -> None:
    harness = Timed(4, num_pages=400)
    ask(harness, "flood", 8, work=LONG)
    for key in range(12):
        for _ in range(15):
            harness.advance()
        ask(harness, f"key {key}", 2, work=LONG)
    harness.run()
    harness.check_outputs()
    assert 3 <= harness.scheduler.stats().retracted <= len(harness.answers)


def test_the_last_seat_of_a_key_is_not_taken() -> None:
    harness = Timed(2, num_pages=400)
    ask(harness, "a", 1, work=LONG)
    ask(harness, "b", 1, work=LONG)
    harness.advance()
    ask(harness, "c", 3, work=LONG)
    harness.run()
    assert not harness.scheduler.stats().retracted

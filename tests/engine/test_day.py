"""Half an hour that has a night and a noon, through the real scheduler with a calculated device."""

import pytest

from radixserve.benchmarks.day import OPTIONS, Day, Report


@pytest.fixture(scope="module")
def quiet() -> Report:
    return Day(OPTIONS).run(hours=0.3, load=0.5)


@pytest.fixture(scope="module")
def overloaded() -> Report:
    return Day(OPTIONS).run(hours=0.4, load=2.0)


def test_every_request_of_a_day_has_one_end(quiet: Report, overloaded: Report) -> None:
    for report in (quiet, overloaded):
        assert report.ends.total() == report.num_requests > 400


def test_a_quiet_day_refuses_nobody_and_lets_nobody_wait_for_long(quiet: Report) -> None:
    assert set(quiet.ends) == {"length"}
    assert quiet.wait_s(95) < 5
    assert quiet.cached_share > 0.4


def test_an_overloaded_day_keeps_the_device_busy_and_the_queue_short(overloaded: Report) -> None:
    assert overloaded.utilisation > 0.95
    assert overloaded.wait_s(100) <= OPTIONS.max_queue_time + 1
    assert set(overloaded.ends) <= {"length", "queue_full", "queue_timeout"}
    assert overloaded.ends["queue_full"] or overloaded.ends["queue_timeout"]


def test_an_overloaded_day_is_fair(overloaded: Report) -> None:
    assert overloaded.fairness > 0.9
    assert overloaded.wait_s(50, "a") < overloaded.wait_s(50, "b"), "b asks for more than its share, and waits for it"


def test_a_day_is_the_same_each_time(quiet: Report) -> None:
    again = Day(OPTIONS).run(hours=0.3, load=0.5)
    assert (again.ends, again.num_steps, again.waits_s) == (quiet.ends, quiet.num_steps, quiet.waits_s)

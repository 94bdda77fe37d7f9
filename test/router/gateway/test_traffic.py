"""The fleet's prompt tokens over time are counted by minute, and the oldest minutes are dropped."""

from marconi.router.gateway.traffic import NUM_STEPS, STEP_S, FleetTraffic, Step


def steps_of(traffic: FleetTraffic) -> list[Step]:
    return [Step(**step) for step in traffic.state()["steps"]]


def test_requests_of_one_minute_add_up_and_those_without_a_report_count_for_what_was_expected_alone() -> None:
    traffic = FleetTraffic()
    traffic.add(120.5, 100, 60, 50)
    traffic.add(179.9, 10, 0, None)
    traffic.add(180.0, 7, 7, 0)
    assert steps_of(traffic) == [Step(120, 2, 110, 60, 100, 50), Step(180, 1, 7, 7, 7, 0)]


def test_a_minute_without_a_request_has_no_step() -> None:
    traffic = FleetTraffic()
    for now_s in (0, 10 * STEP_S):
        traffic.add(now_s, 1, 0, None)
    assert [step.at_s for step in steps_of(traffic)] == [0, 600]


def test_only_the_latest_steps_are_kept() -> None:
    traffic = FleetTraffic()
    for minute in range(NUM_STEPS + 5):
        traffic.add(minute * STEP_S, 1, 0, None)
    kept = [step.at_s for step in steps_of(traffic)]
    assert (len(kept), kept[0]) == (NUM_STEPS, 5 * STEP_S)


def test_a_clock_that_was_set_back_counts_in_the_latest_step() -> None:
    traffic = FleetTraffic()
    for now_s in (600, 30, 610, 660):
        traffic.add(now_s, 1, 0, None)
    assert [(step.at_s, step.num_requests) for step in steps_of(traffic)] == [(600, 3), (660, 1)]

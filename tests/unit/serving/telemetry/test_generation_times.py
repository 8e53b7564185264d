from loraserve.serving.telemetry.generation_times import ChoiceTimes, GenerationPhases, phases_of, times_of


def test_phases_cover_all_choices_of_a_request() -> None:
    first = ChoiceTimes(10.0, queue_s=1.0, first_token_s=13.0, last_token_s=15.0)
    second = ChoiceTimes(10.0, queue_s=2.0, first_token_s=14.0, last_token_s=18.0)
    unbegun = ChoiceTimes(10.0)
    assert phases_of([second, first, unbegun], sent_s=11.0) == GenerationPhases(11.0, 12.0, 13.0, 18.0)
    times = times_of([second, first], received_s=10.0)
    assert (times.queue_ms, times.ttft_ms, times.generation_ms) == (2000, 3000, 5000)


def test_there_are_no_phases_before_the_first_token() -> None:
    assert phases_of([ChoiceTimes(10.0)], sent_s=11.0) is None
    assert times_of([ChoiceTimes(10.0)], received_s=10.0).ttft_ms is None


def test_a_queue_measured_by_another_clock_ends_with_the_first_token_at_the_latest() -> None:
    late = ChoiceTimes(10.0, queue_s=3.0, first_token_s=13.0, last_token_s=13.0)
    assert phases_of([late], sent_s=11.0) == GenerationPhases(11.0, 13.0, 13.0, 13.0)

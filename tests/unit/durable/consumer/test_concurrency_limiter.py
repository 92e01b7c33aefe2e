"""How many durable requests are submitted at once."""

import pytest

from weir.durable.consumer.runner import MAX_RUNNING_REQUESTS, ConcurrencyLimiter


@pytest.mark.parametrize(("latency_s", "places", "least", "most"), [(0.005, 16, 1024, 1024), (1.0, 400, 800, 1024)])
def test_it_comes_to_keep_workers_busy(latency_s: float, places: int, least: int, most: int) -> None:
    window, now_s = ConcurrencyLimiter(), 0.0
    for _ in range(20):
        now_s += 0.1
        for _ in range(int(window.size * 0.1 / latency_s)):
            window.add_response()
        window.tick(now_s, places)
    assert least <= window.size <= most


def test_a_slow_model_has_few() -> None:
    window = ConcurrencyLimiter()
    for number in range(50):
        for _ in range(40):  # 400 a second, however many are submitted
            window.add_response()
        window.tick(number / 10, 8)
    assert window.size < 150
    window.tick(6.0, None)
    assert window.size == MAX_RUNNING_REQUESTS

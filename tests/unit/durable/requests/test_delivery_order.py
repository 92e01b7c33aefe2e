"""Deliveries of a consumer, of which some were lost on the way."""

from weir.durable.requests.ordering import DeliveryOrder


def followed(order: DeliveryOrder, *numbers: int) -> list[bool]:
    return [order.follows(number) for number in numbers]


def test_nothing_is_taken_behind_a_gap_until_all_is_delivered_again() -> None:
    order = DeliveryOrder()
    assert followed(order, 1, 2, 4, 5, 1, 2, 3) == [True, True, False, False, True, True, True]


def test_a_new_beginning_takes_the_first_delivery_only() -> None:
    order = DeliveryOrder()
    assert followed(order, 1, 2, 3) == [True] * 3
    order.begin()
    assert followed(order, 4, 2, 1, 2) == [False, False, True, True]

from gateway.serve.places import PROBE_PLACES, Place, Places


def entered(places: Places, network: str, closed: list[Place]) -> Place:
    place = places.enter(network)
    assert place is not None
    place.close = lambda: closed.append(place)
    return place


def test_a_client_beyond_its_bound_loses_its_own_oldest_connection_without_a_request() -> None:
    places, closed = Places(9, max_per_network=2), list[Place]()
    other = entered(places, "b", closed)
    first, second = (entered(places, "a", closed) for _ in range(2))
    third = entered(places, "a", closed)
    assert closed == [first]
    second.begin()
    third.begin()
    assert places.enter("a") is None, "both serve requests"
    assert other not in closed
    assert places.num_open == 3


def test_connections_without_a_first_request_are_closed_before_those_between_two() -> None:
    places, closed = Places(2), list[Place]()
    idle, unused = (entered(places, "a", closed) for _ in range(2))
    idle.begin()
    idle.rest()
    late = entered(places, "a", closed)
    assert closed == [unused]
    late.begin()
    entered(places, "b", closed)
    assert closed == [unused, idle]


def test_when_all_connections_serve_requests_a_few_places_are_left_for_probes() -> None:
    places, closed = Places(3), list[Place]()
    for _ in range(3):
        entered(places, "a", closed).begin()
    for number in range(PROBE_PLACES):
        probe = entered(places, str(number), closed)
        assert probe.is_for_probes
        probe.begin()
    assert places.enter("late") is None
    assert closed == []


def test_a_place_that_is_left_counts_no_more_and_is_left_once() -> None:
    places, closed = Places(9, max_per_network=1), list[Place]()
    place = entered(places, "a", closed)
    place.begin()
    place.leave()
    place.leave()
    place.rest()
    assert places.num_open == 0
    assert entered(places, "a", closed) is not place
    assert closed == []

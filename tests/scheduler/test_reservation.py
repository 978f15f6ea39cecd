"""The reservation of the scheduler: asked before each start, released once when the request stops running."""

from __future__ import annotations

import pytest

from chatcache.scheduler.request import LiveRequest
from tests.scheduler.driver import SchedulerDriver, rows


class Seats:
    """At most `limit` requests at a time. Satisfies `Reservation`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: list[str] = []
        self.released: list[str] = []

    def reserve(self, request: LiveRequest) -> bool:
        if len(self.held) == self.limit:
            return False
        self.held.append(request.request_id)
        return True

    def release(self, request: LiveRequest) -> None:
        self.held.remove(request.request_id)
        self.released.append(request.request_id)


@pytest.fixture
def seats() -> Seats:
    return Seats(2)


@pytest.fixture
def driver(seats: Seats) -> SchedulerDriver:
    return SchedulerDriver(num_pages=16, reservation=seats)


def test_plan_refused_reservation_keeps_the_request_and_all_after_it_waiting(
    driver: SchedulerDriver, seats: Seats
) -> None:
    for first in (10, 20, 30, 40):
        driver.add([first, first + 1])
    assert [row[0] for row in rows(driver.decode())] == ["r0", "r1"]
    assert [row[0] for row in rows(driver.decode())] == ["r0", "r1"]
    assert seats.held == ["r0", "r1"] and len(driver.scheduler.waiting) == 2


def test_finish_releases_the_reservation_and_the_next_request_starts(driver: SchedulerDriver, seats: Seats) -> None:
    first, _, third = (driver.add([first, first + 1]) for first in (10, 20, 30))
    driver.decode()
    driver.scheduler.finish(first)
    assert seats.released == ["r0"]
    driver.decode()
    assert seats.held == ["r1", "r2"]
    driver.scheduler.finish(third)
    assert seats.released == ["r0", "r2"]


def test_finish_of_a_waiting_request_releases_nothing(driver: SchedulerDriver, seats: Seats) -> None:
    waiting = [driver.add([first]) for first in (10, 20, 30)][-1]
    driver.decode()
    driver.scheduler.finish(waiting)
    assert seats.held == ["r0", "r1"] and not seats.released


def test_preemption_releases_the_reservation_and_reserves_again(driver: SchedulerDriver, seats: Seats) -> None:
    driver.add(range(10, 34))
    driver.add(range(40, 64))
    while not driver.scheduler.num_preemptions:
        driver.decode()
    assert seats.released == ["r1"] and seats.held == ["r0"]
    driver.scheduler.finish(driver.scheduler.running[0])
    driver.decode()
    assert seats.held == ["r1"]


def test_restart_all_releases_every_reservation(driver: SchedulerDriver, seats: Seats) -> None:
    driver.add([10])
    driver.add([20])
    driver.decode()
    driver.scheduler.restart_all()
    assert not seats.held and sorted(seats.released) == ["r0", "r1"]

"""The fair order of a worker's queue, against a plain statement of what fairness means."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.protocol.work_queue import IDLE_SHARES_MAX, FairQueue


class Item:
    def __init__(self, tenant: str, asker: str, tokens: int, number: int) -> None:
        self.tenant, self.asker, self.tokens, self.number = tenant, asker, tokens, number

    def __repr__(self) -> str:
        return f"{self.asker}{self.number}"


def push(queue: FairQueue[Item], asker: str, count: int = 1, *, tokens: int = 10, tenant: str = "t") -> list[Item]:
    items = [Item(tenant, asker, tokens, number) for number in range(count)]
    for item in items:
        queue.push(item, tenant=tenant, asker=asker)
    return items


def serve(queue: FairQueue[Item]) -> Item:
    item = queue.pop()
    assert item is not None
    queue.charge(item.tokens, tenant=item.tenant, asker=item.asker)
    return item


def test_one_asker_is_served_in_the_order_of_arrival() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = push(queue, "a", 4)
    assert [serve(queue) for _ in items] == items
    assert queue.pop() is None


def test_a_flood_of_one_asker_does_not_keep_another_waiting() -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, "flood", 50)
    serve(queue)
    (late,) = push(queue, "b")
    assert serve(queue) is late


def test_few_long_jobs_count_as_much_as_many_short_ones() -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, "long", 3, tokens=100)
    push(queue, "short", 30, tokens=10)
    served = [serve(queue).asker for _ in range(22)]
    assert Counter(served) == {"long": 2, "short": 20}


def test_tenants_share_first_and_their_askers_share_what_they_get() -> None:
    queue: FairQueue[Item] = FairQueue()
    for asker in "abcd":
        push(queue, asker, 20, tenant="many")
    push(queue, "e", 20, tenant="one")
    served = [serve(queue) for _ in range(16)]
    assert Counter(item.tenant for item in served) == {"many": 8, "one": 8}
    assert Counter(item.asker for item in served) == {"e": 8, "a": 2, "b": 2, "c": 2, "d": 2}


def test_who_was_just_served_and_comes_back_waits_for_those_who_were_there() -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, "a", tokens=1000)
    push(queue, "b")
    serve(queue)
    push(queue, "a")
    assert serve(queue).asker == "b"


def test_a_pause_saves_no_turns_up() -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, "busy", 20)
    for _ in range(10):
        serve(queue)
    push(queue, "rested", 10)
    assert Counter(serve(queue).asker for _ in range(10)) == {"busy": 5, "rested": 5}


def test_what_is_removed_is_not_served() -> None:
    queue: FairQueue[Item] = FairQueue()
    first, second = push(queue, "a", 2)
    assert queue.remove(first)
    assert not queue.remove(first)
    assert (len(queue), serve(queue), queue.pop()) == (1, second, None)


def test_askers_that_came_once_are_not_remembered_for_ever() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(3 * IDLE_SHARES_MAX):
        push(queue, f"node-{number}", tokens=1 + number % 7, tenant=f"t{number % 2}")
        serve(queue)
    assert sum(len(tenant.askers) for tenant in queue._tenants.values()) <= 2 * IDLE_SHARES_MAX


moves = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60)


@given(moves, st.integers(0, 30))
def test_the_order_told_beforehand_is_the_order_of_service(jobs: list[tuple[str, int]], served_before: int) -> None:
    queue: FairQueue[Item] = FairQueue()
    for number, (asker, tokens) in enumerate(jobs):
        queue.push(Item("xy"[number % 2], asker, tokens, number), tenant="xy"[number % 2], asker=asker)
    for _ in range(min(served_before, len(jobs) - 1)):
        serve(queue)
    told = queue.in_order(lambda item: item.tokens)
    assert len(told) == len(queue)
    assert [serve(queue) for _ in told] == told


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=30, max_size=90))
def test_askers_with_work_get_the_same_service_but_for_one_job(jobs: list[tuple[str, int]]) -> None:
    queue: FairQueue[Item] = FairQueue()
    for number, (asker, tokens) in enumerate(jobs):
        queue.push(Item("t", asker, tokens, number), tenant="t", asker=asker)
    left = Counter(asker for asker, _ in jobs)
    got: Counter[str] = Counter(dict.fromkeys(left, 0))
    while len(left) > 1 and min(left.values()) > 0:
        item = serve(queue)
        left[item.asker] -= 1
        got[item.asker] += item.tokens
        assert max(got.values()) - min(got.values()) <= 50

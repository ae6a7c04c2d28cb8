"""Turns: how many run, how many wait, in which order, and what the others are told."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.turns import LONGEST_RETRY_AFTER, Overloaded, Turns


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.sampled_from(["come", "end", "give up"]), max_size=30))
@settings(max_examples=60, deadline=None)
def test_no_sequence_of_events_lets_more_run_or_wait_than_may_or_loses_a_turn(most: int, waiting: int, events: list[str]) -> None:
    async def play() -> None:
        turns = Turns(most, waiting, 3600.0)
        order: list[int] = []
        running: list[tuple[int, asyncio.Event]] = []
        tasks: dict[int, asyncio.Task[None]] = {}
        refused = 0

        async def one(number: int) -> None:
            async with turns.turn():
                order.append(number)
                end = asyncio.Event()
                running.append((number, end))
                try:
                    await end.wait()
                finally:
                    running.remove((number, end))

        for number, what in enumerate(events):
            queue = [key for key, task in tasks.items() if not task.done() and key not in order]
            if what == "come":
                tasks[number] = asyncio.create_task(one(number))
                await settle()
                if len(running) == most and len(queue) == waiting and number not in order:
                    assert isinstance(tasks[number].exception(), Overloaded)
                    refused += 1
            elif what == "end" and running:
                running[0][1].set()
            elif what == "give up" and queue:
                tasks[queue[0]].cancel()
            await settle()
            queue = [key for key, task in tasks.items() if not task.done() and key not in order]
            assert (turns.running, turns.waiting, turns.refused) == (len(running), len(queue), refused)
            assert turns.running == most or not queue
        assert order == sorted(order)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert (turns.running, turns.waiting) == (0, 0)

    asyncio.run(play())


async def test_without_a_limit_nobody_waits() -> None:
    turns = Turns(None, 0, 1.0)

    async def hold(release: asyncio.Event) -> None:
        async with turns.turn():
            await release.wait()

    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(release)) for _ in range(50)]
    await settle()
    assert (turns.running, turns.waiting) == (50, 0)
    release.set()
    await asyncio.gather(*tasks)


async def test_one_who_waits_too_long_is_refused_and_leaves_the_queue() -> None:
    turns = Turns(1, 5, 0.01)
    async with turns.turn():
        with pytest.raises(Overloaded, match=r"no turn came within 0\.01 s, 1 calls being under way"):
            async with turns.turn():
                pytest.fail("there was a turn")
        assert (turns.running, turns.waiting, turns.refused) == (1, 0, 1)
    async with turns.turn():
        assert turns.running == 1


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, 1), (7.2, 8), (1e6, LONGEST_RETRY_AFTER)])
async def test_those_refused_are_told_when_the_queue_will_have_been_served(seconds: float, expected: int) -> None:
    clock = Clock()
    turns = Turns(1, 0, 3600.0, clock=clock)
    async with turns.turn():
        clock.now += seconds
    async with turns.turn():
        with pytest.raises(Overloaded, match="1 calls are under way and 0 wait") as refusal:
            async with turns.turn():
                pytest.fail("there was a turn")
    assert refusal.value.retry_after == expected

"""What a signal does before the traffic, it does after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from tuner.stopping import remembered_interrupts, signals_to


async def test_a_signal_is_taken_while_asked_for_and_does_what_it_did_before_afterwards() -> None:
    came: list[int] = []
    taken = asyncio.Event()
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with signals_to(taken.set):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(taken.wait(), 10.0)
        assert came == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_library_swallows_is_not_lost(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with remembered_interrupts() as interrupts:
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(number) is before

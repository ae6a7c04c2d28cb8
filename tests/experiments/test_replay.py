import asyncio
import socket

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from envs.workloads.trace import Trace
from experiments.replay import ReplayError, replay


def make_trace(times, **changes):
    count = len(times)
    columns = {
        "key": np.arange(count, dtype=np.uint64),
        "size": np.full(count, 100),
        "group": np.full(count, -1),
        "input_tokens": np.full(count, 5, np.int32),
        "output_tokens": np.arange(1, count + 1, dtype=np.int32),
        "prompts": ["first question", "second question"],
        "prompt_id": np.arange(count) % 2,
    }
    return Trace("made", np.asarray(times, float), **{**columns, **changes})


class Gateway:
    """A gateway that remembers what it was asked; ``hold`` keeps its answers back."""

    def __init__(self):
        self.asked = []
        self.running = 0
        self.most = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.arrived = asyncio.Event()
        self.statuses = {}
        self.keys = []

    async def models(self, request):
        return web.json_response({"data": []})

    async def answer(self, request):
        body = await request.json()
        tokens = request.headers["x-llm-sim-output-tokens"]
        self.asked.append((body, tokens))
        self.keys.append(request.headers.get("authorization"))
        status = self.statuses.get(int(tokens) - 1, 200)  # by row: under load requests may overtake each other
        self.running += 1
        self.most = max(self.most, self.running)
        self.arrived.set()
        try:
            await self.hold.wait()
        finally:
            self.running -= 1
        if not status:
            request.transport.close()
        headers = {"x-cache": "HIT", "x-cache-tier": "memory", "x-cache-arm": "treatment"}
        return web.json_response({"choices": []}, status=status or 200, headers=headers)


@pytest.fixture
async def served():
    gateway = Gateway()
    app = web.Application()
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_post("/v1/chat/completions", gateway.answer)
    async with TestServer(app) as server:
        gateway.url = str(server.make_url("/")).rstrip("/")
        yield gateway


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_request_is_sent_with_its_prompt_and_its_length(served):
    seen = []
    result = await replay(make_trace([0.0, 0.02, 0.05]), served.url, model="m", on_result=seen.append)
    served.asked.sort(key=lambda asked: asked[1])
    bodies = [body for body, _ in served.asked]
    assert [body["messages"] for body in bodies] == [
        [{"role": "user", "content": text}] for text in ("first question", "second question", "first question")
    ]
    assert {body["model"] for body in bodies} == {"m"}
    assert [tokens for _, tokens in served.asked] == ["1", "2", "3"]
    assert list(result.requests["row"]) == [0, 1, 2]
    assert set(result.requests["cache"]) == {"HIT"}
    assert set(result.requests["tier"]) == {"memory"}
    assert set(result.requests["arm"]) == {"treatment"}
    assert (result.requests["sent"] >= result.requests["due"]).all()
    assert (result.requests["latency"] > 0).all()
    assert len(seen) == 3
    assert not result.stopped
    assert result.failed == 0
    assert result.summary()["outcomes"] == {"HIT": 3}


async def test_requests_are_sent_on_time_though_earlier_ones_are_not_answered(served):
    served.hold.clear()
    running = asyncio.create_task(replay(make_trace([0.0, 0.01, 0.02, 0.03]), served.url + "/v1", model="m"))
    await until(lambda: served.running == 4)
    served.hold.set()
    assert (await running).full == 0


async def test_the_window_of_requests_under_way_is_bounded_and_a_full_one_is_reported(served):
    served.hold.clear()
    running = asyncio.create_task(replay(make_trace(np.zeros(12)), served.url, model="m", max_inflight=3, late_after=0.0))
    await until(lambda: served.running == 3)
    served.hold.set()
    result = await running
    assert served.most == 3
    assert len(result.requests) == 12
    assert result.full >= 1
    assert result.late >= result.full
    assert result.worst_lateness > 0
    assert "sent" in result.caveat()
    assert f"full for {result.full}" in result.caveat()


async def test_failures_are_recorded_and_do_not_end_the_replay(served):
    served.statuses = {0: 503, 1: 0}
    result = await replay(make_trace([0.0, 0.05, 0.1]), served.url, model="m")
    assert len(result.requests) == 3
    by_row = result.requests.set_index("row").sort_index()
    assert by_row["status"].tolist() == [503, 0, 200]
    assert by_row["error"].ne("").tolist() == [False, True, False]
    assert result.failed == 2
    assert result.summary()["statuses"] == {"503": 1, "no answer": 1, "200": 1}


async def test_a_key_is_sent_with_every_request_and_none_where_none_is_given(served):
    await replay(make_trace([0.0, 0.01]), served.url, model="m", api_key="sesame")
    await replay(make_trace([0.0]), served.url, model="m")
    assert served.keys == ["Bearer sesame"] * 2 + [None]


@pytest.mark.parametrize(("key", "way_out"), [(None, "--api-key or CACHEPILOT_API_KEY"), ("wrong", "does not know the key")])
async def test_a_gateway_that_lets_nobody_in_is_an_error_that_says_how_to_get_in(served, key, way_out):
    served.statuses = dict.fromkeys(range(400), 401)
    with pytest.raises(ReplayError, match=rf"answered all of 2 requests with 401.*{way_out}"):
        await replay(make_trace([0.0, 0.01]), served.url, model="m", api_key=key)
    served.asked.clear()
    times = [*np.linspace(0, 1, 200), 5000.0]
    with pytest.raises(ReplayError, match=way_out) as raised:
        await replay(make_trace(times), served.url, model="m", api_key=key, max_inflight=5)
    assert "wrong" not in str(raised.value)
    assert len(served.asked) < 200  # the rest would have been no better


async def test_a_few_that_are_not_let_in_are_counted_among_the_others(served):
    served.statuses = {0: 401}
    result = await replay(make_trace([0.0, 0.05]), served.url, model="m")
    assert result.summary()["statuses"] == {"401": 1, "200": 1}


async def test_an_answer_that_takes_too_long_is_a_failure(served):
    served.hold.clear()
    result = await replay(make_trace([0.0]), served.url, model="m", timeout=0.05)
    served.hold.set()
    assert result.requests["status"].tolist() == [0]
    assert "Timeout" in result.requests["error"].iloc[0]


@pytest.mark.parametrize("times", [[0.0, 1000.0], [0.0, 0.0, 0.0]])
async def test_a_stop_ends_it_at_once_whether_it_waits_for_time_or_for_room(served, times):
    served.hold.clear()
    stop = asyncio.Event()
    running = asyncio.create_task(replay(make_trace(times), served.url, model="m", stop=stop, max_inflight=1))
    await served.arrived.wait()
    stop.set()
    async with asyncio.timeout(20):
        result = await running
    served.hold.set()
    assert result.stopped
    assert len(result.requests) < len(times)


async def test_a_cancelled_replay_leaves_nothing_running(served):
    served.hold.clear()
    running = asyncio.create_task(replay(make_trace([0.0, 1000.0]), served.url, model="m"))
    await served.arrived.wait()
    before = asyncio.all_tasks()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: served.running == 0)
    assert len(asyncio.all_tasks()) < len(before)


@pytest.mark.parametrize("times", [[0.0, 0.01, 5000.0], [0.0, 5000.0], [0.0]])
async def test_an_error_of_the_caller_is_raised_at_once_though_the_next_request_is_due_much_later(served, times):
    def fail(_):
        raise RuntimeError("the display broke")

    with pytest.raises(RuntimeError, match="the display broke"):
        async with asyncio.timeout(60):
            await replay(make_trace(times), served.url, model="m", on_result=fail)


async def test_a_replay_that_is_let_in_nowhere_ends_at_once_though_the_next_request_is_due_much_later(served):
    served.statuses = dict.fromkeys(range(400), 401)
    with pytest.raises(ReplayError, match="answered all of 20 requests with 401"):
        async with asyncio.timeout(60):
            await replay(make_trace([*np.zeros(20), 5000.0]), served.url, model="m")


async def test_the_start_is_told_before_anything_is_sent(served):
    asked = []
    await replay(make_trace([0.0, 0.0]), served.url, model="m", on_start=lambda: asked.append(len(served.asked)))
    assert asked == [0]
    assert len(served.asked) == 2


async def test_an_empty_trace_sends_nothing(served):
    result = await replay(make_trace([], prompt_id=np.empty(0, np.int64)), served.url, model="m")
    assert result.summary()["sent"] == 0
    assert result.worst_lateness == 0.0
    assert not result.stopped


async def test_an_unreachable_gateway_is_named_with_the_fix():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        started = []
        with pytest.raises(ReplayError, match=r"nothing answers at .*/v1/models.*start the gateway"):
            await replay(make_trace([0.0]), url, model="m", on_start=lambda: started.append(url))
        assert started == []


@pytest.mark.parametrize("url", ["not a url", "ftp://x/"])
async def test_a_url_that_is_none_is_named(url):
    with pytest.raises(ReplayError, match="nothing answers at"):
        await replay(make_trace([0.0]), url, model="m")


async def test_room_for_nothing_is_refused():
    with pytest.raises(ValueError, match="max_inflight"):
        await replay(make_trace([0.0]), "http://localhost:1", model="m", max_inflight=0)

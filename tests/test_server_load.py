"""Two hundred requests of every kind, sixteen at a time: each ends as it must, nothing is left."""

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2
from live_server import live_server
from served import QUESTION, SETTINGS, ReadyBackend, content_of, demo_runtime, events_of

from oled_moe.server import create_app

NUM_REQUESTS, AT_ONCE = 200, 16
KINDS = ("plain", "streamed", "diffusing", "stopped", "slow", "leaving", "vanishing", "bad", "long")
ANSWER = "12 + 30 = 42"
# A token a forward: never over within the fifth of a second that the impatient wait.
LONG = {**QUESTION, "ignore_eos": True, "max_tokens": 900, "threshold": 1, "stream": True}
PATH = "/v1/chat/completions"


async def ask(http: httpx2.AsyncClient, kind: str, draw: random.Random) -> str:
    """One request of a kind; returns what became of it, asserting that it is right."""
    if kind == "bad":
        body = draw.choice([b"{", b"[]", b'{"messages": []}', b'{"messages": NaN}', b"\xff"])
        response = await http.post(PATH, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and "message" in response.json()["error"]
        return "refused"
    if kind == "long":
        response = await http.post(PATH, json={**QUESTION, "max_tokens": 5000})
        assert response.status_code == 400
        return "refused"
    if kind == "vanishing":
        try:
            await http.post(PATH, json={**LONG, "stream": False}, timeout=draw.uniform(0.01, 0.2))
        except httpx2.TimeoutException:
            return "given up"
        raise AssertionError("a long answer cannot have come so soon")
    if kind in ("plain", "stopped"):
        extra = {"stop": [" = 42", "nothing"]} if kind == "stopped" else {}
        response = await http.post(PATH, json={**QUESTION, **extra})
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == ("12 + 30" if kind == "stopped" else ANSWER)
        assert choice["finish_reason"] == "stop"
        return "answered"
    body = LONG if kind == "leaving" else {**QUESTION, "stream": True}
    return await read_stream(http, {**body, "diffusing": kind != "streamed"}, kind, draw)


async def read_stream(http: httpx2.AsyncClient, body: Any, kind: str, draw: random.Random) -> str:
    events: list[Any] = []
    num_lines = draw.randint(1, 6)
    async with http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events += events_of(line)
            if kind == "slow":
                await asyncio.sleep(0.01)
            if kind == "leaving" and len(events) >= num_lines:
                return "given up"
    assert events[-1] == "[DONE]"
    assert content_of(events) == ANSWER
    return "answered"


def running_requests() -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each).__name__ == "RunningRequest"]


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.01)


def test_every_request_ends_and_nothing_is_left() -> None:
    draw = random.Random(5)
    kinds = [KINDS[i % len(KINDS)] for i in range(NUM_REQUESTS)]
    draw.shuffle(kinds)
    became: Counter[str] = Counter()

    async def play(url: str) -> None:
        queue = iter(kinds)

        async def work(http: httpx2.AsyncClient) -> None:
            for kind in queue:
                became[await ask(http, kind, draw)] += 1

        async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
            await asyncio.gather(*(work(http) for _ in range(AT_ONCE)))

    threads = set(threading.enumerate())
    with demo_runtime(max_num_seqs=8, dtype="float32") as runtime:
        scheduler = runtime.scheduler
        with live_server(create_app(ReadyBackend(runtime), SETTINGS)) as url:
            asyncio.run(play(url))
            with httpx2.Client(base_url=url, timeout=60) as http:
                # Whoever comes last is answered like the first.
                reply = http.post(PATH, json=QUESTION).json()
        assert reply["choices"][0]["message"]["content"] == ANSWER
        # Whoever left last is let go behind the forward that is under way.
        wait_until(
            lambda: scheduler.num_running == scheduler.num_waiting == scheduler.kv_tokens == 0
        )
        wait_until(lambda: not running_requests())
    expected = Counter(
        "refused" if kind in ("bad", "long") else "given up" if kind[0] in "lv" else "answered"
        for kind in kinds
    )
    assert became == expected
    # Worker threads of pools that are shared by the whole process may stay.
    left = {t.name for t in set(threading.enumerate()) - threads if t.is_alive()}
    assert not {name for name in left if "oled" in name or "load" in name}, left

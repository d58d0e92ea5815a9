"""Streams event by event: a scheduler that does as it is told, and a reader that is watched."""

import asyncio
import json
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from served import (
    MASK_ID,
    QUESTION,
    SETTINGS,
    Exchange,
    ReadyBackend,
    Script,
    content_of,
    fake_runtime,
    submitted,
)

from oled_moe.decoding import TokenChange
from oled_moe.errors import ConfigError, OledMoeError
from oled_moe.server import create_app
from oled_moe.server_streams import StreamTiming

STREAMED = {**QUESTION, "stream": True}


class Clock:
    """Stands still until moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Stage:
    """An app over a scheduler that does as it is told. `at_once`: frames are not held back."""

    def __init__(self, *, frame_interval_s: float = 0.0, keep_alive_s: float = 15.0) -> None:
        self.runtime = fake_runtime()
        self.clock = Clock()
        timing = StreamTiming(keep_alive_s, frame_interval_s, self.clock)
        self.app = create_app(ReadyBackend(self.runtime), replace(SETTINGS, timing=timing))

    async def ask(self, body: Any, path: str = "/v1/chat/completions") -> Exchange:
        return Exchange(self.app, path, body)

    async def request(self, index: int = 0) -> Any:
        return (await submitted(self.runtime.scheduler, index + 1))[index]

    def script(self, request: Any) -> Script:
        return Script(self.runtime.engine, len(request.prompt))


def test_text_goes_out_as_it_becomes_final() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask(STREAMED)
        request = await stage.request()
        script = stage.script(request)
        assert await exchange.start() == 200
        request.on_event(script.step("12 +"))
        first = await exchange.events(2)
        assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert content_of(first) == "12 +"
        # A step that settles nothing says nothing.
        request.on_event(script.step("12 +", num_masked=3))
        request.on_event(script.step("12 + 30 = 42", reason="stop"))
        rest = await exchange.rest()
        assert content_of(rest) == " 30 = 42"
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "stop"
        assert all(event["choices"][0]["finish_reason"] is None for event in rest[:-2])

    asyncio.run(play())


def test_usage_can_be_told_on_the_way_and_at_the_end() -> None:
    async def play() -> None:
        stage = Stage()
        options = {"include_usage": True, "continuous_usage_stats": True}
        exchange = await stage.ask({**STREAMED, "stream_options": options})
        request = await stage.request()
        script = stage.script(request)
        await exchange.start()
        request.on_event(script.step("ab"))
        on_the_way = (await exchange.events(2))[1]["usage"]
        assert on_the_way == {"prompt_tokens": 17, "completion_tokens": 2, "total_tokens": 19}
        request.on_event(script.step("abc", reason="stop"))
        *_, last, done = await exchange.rest()
        assert (last["choices"], done) == ([], "[DONE]")
        assert last["usage"] == {
            "prompt_tokens": 17,
            "completion_tokens": 3,
            "total_tokens": 20,
            "completion_tokens_details": {"reasoning_tokens": 0},
            "diffusion": {
                "nfe": 3,
                "blocks": 1,
                "tokens_per_forward": 1.0,
                "edited_tokens": 0,
                "expert_hit_rate": 0.75,
                "bytes_fetched": 400,
                "choices_replaced": 0,
                "replaced_weight_share": 0.0,
                "low_expert_runs": 0,
            },
        }

    asyncio.run(play())


def test_a_slow_reader_gets_what_it_missed_in_one_piece() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask({**STREAMED, "diffusing": True})
        request = await stage.request()
        script = stage.script(request)
        # Many steps of one block, and none of them is read.
        for step in range(50):
            change = TokenChange(len(request.prompt), MASK_ID, 75 + step, step / 100)
            request.on_event(script.step("", num_masked=2, step_id=step, changes=[change]))
        request.on_event(script.step("one two", reason="length"))
        await exchange.start()
        events = await exchange.rest()
        frames = [
            event["choices"][0]["delta"]["diffusion"]
            for event in events[:-1]
            if "diffusion" in event["choices"][0]["delta"]
        ]
        assert len(frames) <= 2
        (change,) = frames[0]["changed"]
        assert change["from"] is None and change["pos"] == 0
        assert change["conf"] == 0.49
        assert content_of(events) == "one two"

    asyncio.run(play())


def test_frames_are_held_back_but_the_last_of_a_block_is_not() -> None:
    async def play() -> None:
        stage = Stage(frame_interval_s=1000.0)
        exchange = await stage.ask({**STREAMED, "diffusing": True})
        request = await stage.request()
        script = stage.script(request)
        start = len(request.prompt)
        await exchange.start()
        request.on_event(script.step("", num_masked=3, step_id=0))
        first = await exchange.events(2)
        assert first[1]["choices"][0]["delta"]["diffusion"]["step"] == 0
        changes = [TokenChange(start + 1, MASK_ID, 76, 0.5)]
        request.on_event(script.step("", num_masked=2, step_id=1, changes=changes))
        changes = [TokenChange(start + 2, MASK_ID, 77, 0.5)]
        request.on_event(script.step("", num_masked=1, step_id=2, changes=changes))
        await asyncio.sleep(0.05)
        assert exchange.is_quiet()
        request.on_event(script.step("four", num_masked=0, step_id=3))
        (frame_event,) = await exchange.events(1)
        frame = frame_event["choices"][0]["delta"]["diffusion"]
        assert (frame["step"], frame["final"], frame["masked"]) == (3, True, 0)
        assert [change["pos"] for change in frame["changed"]] == [1, 2]
        request.on_event(script.step("four", reason="stop"))
        await exchange.rest()

    asyncio.run(play())


def test_a_frame_shows_the_draft_of_the_answer_alone() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask({**STREAMED, "diffusing": True, "steps": 3})
        request = await stage.request()
        script = stage.script(request)
        await exchange.start()
        request.on_event(script.step("", num_masked=2))
        frame = (await exchange.events(2))[1]["choices"][0]["delta"]["diffusion"]
        # Prompt tokens that share the block are not shown.
        num_hidden = len(request.prompt) % 4
        assert num_hidden == 1
        assert frame["ids"] == [75, MASK_ID, MASK_ID]
        assert frame["text"] == "l▒▒"
        assert (frame["block"], frame["steps_max"], frame["final"]) == (0, 3, False)
        assert frame["masked"] == 2
        request.on_event(script.step("ok", reason="stop"))
        await exchange.rest()

    asyncio.run(play())


def test_an_error_half_way_is_the_last_event() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask(STREAMED)
        request = await stage.request()
        await exchange.start()
        request.on_event(stage.script(request).step("12"))
        await exchange.events(2)
        request.on_error(OledMoeError("the disk is gone"))
        (error,) = await exchange.rest()
        assert error["error"] == {
            "message": "the disk is gone",
            "type": "server_error",
            "param": None,
            "code": "engine",
        }
        await exchange.task

    asyncio.run(play())


def test_an_error_nobody_expected_ends_a_stream_in_the_same_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask(STREAMED)
        request = await stage.request()
        await exchange.start()
        request.on_error(ZeroDivisionError("secret"))
        (error,) = await exchange.rest()
        assert error["error"]["code"] == "internal"
        assert "secret" not in error["error"]["message"]
        await exchange.task

    asyncio.run(play())
    assert "secret" in caplog.text


def test_an_error_before_the_reply_has_its_status() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask(QUESTION)
        request = await stage.request()
        request.on_error(ZeroDivisionError())
        assert await exchange.start() == 500
        (body,) = [await exchange.message()]
        assert b'"code":"internal"' in body["body"]

    asyncio.run(play())


def test_an_error_that_comes_before_anybody_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        stage = Stage()
        submit = stage.runtime.scheduler.submit

        def fail(*args: Any, **callbacks: Any) -> Any:
            handle = submit(*args, **callbacks)
            callbacks["on_error"](ConfigError("seed is odd; allowed: even"))
            return handle

        monkeypatch.setattr(stage.runtime.scheduler, "submit", fail)
        exchange = await stage.ask(QUESTION)
        assert await exchange.start() == 400
        assert b'"param":"seed"' in (await exchange.message())["body"]

    asyncio.run(play())


def test_comments_keep_a_stream_alive_that_waits() -> None:
    async def play() -> None:
        stage = Stage(keep_alive_s=0.01)
        exchange = await stage.ask(STREAMED)
        request = await stage.request()
        await exchange.start()
        assert await exchange.events(2) == [": keep-alive", ": keep-alive"]
        request.on_event(stage.script(request).step("12", reason="stop"))
        assert content_of(await exchange.rest()) == "12"

    asyncio.run(play())


@pytest.mark.parametrize("body", [STREAMED, QUESTION, {**STREAMED, "n": 3}])
def test_a_client_that_leaves_frees_its_requests(
    body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        stage = Stage()
        number = body.get("n", 1)
        exchange = await stage.ask(body)
        requests = await submitted(stage.runtime.scheduler, number)
        if body.get("stream"):
            await exchange.start()
            requests[0].on_event(stage.script(requests[0]).step("12"))
            await exchange.events(2)
        await exchange.leave()
        assert stage.runtime.scheduler.cancelled == [request.handle for request in requests]
        # Nothing that comes later disturbs anybody.
        requests[0].on_event(stage.script(requests[0]).step("12 + 30", reason="stop"))
        await asyncio.sleep(0)

    with caplog.at_level(logging.INFO):
        asyncio.run(play())
    assert "POST /v1/chat/completions 499 " in caplog.text


def test_one_answer_that_fails_takes_the_others_along() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask({**QUESTION, "n": 2})
        requests = await submitted(stage.runtime.scheduler, 2)
        requests[0].on_error(OledMoeError("gone"))
        assert await exchange.start() == 500
        await exchange.task
        assert stage.runtime.scheduler.cancelled == [requests[1].handle]

    asyncio.run(play())


def test_a_full_queue_is_429_and_nothing_is_left_behind() -> None:
    async def play() -> None:
        stage = Stage()
        scheduler = stage.runtime.scheduler
        scheduler.max_submitted = 1
        exchange = await stage.ask({**STREAMED, "n": 2})
        message = await exchange.message()
        assert message["status"] == 429
        assert (b"retry-after", b"7") in message["headers"]
        await exchange.task
        assert scheduler.cancelled == [scheduler.submitted[0].handle]

    asyncio.run(play())


def test_choices_have_seeds_of_their_own_and_indices() -> None:
    async def play() -> None:
        stage = Stage()
        body = {"prompt": [[75], [76, 77]], "n": 2, "seed": 2**63 - 1, "temperature": 1}
        exchange = await stage.ask(body, "/v1/completions")
        requests = await submitted(stage.runtime.scheduler, 4)
        assert [request.params.seed for request in requests] == [2**63 - 1, 0] * 2
        assert requests[2].prompt == requests[3].prompt == [76, 77]
        for text, request in zip("abcd", requests, strict=True):
            request.on_event(stage.script(request).step(text, reason="stop"))
        assert await exchange.start() == 200
        reply = (await exchange.message())["body"].decode()
        assert [f'"index":{i},"text":"{text}"' in reply for i, text in enumerate("abcd")] == [
            True
        ] * 4

    asyncio.run(play())


TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def able_stage() -> Stage:
    """With a chat template that has a place for tools."""
    stage = Stage()
    stage.runtime.engine.tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    return stage


def test_tool_calls_are_streamed_once_they_are_whole() -> None:
    async def play() -> None:
        stage = able_stage()
        exchange = await stage.ask({**STREAMED, "tools": [TOOL]})
        request = await stage.request()
        script = stage.script(request)
        await exchange.start()
        request.on_event(script.step("Let me see. " + CALL[:20]))
        begun = await exchange.events(2)
        assert content_of(begun) == "Let me see."
        request.on_event(script.step(f"Let me see. {CALL}\n{CALL}", reason="stop"))
        rest = await exchange.rest()
        assert content_of(rest) == ""
        calls = rest[0]["choices"][0]["delta"]["tool_calls"]
        assert [call["index"] for call in calls] == [0, 1]
        assert calls[0]["type"] == "function" and calls[0]["id"] != calls[1]["id"]
        assert calls[0]["function"] == {"name": "look", "arguments": '{"at": "x"}'}
        assert rest[-2]["choices"][0]["finish_reason"] == "tool_calls"

    asyncio.run(play())


def test_tool_calls_of_a_whole_reply() -> None:
    async def play() -> None:
        stage = able_stage()
        exchange = await stage.ask({**QUESTION, "tools": [TOOL]})
        request = await stage.request()
        request.on_event(stage.script(request).step(CALL, reason="stop"))
        assert await exchange.start() == 200
        (choice,) = json.loads((await exchange.message())["body"])["choices"]
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
        assert choice["finish_reason"] == "tool_calls"

    asyncio.run(play())


def test_tokens_of_half_characters_have_no_bytes_of_their_own() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask({**QUESTION, "logprobs": True})
        request = await stage.request()
        request.on_event(stage.script(request).step("aé😀b", reason="stop", confidence=0.25))
        await exchange.start()
        (choice,) = json.loads((await exchange.message())["body"])["choices"]
        tokens = choice["logprobs"]["content"]
        assert len(tokens) == 8
        assert [t["token"] for t in tokens if t["bytes"]] == ["a", "b"]
        assert tokens[0]["logprob"] == pytest.approx(math.log(0.25))

    asyncio.run(play())


def test_tokens_behind_the_text_that_is_shown_stay_unseen() -> None:
    async def play() -> None:
        stage = Stage()
        exchange = await stage.ask({**STREAMED, "logprobs": True})
        request = await stage.request()
        script = stage.script(request)
        await exchange.start()
        # The end may be the beginning of a stop string: final, and held back.
        request.on_event(replace(script.step("abcdef"), text="abc"))
        events = await exchange.events(2)
        shown = events[1]["choices"][0]["logprobs"]["content"]
        assert "".join(token["token"] for token in shown) == "abc"
        request.on_event(replace(script.step("abcdef", reason="stop"), text="abc"))
        rest = await exchange.rest()
        assert all(e["choices"][0]["logprobs"] is None for e in rest[:-1])

    asyncio.run(play())

"""The server with the demo model behind it, as its clients see it: openai, curl, plain HTTP."""

import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from live_server import abandoned_request, live_server
from served import QUESTION, SETTINGS, ReadyBackend, chunks_of, content_of, demo_runtime

import oled_moe
from oled_moe.config import SamplingParams
from oled_moe.packing import pack_checkpoint
from oled_moe.server import create_app, default_names
from oled_moe.server_backend import NotServingError, Runtime

ASKED: list[Any] = QUESTION["messages"]
CODE: list[Any] = [
    {
        "role": "user",
        "content": "Write a function compute(word) that returns word without outer spaces, "
        "then reversed.",
    }
]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with demo_runtime() as made:
        yield made


@pytest.fixture(scope="module")
def backend(runtime: Runtime) -> ReadyBackend:
    return ReadyBackend(runtime)


@pytest.fixture(scope="module")
def url(backend: ReadyBackend) -> Iterator[str]:
    with live_server(create_app(backend, SETTINGS)) as found:
        yield found


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(runtime: Runtime) -> Iterator[None]:
    """Whatever a test does, in the end nothing runs, waits or holds memory."""
    yield
    wait_until(lambda: not runtime.scheduler.num_running and not runtime.scheduler.num_waiting)
    assert runtime.scheduler.kv_tokens == 0


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(12000):
        if is_so():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come about")


# The openai client


def streamed(client: openai.OpenAI, messages: list[Any], **options: Any) -> list[Any]:
    return list(
        client.chat.completions.create(model="demo", messages=messages, stream=True, **options)
    )


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize(("messages", "expected"), [(ASKED, "42"), (CODE, "word.strip()[::-1]")])
def test_plain_streamed_and_diffusing_give_the_same_text(
    client: openai.OpenAI, messages: list[Any], expected: str
) -> None:
    whole = client.chat.completions.create(model="demo", messages=messages)
    text = whole.choices[0].message.content
    assert text is not None and expected in text
    assert whole.choices[0].finish_reason == "stop"
    chunks = streamed(client, messages)
    assert text_of(chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    frames = streamed(client, messages, extra_body={"diffusing": True})
    assert text_of(frames) == text
    shown = [
        c.choices[0].delta.diffusion for c in frames if hasattr(c.choices[0].delta, "diffusion")
    ]
    assert shown and shown[-1]["masked"] == 0


def test_frames_tell_how_masks_became_tokens(client: openai.OpenAI, runtime: Runtime) -> None:
    # One token a step: everything must be seen changing.
    options = {"diffusing": True, "threshold": 1, "steps": 16}
    chunks = streamed(client, CODE, extra_body=options)
    frames = [
        c.choices[0].delta.diffusion for c in chunks if hasattr(c.choices[0].delta, "diffusion")
    ]
    tokenizer = runtime.engine.tokenizer
    assert tokenizer is not None
    seen: dict[int, str] = {}
    for frame in frames:
        for change in frame["changed"]:
            assert change["from"] is None
            assert 0 < change["conf"] <= 1
            seen[change["pos"]] = change["to"]
        assert frame["masked"] == frame["text"].count("▒") == frame["ids"].count(639)
        assert 0 <= frame["step"] < frame["steps_max"] == 16
    assert [frame["block"] for frame in frames] == sorted(frame["block"] for frame in frames)
    # Every block is shown to its end, and what was seen changing is the answer.
    assert {f["block"] for f in frames if f["final"]} == {f["block"] for f in frames}
    answer = "".join(seen[position] for position in sorted(seen))
    assert answer.startswith(text_of(chunks))


def test_usage_is_exact_and_says_what_diffusion_took(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=CODE)
    (last,) = streamed(client, CODE, stream_options={"include_usage": True})[-1:]
    assert not last.choices
    for usage in (whole.usage, last.usage):
        assert usage is not None
        assert usage.prompt_tokens == 30
        assert usage.total_tokens == 30 + usage.completion_tokens
        told = usage.model_extra["diffusion"]
        assert told["blocks"] == 3
        assert told["nfe"] == round(usage.completion_tokens / told["tokens_per_forward"])
        assert 0 < told["expert_hit_rate"] <= 1
    assert whole.usage.completion_tokens == last.usage.completion_tokens


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    whole = client.chat.completions.create(model="demo", messages=ASKED, response_format=form)
    assert json.loads(whole.choices[0].message.content or "") == {"answer": 42}
    chunks = streamed(client, ASKED, response_format=form)
    assert text_of(chunks) == whole.choices[0].message.content


def test_errors_are_what_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=ASKED)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=ASKED, presence_penalty=1)
    assert bad.value.param == "presence_penalty"
    with pytest.raises(openai.BadRequestError, match="factor is 2.0; it goes with algorithm fact"):
        client.chat.completions.create(model="demo", messages=ASKED, extra_body={"factor": 2.0})


def test_models_by_all_their_names(client: openai.OpenAI, http: httpx2.Client) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    for name in ("", None):
        assert (
            http.post("/v1/chat/completions", json={**QUESTION, "model": name}).status_code == 200
        )
    assert http.get("/v1/models/some/other").status_code == 404


def test_names_that_a_model_gets(tmp_path: Any) -> None:
    assert default_names("demo") == ("demo",)
    assert default_names("org/name") == ("org/name", "name")
    directory = tmp_path / "tiny"
    directory.mkdir()
    assert default_names(str(directory)) == ("tiny", str(directory))


def test_curl(url: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl here")
    command = [curl, "-sS", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run(
        [*command, "-d", json.dumps(QUESTION)], capture_output=True, timeout=60, check=True
    )
    assert "42" in json.loads(done.stdout)["choices"][0]["message"]["content"]
    done = subprocess.run(
        [*command, "-N", "-d", json.dumps({**QUESTION, "stream": True})],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.endswith(b"data: [DONE]\n\n")


# Streaming


def test_the_first_text_arrives_before_the_second_block_is_computed(
    http: httpx2.Client, runtime: Runtime
) -> None:
    got_text = threading.Event()
    waited: list[bool] = []

    def hold(report: Any) -> None:
        # The last report on the answer of the test before may come when nothing runs any more.
        if runtime.scheduler.num_running and report.num_new_tokens and not waited:
            # The model goes on only when the client has the first block's text.
            waited.append(got_text.wait(60))

    runtime.scheduler.observers.append(hold)
    try:
        body = {"messages": CODE, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if content_of(chunks_of(line)):
                    got_text.set()
    finally:
        runtime.scheduler.observers.remove(hold)
    assert waited == [True]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_everything(
    url: str, runtime: Runtime, path: str, is_streamed: bool
) -> None:
    entered, left = threading.Event(), threading.Event()

    def hold(report: Any) -> None:
        entered.set()
        left.wait(60)

    runtime.scheduler.observers.append(hold)
    body: dict[str, Any] = {"ignore_eos": True, "max_tokens": 900, "stream": is_streamed, "n": 6}
    body |= {"prompt": "a"} if path == "/v1/completions" else QUESTION

    def leave() -> None:
        try:
            with httpx2.Client(base_url=url, timeout=60) as http:
                with http.stream("POST", path, json=body):
                    entered.wait(60)
        except httpx2.HTTPError:
            pass

    try:
        if is_streamed:
            leave()
        else:
            with abandoned_request(url, path, body):
                assert entered.wait(60)
        # Four run and two wait, until the server has seen that nobody is there.
        left.set()
    finally:
        left.set()
        runtime.scheduler.observers.remove(hold)
    wait_until(lambda: runtime.scheduler.num_running == runtime.scheduler.num_waiting == 0)
    assert runtime.scheduler.kv_tokens == 0


# Completions


def complete(http: httpx2.Client, **body: Any) -> Any:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(http: httpx2.Client, **body: Any) -> Any:
    response = http.post("/v1/chat/completions", json={**QUESTION, **body})
    assert response.status_code == 200, response.text
    return response.json()


PROMPT = "<role>HUMAN</role>What is 12 + 30?<|role_end|><role>ASSISTANT</role>"


def test_prompts_in_every_form_give_the_same(http: httpx2.Client, runtime: Runtime) -> None:
    tokenizer = runtime.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT)
    stop = {"max_tokens": 16, "stop_token_ids": [tokenizer.token_id("<|role_end|>")]}
    text = complete(http, prompt=PROMPT, **stop)["choices"][0]["text"]
    assert text == chat(http)["choices"][0]["message"]["content"]
    many = complete(http, prompt=[PROMPT, "b"], n=2, **stop)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in many["choices"]][:2] == [text, text]
    assert many["usage"]["prompt_tokens"] == len(ids) + 1
    assert complete(http, prompt=ids, **stop)["choices"][0]["text"] == text
    assert complete(http, prompt=[ids], echo=True, **stop)["choices"][0]["text"] == PROMPT + text


def test_max_tokens_is_exact_and_so_is_its_default(http: httpx2.Client) -> None:
    for number in (1, 5, 17):
        reply = complete(http, prompt=PROMPT, max_tokens=number, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == number
        assert reply["choices"][0]["finish_reason"] == "length"
    response = http.post("/v1/completions", json={"prompt": [75] * 1020, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 4
    response = http.post("/v1/completions", json={"prompt": [75] * 1024})
    assert response.status_code == 400 and "max_model_len" in response.text


def test_a_stop_string_ends_the_answer_and_never_shows(http: httpx2.Client) -> None:
    whole = chat(http)["choices"][0]["message"]["content"]
    for stop in (" = 42", "= 4", "30 =", "+"):
        assert stop in whole
        reply = chat(http, stop=["no such thing", stop], logprobs=True)
        choice = reply["choices"][0]
        assert choice["message"]["content"] == whole.split(stop)[0]
        assert choice["finish_reason"] == "stop"
        shown = "".join(token["token"] for token in choice["logprobs"]["content"])
        # A token that ends in the stop string began before it.
        assert shown.startswith(whole.split(stop)[0])
        response = http.post(
            "/v1/chat/completions", json={**QUESTION, "stop": stop, "stream": True}
        )
        sent = chunks_of(response.text)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in sent)
        assert text == whole.split(stop)[0]


def test_logprobs_are_of_the_tokens_that_are_shown(http: httpx2.Client) -> None:
    reply = chat(http, logprobs=True)["choices"][0]
    tokens = reply["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == reply["message"]["content"]
    # The demo model is sure of this answer.
    assert all(math.log(0.5) < token["logprob"] <= 0 for token in tokens)
    assert bytes(tokens[0]["bytes"]).decode() == tokens[0]["token"]
    assert chat(http)["choices"][0]["logprobs"] is None
    choice = complete(http, prompt=PROMPT, logprobs=0, max_tokens=11)["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)
    response = http.post(
        "/v1/chat/completions", json={**QUESTION, "logprobs": True, "stream": True}
    )
    events = chunks_of(response.text)
    streamed = [
        t for e in events for t in (e["choices"][0]["logprobs"] or {"content": ()})["content"]
    ]
    assert [t["token"] for t in streamed] == [t["token"] for t in tokens]


def test_a_seed_repeats_a_draw(http: httpx2.Client) -> None:
    drawn = {"prompt": "a", "temperature": 3, "max_tokens": 24, "ignore_eos": True}
    first, second = complete(http, **drawn, seed=5, n=2)["choices"]
    assert first["text"] != second["text"]
    assert complete(http, **drawn, seed=5)["choices"][0]["text"] == first["text"]
    assert complete(http, **drawn, seed=6)["choices"][0]["text"] == second["text"]


def test_a_likelihood_that_a_diffusion_model_has_not_is_refused(http: httpx2.Client) -> None:
    # What lm-eval sends for multiple choice.
    body = {"prompt": [[75, 76]], "echo": True, "max_tokens": 1, "temperature": 0}
    for number in (0, 1):
        response = http.post("/v1/completions", json={**body, "logprobs": number})
        assert response.status_code == 400 and "likelihood" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "["}, "guided_regex"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"guided_json": {"x-guidance": {}}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ],
)
def test_what_only_the_engine_can_refuse_is_refused_by_name(
    http: httpx2.Client, fields: Any, param: str
) -> None:
    response = http.post("/v1/chat/completions", json={**QUESTION, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


# Tokens


def test_tokens_there_and_back(http: httpx2.Client, runtime: Runtime) -> None:
    told = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert "".join(told["token_strs"]) == PROMPT
    assert told["max_model_len"] == 1024
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": PROMPT}
    same = http.post("/tokenize", json=QUESTION).json()
    assert same["tokens"] == told["tokens"] and same["token_strs"] is None
    without = http.post("/tokenize", json={**QUESTION, "add_generation_prompt": False}).json()
    assert without["count"] < told["count"]
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/tokenize", json={**QUESTION, "prompt": "a"}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [640]}).status_code == 400
    # Four times what the model takes, and no more.
    assert http.post("/detokenize", json={"tokens": [75] * 4096}).status_code == 200
    assert http.post("/detokenize", json={"tokens": [75] * 4097}).status_code == 400
    longest = 4096 * len("<|startoftext|>")
    assert http.post("/tokenize", json={"prompt": "a" * longest}).status_code == 200
    refused = http.post("/tokenize", json={"prompt": "a" * (longest + 1)})
    assert refused.status_code == 400 and str(longest) in refused.json()["error"]["message"]
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and "role_end" in info["chat_template"]
    assert info["vocab_size"] == 640


# Probes, metrics, the page


def test_probes_know_whether_there_is_a_model(http: httpx2.Client, backend: ReadyBackend) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": oled_moe.__version__}
    backend.error = NotServingError("loading", "the model is being loaded; try again soon")
    try:
        assert http.get("/health").status_code == 200
        for response in (
            http.get("/ready"),
            http.get("/v1/models"),
            http.post("/v1/chat/completions", json=QUESTION),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"
            assert response.headers["retry-after"] == "1"
    finally:
        backend.error = None


def metrics_of(http: httpx2.Client) -> dict[str, float]:
    lines = http.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_metrics_count_what_happened(http: httpx2.Client) -> None:
    chat(http)
    before = metrics_of(http)
    usage = chat(http)["usage"]
    # Forwards are counted after those who wait for them were told.
    steps = 'oled_moe:denoise_steps_total{model_name="demo"}'
    wait_until(lambda: metrics_of(http)[steps] - before[steps] >= usage["diffusion"]["nfe"])
    after = metrics_of(http)

    def rose(name: str, labels: str = 'model_name="demo"') -> float:
        key = f"oled_moe:{name}{{{labels}}}"
        return after[key] - before[key]

    assert rose("prompt_tokens_total") == usage["prompt_tokens"]
    assert rose("generation_tokens_total") == usage["completion_tokens"]
    assert rose("request_success_total", 'finished_reason="stop",model_name="demo"') == 1
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
        "denoise_step_seconds",
        "tokens_per_forward",
    ):
        assert rose(f"{name}_count") >= 1, name
    assert rose("expert_cache_hits_total", 'layer="0",tier="ram"') > 0
    assert after['oled_moe:expert_cache_resident{layer="0"}'] == 96
    # All experts were there before anybody watched.
    assert after['oled_moe:expert_fetch_seconds_count{tier="ram"}'] == 0
    assert after['oled_moe:stall_seconds_total{cause="copy"}'] == 0
    assert after['oled_moe:num_requests_running{model_name="demo"}'] == 0
    assert after['oled_moe:kv_cache_usage_perc{model_name="demo"}'] == 0


def test_experts_are_told(http: httpx2.Client) -> None:
    chat(http)
    told = http.get("/experts").json()
    assert told["num_forwards"] > 0 and len(told["layers"]) == 6


def test_a_lossy_rule_is_named_everywhere(http: httpx2.Client) -> None:
    """In the model's card, in usage, in metrics and for the page; without one there is none."""
    assert http.get("/v1/models/demo").json()["lossy"] is None
    assert chat(http)["usage"]["diffusion"]["choices_replaced"] == 0
    assert "lossy_info" not in http.get("/metrics").text
    rule = "des-seq:top=1"
    with (
        demo_runtime(lossy=rule) as made,
        live_server(create_app(ReadyBackend(made), SETTINGS)) as url,
        httpx2.Client(base_url=url, timeout=60) as lossy,
    ):
        assert lossy.get("/v1/models").json()["data"][0]["lossy"] == rule
        replaced = chat(lossy)["usage"]["diffusion"]["choices_replaced"]
        assert replaced > 0
        key = 'oled_moe:choices_replaced_total{model_name="demo"}'
        wait_until(lambda: metrics_of(lossy)[key] == replaced)
        assert metrics_of(lossy)[f'oled_moe:lossy_info{{model_name="demo",rule="{rule}"}}'] == 1
        told = lossy.get("/experts").json()
        assert told["lossy"] == rule and told["low_precision"] is None
        assert "p" not in told["state_names"]
    assert http.get("/experts").json()["lossy"] is None


def test_experts_in_a_lower_precision_are_counted(http: httpx2.Client, tmp_path: Path) -> None:
    assert http.get("/v1/models/demo").json()["low_precision"] is None
    assert 'how="low_precision"' not in http.get("/metrics").text
    pack_checkpoint("demo", tmp_path / "low", dtype="int4", method="nearest")
    settings = {"lossy": "mixed:share=0.5", "low_precision": str(tmp_path / "low")}
    with (
        demo_runtime(expert_memory="20%", **settings) as made,
        live_server(create_app(ReadyBackend(made), SETTINGS)) as url,
        httpx2.Client(base_url=url, timeout=60) as lossy,
    ):
        card = lossy.get("/v1/models/demo").json()
        assert (card["lossy"], card["low_precision"]) == ("mixed:share=0.5", "int4-g64")
        usage = chat(lossy)["usage"]["diffusion"]
        assert usage["choices_replaced"] > 0 and 0 < usage["replaced_weight_share"] < 1
        low_runs = usage["low_expert_runs"]

        # The last forward is counted after its answer was sent.
        def is_counted() -> bool:
            layers = lossy.get("/experts").json()["layers"]
            return bool(sum(layer["low_runs"] for layer in layers) == low_runs > 0)

        wait_until(is_counted)
        told = lossy.get("/experts").json()
        assert told["low_precision"] == "int4-g64" and "p" in told["state_names"]
        assert any("p" in layer["states"] for layer in told["layers"])
        found = metrics_of(lossy)
        assert found['oled_moe:miss_compensation_total{how="low_precision"}'] == low_runs
        misses = sum(value for name, value in found.items() if "expert_cache_misses_total" in name)
        how = sum(value for name, value in found.items() if "miss_compensation_total" in name)
        assert misses == how
        moved = sum(each["bytes"] for each in told["bytes"])
        assert moved == found['oled_moe:expert_bytes_total{dst="ram",src="disk"}']
        # Slots of 24 and 8 KiB; whatever was kept in the lower precision was not copied again.
        loads = sum(layer["loads"] for layer in told["layers"])
        assert loads * 24576 < moved <= loads * 24576 + low_runs * 8192


def test_the_page_may_do_little(http: httpx2.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    script = http.get("/page/page.js")
    assert script.headers["content-type"].startswith("text/javascript")
    for path in ("/page/../server.py", "/page/%2e%2e/server.py", "/page/index", "/page/"):
        assert http.get(path).status_code == 404


def test_flags_are_what_requests_leave_open(runtime: Runtime) -> None:
    settings = replace(SETTINGS, defaults=SamplingParams(max_tokens=3), max_at_once=2)
    with live_server(create_app(ReadyBackend(runtime), settings)) as url:
        with httpx2.Client(base_url=url, timeout=60) as http:
            assert chat(http)["usage"]["completion_tokens"] == 3
            assert chat(http, max_tokens=4)["usage"]["completion_tokens"] == 4
            response = http.post("/v1/chat/completions", json={**QUESTION, "n": 3})
            assert response.status_code == 400
            assert "allowed: 2" in response.json()["error"]["message"]

"""Request bodies turned into prompts and sampling parameters."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from served import MASK_ID, FakeEngine

from oled_moe.config import (
    ALGORITHMS,
    EDITING_ALGORITHMS,
    ONE_BLOCK_ALGORITHMS,
    Grammar,
    SamplingParams,
)
from oled_moe.errors import ConfigError, InputError
from oled_moe.server_answers import Question
from oled_moe.server_errors import ApiError, api_error
from oled_moe.server_prompts import chat_questions, completion_questions, encode
from oled_moe.server_schema import ChatRequest, CompletionRequest

NO_DEFAULTS = SamplingParams()
USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"default": None}}},
    },
}
TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools>"
    "{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if flag %}!{% endif %}"
)


def engine(template: str | None = None, **options: Any) -> Any:
    made = FakeEngine(**options)
    assert made.tokenizer is not None
    if template is not None:
        made.tokenizer.chat_template = template
    return made


def chat(
    *messages: Any, to: Any = None, defaults: SamplingParams = NO_DEFAULTS, **fields: Any
) -> list[Question]:
    body = ChatRequest.model_validate({"messages": list(messages) or [USER], **fields})
    return chat_questions(to or engine(), body, defaults)


def complete(prompt: Any, *, to: Any = None, **fields: Any) -> list[Question]:
    body = CompletionRequest.model_validate({"prompt": prompt, **fields})
    return completion_questions(to or engine(), body, SamplingParams())


def test_a_conversation_becomes_the_templates_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (question,) = chat(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"},
        USER,
        to=engine(),
    )
    assert question.prompt == (
        "<role>SYSTEM</role>be brief<|role_end|><role>HUMAN</role>a\nb<|role_end|>"
        "<role>ASSISTANT</role>c<|role_end|><role>HUMAN</role>hi<|role_end|><role>ASSISTANT</role>"
    )
    assert question.prompt_ids == engine().encode(question.prompt)
    assert question.mask_id == MASK_ID


def test_a_turn_ends_the_answer_whatever_ids_are_asked_for() -> None:
    tokenizer = engine().tokenizer
    role_end = tokenizer.token_id("<|role_end|>")
    assert chat()[0].params.stop_token_ids == (role_end,)
    assert chat(stop_token_ids=[5])[0].params.stop_token_ids == (5, role_end)
    assert complete("a")[0].params.stop_token_ids is None


def test_without_max_tokens_an_answer_may_be_as_long_as_fits() -> None:
    num_prompt = len(chat()[0].prompt_ids)
    assert chat()[0].params.max_tokens == 64 - num_prompt
    assert chat(max_tokens=5)[0].params.max_tokens == 5
    assert chat(max_completion_tokens=6)[0].params.max_tokens == 6
    # What the server or the model says is cut to what fits, what the request says is not.
    assert chat(defaults=SamplingParams(max_tokens=7))[0].params.max_tokens == 7
    assert chat(defaults=SamplingParams(max_tokens=700))[0].params.max_tokens == 64 - num_prompt
    assert chat(to=engine(max_tokens=8))[0].params.max_tokens == 8
    assert chat(max_tokens=700)[0].params.max_tokens == 700
    with pytest.raises(ApiError, match="give one of them") as caught:
        chat(max_tokens=5, max_completion_tokens=6)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_a_prompt_that_leaves_no_room_is_what_is_to_blame(max_tokens: int | None) -> None:
    long = {"role": "user", "content": "word " * 64}
    for ask, param in (
        (lambda: complete([75] * 64, max_tokens=max_tokens), "prompt"),
        (lambda: complete(["a", "word " * 64], max_tokens=max_tokens), "prompt"),
        (lambda: chat(long, max_tokens=max_tokens), "messages"),
    ):
        with pytest.raises(ApiError, match="leaves room for one") as caught:
            ask()
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    assert complete([75] * 63)[0].params.max_tokens == 1


def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    class Unread:
        """A tokenizer that fails where it is given a text."""

        longest_token_bytes = 10
        chat_template = ""

        def token_id(self, token: str) -> None:
            return None

        def apply_chat_template(self, messages: Any) -> Any:
            return messages[0]["content"]

        def encode(self, text: str) -> list[int]:
            raise AssertionError(len(text))

    to = engine()
    to.tokenizer = Unread()
    # Of 64 tokens with 10 bytes each, by bytes and not by letters.
    giant = "\u00e9" * 321
    for ask in (
        lambda: complete(giant, to=to),
        lambda: complete(["a" * 641], to=to, max_tokens=1),
        lambda: chat({"role": "user", "content": giant}, to=to),
        lambda: encode(to, giant * 4, "prompt", num_lengths=4),
    ):
        with pytest.raises(ApiError, match="bytes long; allowed: (640|2560)") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    for fits in (lambda: complete("a" * 640, to=to), lambda: encode(to, giant, "x", num_lengths=2)):
        with pytest.raises(AssertionError):
            fits()


def test_a_request_says_what_the_server_would_have_said() -> None:
    defaults = SamplingParams(temperature=0.5, top_k=3, seed=9, threshold=0.8, stop="x")
    (plain,) = chat(defaults=defaults)
    assert (plain.params.temperature, plain.params.top_k, plain.params.seed) == (0.5, 3, 9)
    assert plain.params.stop == ("x",) and plain.params.threshold == 0.8
    (own,) = chat(
        defaults=defaults,
        temperature=0,
        top_k=-1,
        seed=4,
        threshold=1,
        stop=["a", "b"],
        algorithm="JointThreshold",
    )
    # All tokens, though the server's default is three.
    assert (own.params.temperature, own.params.top_k, own.params.seed) == (0, 640, 4)
    assert own.params.stop == ("a", "b") and own.params.algorithm == "joint_threshold"
    assert plain.params.eos_early_stop is True


def test_an_answer_that_is_drawn_without_a_seed_is_another_each_time() -> None:
    seeds = {chat(temperature=1)[0].params.seed for _ in range(4)}
    assert len(seeds) == 4
    assert chat()[0].params.seed == chat()[0].params.seed == 0


def test_what_a_server_was_started_with_is_for_its_own_algorithm() -> None:
    defaults = SamplingParams(algorithm="hierarchy", low_threshold=0.2, threshold=0.8, top_p=0.9)
    (own,) = chat(defaults=defaults)
    assert (own.params.algorithm, own.params.low_threshold) == ("hierarchy", 0.2)
    (other,) = chat(defaults=defaults, algorithm="factor", factor=2.0)
    assert (other.params.algorithm, other.params.factor, other.params.top_p) == ("factor", 2, 0.9)
    assert other.params.threshold is None and other.params.low_threshold is None
    # What a request itself says is not dropped; the engine refuses it by name.
    (said,) = chat(defaults=defaults, algorithm="factor", low_threshold=0.1)
    assert said.params.not_looked_at_by("factor") == ["low_threshold"]


def test_how_many_steps_a_block_may_take() -> None:
    assert chat()[0].steps_max == 4
    assert chat(steps=2)[0].steps_max == 2
    edited = chat(algorithm="joint_threshold", max_post_edit_steps=3)
    assert edited[0].steps_max == 4 + 3


def test_eager_is_refused_where_tokens_may_change() -> None:
    assert chat(stream=True, stream_mode="eager")
    for algorithm in EDITING_ALGORITHMS:
        with pytest.raises(ApiError, match=algorithm) as caught:
            chat(stream=True, stream_mode="eager", algorithm=algorithm)
        assert caught.value.param == "stream_mode"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_asked_for(algorithm: str) -> None:
    block_length = 16 if algorithm in ONE_BLOCK_ALGORITHMS else 4
    # As config.json of a checkpoint declares them that levenshtein is for.
    given = SamplingParams(delete_token_id=1, split_token_id=2)
    (question,) = chat(
        algorithm=algorithm, max_tokens=16, block_length=block_length, defaults=given
    )
    assert question.params.algorithm == algorithm and question.steps_max >= block_length


def test_what_single_algorithms_take_reaches_them() -> None:
    fields: dict[str, Any] = {
        "greedy": True,
        "confidence": "tempered",
        "low_threshold": 0.1,
        "remask_threshold": 0.2,
        "credit_alpha": 0.3,
        "credit_gamma": 0.4,
        "credit_beta": 0.5,
        "factor": 6.0,
        "eb_threshold": 0.7,
        "eb_gamma": 0.8,
    }
    (question,) = chat(**fields)
    assert {name: getattr(question.params, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"diffusing": True}, "diffusing"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"chat_template_kwargs": {"eos_token": ""}}, "chat_template_kwargs.eos_token"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {
                "messages": [
                    {**USER, "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
                ]
            },
            "messages.0.tool_calls",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status_code == 400
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            Grammar("json_schema", '{"a": 1}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            Grammar("json_object"),
        ),
        ({"guided_json": {"type": "object"}}, Grammar("json_schema", '{"type": "object"}')),
        ({"guided_json": '{"type":"object"}'}, Grammar("json_schema", '{"type": "object"}')),
        ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"guided_grammar": "start: /a/"}, Grammar("lark", "start: /a/")),
        ({"guided_choice": ["yes", 'a "b"']}, Grammar("lark", 'start: "yes" | "a \\"b\\""')),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
        ({"structured_outputs": {"json": {}}}, Grammar("json_schema", "{}")),
        ({"structured_outputs": {"choice": ["b"]}}, Grammar("lark", 'start: "b"')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
    ],
)
def test_what_the_text_must_be_by_any_of_its_names(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    found = chat(**fields)[0].params.grammar
    assert found == grammar == complete("a", **fields)[0].params.grammar
    # Messages then name the field that is to blame.
    assert found is None or found.title.partition(".")[0] == next(iter(fields))


def test_tools_reach_the_template_as_they_were_sent() -> None:
    able = engine(TOOLS_TEMPLATE)
    (question,) = chat(to=able, tools=[TOOL], chat_template_kwargs={"flag": True})
    assert question.prompt == "<tools>look</tools><user>hi!"
    assert question.params.grammar is None
    assert chat(to=able, tools=[TOOL], tool_choice="none")[0].prompt == "<user>hi"
    with pytest.raises(InputError, match="no place for them") as caught:
        chat(tools=[TOOL])
    assert api_error(caught.value).param == "tools"
    # As frameworks send it.
    assert chat(to=able, tools=[])[0] == chat(to=able)[0]
    with pytest.raises(ApiError, match="without tools"):
        chat(to=able, tools=[], tool_choice="required")


def test_a_call_that_must_come_is_a_grammar() -> None:
    able = engine(TOOLS_TEMPLATE)
    named = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named):
        grammar = chat(to=able, tools=[TOOL], tool_choice=choice)[0].params.grammar
        assert grammar is not None and grammar.kind == "lark"
        # A default of null is part of the schema.
        assert '"default": null' in grammar.text
    with pytest.raises(InputError, match="look"):
        other = {"type": "function", "function": {"name": "listen"}}
        chat(to=able, tools=[TOOL], tool_choice=other)
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"parallel_tool_calls": False},
    ):
        with pytest.raises(ApiError):
            chat(to=able, tools=[TOOL], **fields)


def test_calls_and_their_results_go_back_into_the_conversation() -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at":  "x"}'}}
    (question,) = chat(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "1"},
        to=engine(TOOLS_TEMPLATE),
    )
    assert question.prompt == '<user>hi<assistant>{"at": "x"}<tool>seen'
    with pytest.raises(ApiError, match="JSON object"):
        broken = {"function": {"name": "look", "arguments": "[1]"}}
        chat(USER, {"role": "assistant", "tool_calls": [broken]})


def test_prompts_are_texts_or_ids_one_or_many() -> None:
    to = engine()
    assert complete("hi", to=to)[0].prompt_ids == to.encode("hi")
    assert [q.prompt_ids for q in complete(["a", "b"])] == [to.encode("a"), to.encode("b")]
    assert [q.prompt_ids for q in complete([75, 76])] == [[75, 76]]
    assert [q.prompt_ids for q in complete([[75], [76]], n=2)] == [[75], [75], [76], [76]]
    assert complete([75, 76], echo=True)[0].prompt == to.tokenizer.decode([75, 76])
    with pytest.raises(ApiError, match="639"):
        complete([75, 640])
    with pytest.raises(ApiError, match="likelihood"):
        complete("a", echo=True, logprobs=0)


def test_a_model_without_a_chat_template_says_where_to_go() -> None:
    to = engine()
    to.tokenizer.chat_template = None
    with pytest.raises(InputError, match="/v1/completions"):
        chat(to=to)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": False},
        {"logit_bias": {"5": 1}},
        {"best_of": 2},
        {"min_p": 0.1},
        {"top_logprobs": 2},
        {"functions": []},
        {"n": 0},
        {"n": 65},
        {"temperature": "1"},
        {"temperature": -1},
        {"top_p": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"stop": ["a"] * 5},
        {"stop": ""},
        {"unknown": None},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "wizard", "content": "a"}]},
    ],
)
def test_values_that_are_not_allowed_are_no_request(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": [USER], **fields})


def test_fields_without_anything_behind_them_are_taken_with_what_asks_for_nothing() -> None:
    fields = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "best_of": 1,
        "n": 1,
        "min_p": 0,
        "top_logprobs": 0,
        "functions": None,
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "user": "somebody",
        "stop": [],
        "skip_special_tokens": True,
    }
    assert chat(**fields)[0].params == chat()[0].params


def test_an_answer_goes_back_as_clients_keep_it() -> None:
    # What `message.model_dump()` of OpenAI's client makes of a reply, and of vLLM's.
    kept = dict.fromkeys(["refusal", "annotations", "audio", "function_call", "tool_calls"])
    kept |= {"reasoning_content": None, "reasoning": ""}
    answer = {"role": "assistant", "content": "hi", **kept}
    plain = {"role": "assistant", "content": "hi"}
    assert chat(messages=[USER, answer, USER])[0] == chat(messages=[USER, plain, USER])[0]


def test_errors_of_the_engine_name_the_field_they_are_about() -> None:
    about = api_error(ConfigError("block_length is 9; allowed: 1 to 8"))
    assert (about.status_code, about.param) == (400, "block_length")
    assert api_error(InputError("tools[0].function is 3; give one")).param == "tools[0].function"
    assert api_error(InputError("the prompt is long")).param is None
    assert json.loads(about.response().body)["error"]["param"] == "block_length"

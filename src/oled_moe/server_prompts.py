"""From request bodies to prompts and sampling parameters: what is asked, resolved for one model.

Runs on worker threads: templates and tokenizers take their time over long texts.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oled_moe.chat import conversation_request, with_face_defaults
from oled_moe.config import EDITING_ALGORITHMS, DecodingParams, Grammar, SamplingParams
from oled_moe.errors import InputError
from oled_moe.server_answers import Question
from oled_moe.server_errors import bad_request, too_long
from oled_moe.server_schema import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaResponse,
    Message,
    NamedTool,
    SamplingRequest,
    Tool,
)
from oled_moe.tool_calls import check_tool_template, check_tools, tool_grammar

if TYPE_CHECKING:
    from oled_moe.engine import Engine
    from oled_moe.tokenization import Tokenizer

# As chat templates and grammars of calls know them.
Tools = Sequence[dict[str, Any]]
# The names that SGLang gives the decoding loops.
_ALGORITHMS = {
    "LowConfidence": "low_confidence",
    "JointThreshold": "joint_threshold",
    "JointThresholdInDel": "levenshtein",
}
# Variables of chat templates that come from elsewhere; `self` is jinja's own.
_NO_VARIABLES = (
    *("self", "messages", "tools", "add_generation_prompt"),
    *("bos_token", "eos_token", "pad_token", "mask_token", "unk_token"),
)
# Fields of requests that are sampling parameters of the same name and meaning.
_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "stop_token_ids",
    "ignore_eos",
    "block_length",
    "steps",
    "threshold",
    "edit_threshold",
    "max_post_edit_steps",
    "greedy",
    "confidence",
    "low_threshold",
    "remask_threshold",
    "credit_alpha",
    "credit_gamma",
    "credit_beta",
    "factor",
    "eb_threshold",
    "eb_gamma",
    "t_min",
    "t_max",
    "stability_threshold",
    "confidence_threshold",
)
_SEEDS = 2**63
# So many times max_model_len may be tokenized: enough to see by how much a text is too long.
MAX_LENGTHS_TOKENIZED = 4


def chat_questions(engine: "Engine", body: ChatRequest, defaults: SamplingParams) -> list[Question]:
    """The answers that a conversation asks for.

    Raises: ApiError, InputError, ConfigError.
    """
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request(
            "max_tokens and max_completion_tokens are both given; give one of them", "max_tokens"
        )
    tools = _tools(body)
    params = sampling_params(engine, body, defaults, _chat_grammar(body, tools))
    variables = template_variables(body.chat_template_kwargs)
    text, params = chat_prompt(engine, body.messages, params, variables, tools)
    prompt_ids = encode(engine, text, "messages")
    _check_room(engine, prompt_ids, "messages")
    max_tokens = body.max_tokens or body.max_completion_tokens
    return _questions(engine, text, prompt_ids, params, max_tokens, body.n or 1)


def completion_questions(
    engine: "Engine", body: CompletionRequest, defaults: SamplingParams
) -> list[Question]:
    """The answers that prompts ask for: n for each, in their order. Raises: as above."""
    if body.echo and body.logprobs is not None:
        raise bad_request(
            "echo is true and logprobs is given; a diffusion model has no likelihood of a prompt "
            "token by token: leave one of them out",
            "echo",
        )
    prompts: Sequence[Any] = body.prompt
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        prompts = [body.prompt]
    n = body.n or 1
    params = sampling_params(engine, body, defaults, _grammar(body))
    tokenizer = tokenizer_of(engine)
    questions: list[Question] = []
    for prompt in prompts:
        ids = encode(engine, prompt, "prompt") if isinstance(prompt, str) else prompt
        _check_room(engine, ids, "prompt")
        text = prompt
        if not isinstance(prompt, str):
            _check_ids("prompt", ids, engine.model_config.vocab_size)
            text = tokenizer.decode(ids, skip_special_tokens=False) if body.echo else ""
        questions += _questions(engine, text, ids, params, body.max_tokens, n)
    return questions


def chat_prompt(
    engine: "Engine",
    messages: Sequence[Message],
    params: SamplingParams,
    variables: Mapping[str, Any],
    tools: Tools,
) -> tuple[str, SamplingParams]:
    """The text that the chat template makes of messages, and parameters that end with the turn."""
    turns = [_turn(f"messages.{i}", message) for i, message in enumerate(messages)]
    if tokenizer_of(engine).chat_template is None:
        raise InputError("this model has no chat template; use /v1/completions")
    if tools:
        check_tool_template(tokenizer_of(engine), turns, tools)
        variables = {**variables, "tools": tools}
    return conversation_request(engine, turns, params, variables)


def encode(engine: "Engine", text: str, param: str, *, num_lengths: int = 1) -> list[int]:
    """The tokens of a text that is not hopelessly long.

    A text that could not fit `num_lengths` times max_model_len, were all its tokens of the longest
    there are, is refused unread: it would keep a core for many seconds to learn no more.
    Raises: ApiError, InputError.
    """
    tokenizer = tokenizer_of(engine)
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    most = num_lengths * engine.max_model_len * tokenizer.longest_token_bytes
    if num_bytes > most:
        raise too_long(
            f"the text of {param} is {num_bytes} bytes long; allowed: {most}, all that "
            f"{num_lengths * engine.max_model_len} tokens of this model can hold; shorten it",
            param,
        )
    return tokenizer.encode(text)


def tokenizer_of(engine: "Engine") -> "Tokenizer":
    assert engine.tokenizer is not None, "a server is not started without a tokenizer"
    return engine.tokenizer


def sampling_params(
    engine: "Engine", body: SamplingRequest, defaults: SamplingParams, grammar: Grammar | None
) -> SamplingParams:
    """What the request says, then what the server was started with; but for max_tokens."""
    values: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN_FIELDS}
    values["algorithm"] = _ALGORITHMS.get(body.algorithm or "", body.algorithm)
    values["stop"] = body.stop or None
    values["grammar"] = grammar
    values["seed"] = body.seed
    if body.top_k is not None:
        # What means all tokens elsewhere; a limit of the server's or the model's is lifted.
        values["top_k"] = body.top_k if body.top_k > 0 else engine.model_config.vocab_size
    given = SamplingParams(**values)
    # The server's own settings are for its own algorithm.
    rest = defaults if given.algorithm is None else defaults.looked_at_by(given.algorithm)
    params = with_face_defaults(engine, given.with_defaults(rest))
    resolved = params.with_defaults(engine.sampling_defaults)
    if resolved.seed is None and resolved.temperature:
        params = replace(params, seed=random.randrange(_SEEDS))
    if body.stream_mode == "eager" and resolved.algorithm in EDITING_ALGORITHMS:
        raise bad_request(
            f"stream_mode is eager; algorithm {resolved.algorithm} may replace what it has "
            "written, so that only final text is sent: leave it out, or send diffusing to see "
            "drafts",
            "stream_mode",
        )
    if body.diffusing and not body.stream:
        raise bad_request("diffusing is true without stream; send stream true too", "diffusing")
    if body.stream_options is not None and not body.stream:
        raise bad_request(
            "stream_options is given without stream; send stream true too", "stream_options"
        )
    return params


def _questions(
    engine: "Engine",
    prompt: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_tokens: int | None,
    n: int,
) -> list[Question]:
    defaults = params.with_defaults(engine.sampling_defaults)
    if max_tokens is None:
        room = engine.max_model_len - len(prompt_ids)
        max_tokens = min(room, defaults.max_tokens or room)
    params = replace(params, max_tokens=max_tokens)
    decoding = DecodingParams.resolve(replace(defaults, max_tokens=max_tokens))
    seed = decoding.seed
    return [
        Question(
            prompt,
            prompt_ids,
            replace(params, seed=(seed + i) % _SEEDS),
            decoding.mask_token_id,
            decoding.max_steps,
        )
        for i in range(n)
    ]


def _check_room(engine: "Engine", prompt_ids: Sequence[int], param: str) -> None:
    most = engine.max_model_len - 1
    if len(prompt_ids) > most:
        raise too_long(
            f"the prompt has {len(prompt_ids)} tokens; allowed: {most}, which leaves room for one "
            "in max_model_len; shorten it",
            param,
        )


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for position, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise bad_request(
                f"{name}: token {position} is {token_id}; allowed: 0 to {vocab_size - 1}", name
            )


def _turn(name: str, message: Message) -> dict[str, Any]:
    """One message as chat templates know it."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise bad_request(f"{name}.content is missing; give the text", f"{name}.content")
    if message.tool_calls and message.role != "assistant":
        raise bad_request(
            f"{name}.tool_calls is given for role {message.role}; only an assistant calls tools",
            f"{name}.tool_calls",
        )
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    for key in ("name", "tool_call_id"):
        if getattr(message, key) is not None:
            turn[key] = getattr(message, key)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(name, call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def _arguments(name: str, text: str) -> Any:
    """Templates write arguments as JSON themselves."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(
            f"{name}.tool_calls: arguments must be a JSON object as text", f"{name}.tool_calls"
        )
    return value


def template_variables(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a request gives the chat template besides messages."""
    for name in kwargs or {}:
        if name in _NO_VARIABLES:
            raise bad_request(
                f"chat_template_kwargs.{name} is not the request's to set, or set by another "
                "field; leave it out",
                f"chat_template_kwargs.{name}",
            )
    return dict(kwargs or {})


def tool_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as the template is given them. Raises: InputError."""
    found = [tool.model_dump(exclude_unset=True) for tool in tools]
    check_tools(found)
    return found


def _tools(body: ChatRequest) -> Tools:
    """The tools that the model may call."""
    # An empty list asks for nothing, as none does; frameworks send one.
    if not body.tools:
        if body.tool_choice in (None, "auto", "none"):
            return ()
        raise bad_request("tool_choice asks for a call without tools; give tools", "tool_choice")
    return () if body.tool_choice == "none" else tool_dicts(body.tools)


def _chat_grammar(body: ChatRequest, tools: Tools) -> Grammar | None:
    """What the answer's text must be, tool calls among it."""
    grammar = _grammar(body)
    if not tools:
        return grammar
    if grammar is not None:
        raise bad_request(
            "tools are given beside a form of the answer, which leaves no room for calls; leave "
            "one of them out, or send tool_choice none",
            "tools",
        )
    choice = body.tool_choice
    if choice in (None, "auto") and body.parallel_tool_calls is False:
        raise bad_request(
            "parallel_tool_calls is false; only tool_choice required or a named function can keep "
            "a model to one call",
            "parallel_tool_calls",
        )
    wanted = choice.model_dump() if isinstance(choice, NamedTool) else choice
    return tool_grammar(tools, wanted, is_parallel=body.parallel_tool_calls is not False)


def _grammar(body: ChatRequest | CompletionRequest) -> Grammar | None:
    """What the answer's text must be, by whichever field says so; at most one may."""
    found: dict[str, Grammar] = {}
    form = body.response_format
    if isinstance(form, JsonObjectFormat):
        found["response_format"] = Grammar("json_object", name="response_format")
    elif isinstance(form, JsonSchemaResponse):
        schema = form.json_schema.schema_
        found["response_format"] = (
            Grammar("json_object", name="response_format")
            if schema is None
            else Grammar.json_schema(schema, "response_format")
        )
    wanted = body.structured_outputs
    given: dict[str, Any] = {
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_grammar": body.guided_grammar,
        "guided_choice": body.guided_choice,
    }
    if wanted is not None:
        for name in ("regex", "grammar", "choice"):
            given[f"structured_outputs.{name}"] = getattr(wanted, name)
        given["structured_outputs.json"] = wanted.json_
        if wanted.json_object:
            name = "structured_outputs.json_object"
            found[name] = Grammar("json_object", name=name)
    for name, value in given.items():
        if value is not None:
            found[name] = _grammar_of(name, value)
    if len(found) > 1:
        names = " and ".join(found)
        raise bad_request(f"{names} are given; give one of them", next(iter(found)))
    return next(iter(found.values()), None)


def _grammar_of(name: str, value: Any) -> Grammar:
    kind = name.rpartition("_" if name.startswith("guided") else ".")[2]
    if not value and kind != "json":
        raise bad_request(f"{name} is empty; say what the answer must be, or leave it out", name)
    if kind == "choice":
        # Lark writes strings as JSON does.
        return Grammar("lark", "start: " + " | ".join(map(json.dumps, value)), name)
    if kind == "json":
        return _schema_grammar(name, value)
    return Grammar("regex" if kind == "regex" else "lark", value, name)


def _schema_grammar(name: str, value: Any) -> Grammar:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise bad_request(f"{name} is no JSON schema; give an object, or one as text", name)
    return Grammar.json_schema(value, name)

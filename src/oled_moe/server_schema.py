"""Request and reply bodies, as the OpenAPI document describes them.

Requests refuse fields they do not know. A field of the OpenAI or vLLM API that this server has
nothing behind is known by name and accepted with the one value that asks for nothing; any other
value is refused by name. Values are not converted: "1" is no number.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic_core import core_schema

# As many strings as OpenAI's `stop` takes, and far more than anybody has used.
MAX_STOPS = 4
MAX_PROMPTS = 64
_MAX_MESSAGES = 4096
_MAX_TOOLS = 128
_MAX_TOKEN_ID = 2**31 - 1
_MAX_SEED = 2**63 - 1


class Request(BaseModel):
    """Base of request bodies. Lists in them are read up to what is wrong first: to name all that is
    wrong with a body of some megabytes takes a minute, in which nobody else is heard."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """For the same reason: of very many fields one that is not known is enough to refuse."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next(name for name in value if name not in known)
        return {name: each for name, each in value.items() if name == first or name in known}


class Reply(BaseModel):
    """Base of reply bodies."""

    model_config = ConfigDict(extra="forbid")


class Only:
    """Marks a field that has nothing behind it: null, or a value that asks for nothing.

    `why`: for those whose absence needs a reason.
    """

    def __init__(self, *allowed: Any, why: str = "") -> None:
        self._allowed = (None, *allowed)
        self._why = f" ({why})" if why else ""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "enum": list(self._allowed),
            "description": "Nothing is behind it: taken only with a value that asks for nothing.",
        }

    def _check(self, value: Any) -> Any:
        # By type too: 0 is False for Python alone.
        if not any(value == each and _kind(value) == _kind(each) for each in self._allowed):
            values = " or ".join(map(repr, self._allowed[1:])) or "null"
            raise ValueError(f"not supported here{self._why}; allowed: {values}, or leave it out")
        return value


def _kind(value: Any) -> type:
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


_Nothing = Annotated[Any, Only()]
_Zero = Annotated[Any, Only(0)]
_One = Annotated[Any, Only(1)]
_No = Annotated[Any, Only(False)]
_Yes = Annotated[Any, Only(True)]
_Name = Annotated[str, StringConstraints(max_length=256)]
_TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Weight = Annotated[float, Field(ge=0, le=1000)]
_NO_ALTERNATIVES = (
    "a diffusion model gives a token's probability when it commits it: no alternatives are kept, "
    "and a prompt has no likelihood token by token"
)
# Those of SamplingParams, and the names that SGLang gives three of them.
_Algorithm = Literal[
    "low_confidence",
    "joint_threshold",
    "levenshtein",
    "sequential",
    "low_confidence_static",
    "low_confidence_dynamic",
    "entropy_bounded",
    "threshold",
    "hierarchy",
    "hierarchy_remasking",
    "credit",
    "factor",
    "lowest_entropy",
    "renoising",
    "LowConfidence",
    "JointThreshold",
    "JointThresholdInDel",
]
_JsonObject = dict[str, JsonValue]


# Parts of requests


class TextPart(Request):
    """One piece of a message; pieces of text are joined by line ends."""

    type: Literal["text"]
    text: str


class FunctionCall(Request):
    """`arguments`: a JSON object as text."""

    name: _Name
    arguments: str


class ToolCall(Request):
    id: _Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Request):
    """One turn. `developer` is read as `system`; `content` may be null beside tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(max_length=_MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    name: _Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_call_id: _Name | None = None
    # Written beside the text by lm-eval.
    type: Annotated[Any, Only("text")] = None
    # As OpenAI's client and others write an answer back.
    refusal: _Nothing = None
    audio: _Nothing = None
    annotations: Annotated[Any, Only([])] = None
    function_call: _Nothing = None
    reasoning_content: Annotated[Any, Only("")] = None
    reasoning: Annotated[Any, Only("")] = None


class FunctionSpec(Request):
    name: _Name
    description: str | None = None
    parameters: _JsonObject | None = None
    strict: bool | None = None


class Tool(Request):
    type: Literal["function"]
    function: FunctionSpec


_Messages = Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]
_Tools = Annotated[list[Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)]


class FunctionName(Request):
    name: _Name


class NamedTool(Request):
    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(Request):
    """`schema`: a JSON schema; without one, any JSON object."""

    name: _Name | None = None
    description: str | None = None
    schema_: _JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Request):
    type: Literal["text"]


class JsonObjectFormat(Request):
    type: Literal["json_object"]


class JsonSchemaResponse(Request):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaResponse, Field(discriminator="type")
]


_FORMAT = (
    "What the answer's text must be: json_object is any JSON object, json_schema one of a schema."
)


class StructuredOutputs(Request):
    """One of these: what the answer's text must be."""

    json_: _JsonObject | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    grammar: str | None = Field(None, description="A grammar in llguidance's form of Lark.")
    choice: Annotated[list[_Stop], Field(min_length=1, max_length=1024)] | None = None
    json_object: bool | None = None


class StreamOptions(Request):
    include_usage: bool | None = None
    include_obfuscation: _No = None
    continuous_usage_stats: bool | None = Field(
        None, description="Every chunk says how many tokens its choice has so far."
    )


class SamplingRequest(Request):
    """What both ways of asking for an answer share."""

    model: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        None, description="A served name; empty or null for the one there is."
    )
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKEN_ID)] | None = Field(
        None,
        description="Longest answer; default: the server's --max-tokens, else the model's own, "
        "else what fits behind the prompt.",
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None,
        description="0 takes the likeliest tokens; default: the server's --temperature, else the "
        "model's own, else 0, where OpenAI has 1.",
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Draw from the likeliest tokens that have this share of the probability "
        "together; default: the server's --top-p, else the model's own, else all.",
    )
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKEN_ID)] | None = Field(
        None, description="0 and -1: all tokens."
    )
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] | None = Field(
        None,
        description="Choice i is drawn with seed + i. Default: the server's --seed, else another "
        "one each time.",
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Text that ends the answer, and is not part of it."
    )
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=64)] | None = Field(
        None, description="Tokens that end the answer, beside the model's own."
    )
    ignore_eos: bool | None = Field(None, description="Go on to max_tokens.")
    n: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] | None = Field(
        None,
        description="Answers to each prompt; 1 if not given. All of a request's answers together "
        "are at most what the server runs and lets wait.",
    )
    stream: bool | None = Field(None, description="Send text as it becomes final.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Not looked at here; it may choose a replica.")
    # Ours: how blocks are denoised.
    algorithm: _Algorithm | None = Field(
        None, description="Default: the model family's, which does not allow all of them."
    )
    block_length: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        None, description="Tokens that are denoised together."
    )
    steps: Annotated[int, Field(ge=1, le=_MAX_TOKEN_ID)] | None = Field(
        None, description="Most denoising steps of a block."
    )
    threshold: _Share | None = Field(None, description="Confidence that accepts a token.")
    edit_threshold: _Share | None = Field(None, description="Confidence that replaces one.")
    max_post_edit_steps: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        None, description="Steps that may replace tokens of a block once it is full."
    )
    greedy: bool | None = Field(None, description="Likeliest tokens at any temperature.")
    confidence: Literal["raw", "tempered", "filtered"] | None = Field(
        None, description="The probability by which tokens are accepted."
    )
    low_threshold: _Share | None = Field(None, description="Of `hierarchy`.")
    remask_threshold: _Share | None = Field(None, description="Of `hierarchy_remasking`.")
    credit_alpha: _Weight | None = Field(None, description="Of `credit`, as the next two.")
    credit_gamma: _Weight | None = None
    credit_beta: _Share | None = None
    factor: _Weight | None = Field(None, description="Of `factor`.")
    eb_threshold: _Weight | None = Field(None, description="Of `entropy_bounded` and `renoising`.")
    eb_gamma: _Weight | None = Field(None, description="Of `lowest_entropy`.")
    t_min: _Weight | None = Field(
        None,
        description="Of `renoising`: temperature falls from t_max to t_min, times `temperature`.",
    )
    t_max: _Weight | None = None
    stability_threshold: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        None,
        description="Of `renoising`: for how many steps a canvas's likeliest tokens stay the same "
        "before it ends early, if their mean entropy is below `confidence_threshold`.",
    )
    confidence_threshold: _Weight | None = Field(None, description="Of `renoising`.")
    diffusing: bool | None = Field(
        None,
        description="Send the block at work after its denoising steps too. Needs `stream`.",
    )
    stream_mode: Literal["final", "eager"] | None = Field(
        None,
        description="Text is sent once no later step can change it; `low_confidence` never "
        "changes a token, so that `eager` is the same. Refused for `joint_threshold`, "
        "`levenshtein` and `hierarchy_remasking`.",
    )
    # What the answer's text must be.
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="What the answer's text must be, as vLLM has it. Of this, response_format and "
        "the guided fields at most one may be given.",
    )
    guided_json: _JsonObject | str | None = Field(
        None, description="The answer is JSON of this schema, an object or its text."
    )
    guided_regex: str | None = Field(None, description="The answer matches this expression whole.")
    guided_grammar: str | None = Field(
        None, description="The answer is of this grammar, in llguidance's form of Lark."
    )
    guided_choice: Annotated[list[_Stop], Field(min_length=1, max_length=1024)] | None = Field(
        None, description="The answer is one of these."
    )
    # Known elsewhere, with nothing behind them here.
    frequency_penalty: _Zero = None
    presence_penalty: _Zero = None
    repetition_penalty: _One = None
    length_penalty: _One = None
    logit_bias: Annotated[Any, Only({})] = None
    min_p: _Zero = None
    min_tokens: _Zero = None
    best_of: _One = None
    use_beam_search: _No = None
    early_stopping: _No = None
    include_stop_str_in_output: _No = None
    skip_special_tokens: _Yes = None
    spaces_between_special_tokens: _Yes = None
    add_special_tokens: _No = None
    prompt_logprobs: _Nothing = None
    truncate_prompt_tokens: _Nothing = None
    allowed_token_ids: _Nothing = None
    bad_words: Annotated[Any, Only([])] = None
    priority: _Zero = None


class ChatRequest(SamplingRequest):
    """A conversation to answer."""

    messages: _Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKEN_ID)] | None = Field(
        None, description="The newer name of max_tokens; give one of them."
    )
    logprobs: bool | None = Field(
        None,
        description="The logarithm of each token's probability in the forward that committed it, "
        "which other tokens of its block, before and behind it, may have preceded; 0 for tokens "
        "that a grammar leaves no choice in.",
    )
    top_logprobs: Annotated[Any, Only(0, why=_NO_ALTERNATIVES)] = None
    response_format: ResponseFormat | None = Field(None, description=_FORMAT)
    tools: _Tools | None = Field(
        None,
        description="Functions that the model may call. Its chat template must have a place for "
        "them.",
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="auto, the default, leaves calls to the model; none hides the tools; required "
        "makes a call certain, and a named function that one.",
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description="false: one call at most; only with tool_choice required or a named function.",
    )
    chat_template_kwargs: _JsonObject | None = Field(
        None, description="Further variables of the chat template."
    )
    add_generation_prompt: _Yes = None
    continue_final_message: _No = None
    chat_template: _Nothing = None
    documents: _Nothing = None
    functions: _Nothing = None
    function_call: _Nothing = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: _Nothing = None
    prediction: _Nothing = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    store: _No = None
    metadata: Annotated[Any, Only({})] = None
    web_search_options: _Nothing = None
    verbosity: Annotated[Any, Only("medium")] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(SamplingRequest):
    """Prompts to go on from, taken as they are: texts, or token ids."""

    prompt: (
        str
        | _TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = Field(None, description="Begin each text with its prompt.")
    logprobs: Annotated[Any, Only(0, why=_NO_ALTERNATIVES)] = Field(
        None, description="0: of the tokens chosen, as in a chat."
    )
    suffix: Annotated[Any, Only("")] = None
    response_format: ResponseFormat | None = Field(None, description=_FORMAT)


class TokenizeRequest(Request):
    """A text, or a conversation as the chat template writes it: no longer than four times
    max_model_len of the longest tokens there are."""

    model: Annotated[str, StringConstraints(max_length=1024)] | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_generation_prompt: bool = True
    add_special_tokens: _No = None
    return_token_strs: bool | None = None
    chat_template_kwargs: _JsonObject | None = None
    tools: _Tools | None = None


class DetokenizeRequest(Request):
    """Tokens, four times max_model_len at most."""

    model: Annotated[str, StringConstraints(max_length=1024)] | None = None
    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]


# Replies


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """The body of every reply that is no success."""

    error: ErrorDetail


class DiffusionUsage(Reply):
    """`nfe`: denoising and commit forwards that the answer took part in. `blocks`: blocks begun.
    `edited_tokens`: tokens that a later step replaced. `bytes_fetched`: copies of experts in those
    forwards, which other answers may have shared. `choices_replaced`: how often a lossy rule gave a
    token another expert than its own choice, or a copy of it in a lower precision, and
    `replaced_weight_share` the share of its mixing weights; 0 without one. `low_expert_runs`:
    experts computed from such copies in those forwards."""

    nfe: int
    blocks: int
    tokens_per_forward: float
    edited_tokens: int
    expert_hit_rate: float | None
    bytes_fetched: int
    choices_replaced: int
    replaced_weight_share: float
    low_expert_runs: int


class CompletionTokensDetails(Reply):
    reasoning_tokens: Literal[0] = 0


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()
    diffusion: DiffusionUsage


class TokenLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[JsonValue] = []


class ChatLogprobs(Reply):
    content: Sequence[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class CalledFunction(Reply):
    name: str
    arguments: str


class CalledTool(Reply):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Reply):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Sequence[CalledTool] | None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatReply(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: Usage


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class CompletionReply(Reply):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: Usage


class ModelCard(Reply):
    """`lossy`: the rule by which experts are replaced, null where answers are the model's own;
    `low_precision`: the form of those that `lossy` mixed takes instead."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["oled-moe"] = "oled-moe"
    root: str
    parent: None = None
    max_model_len: int
    lossy: str | None = None
    low_precision: str | None = None


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Reply):
    prompt: str


class TokenizerReply(Reply):
    """What evaluation harnesses ask before they use `/tokenize` and `/detokenize`. No token is ever
    added to a text, so that there is no bos."""

    tokenizer_class: str
    bos_token: None = None
    eos_token: str | None
    pad_token: str | None
    mask_token: str | None
    chat_template: str | None
    model_max_length: int
    vocab_size: int
    add_bos_token: Literal[False] = False
    add_eos_token: Literal[False] = False


class StatusReply(Reply):
    status: str


class VersionReply(Reply):
    version: str

"""How faces turn what a person wrote into a prompt and its parameters.

The engine takes a string as it is; faces apply the chat template where the model has one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oled_moe.config import SamplingParams
from oled_moe.errors import InputError

if TYPE_CHECKING:
    from oled_moe.engine import Engine

# End an assistant's turn in the templates of LLaDA2 and Qwen: end chats, and nothing else.
TURN_ENDS = ("<|role_end|>", "<|im_end|>")


def chat_request(
    engine: "Engine", text: str, params: SamplingParams, *, system: str | None = None
) -> tuple[str, SamplingParams]:
    """The prompt of one user turn, and parameters that end the answer with the turn.

    Raises: InputError where there is a system message and no template to put it in.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        if system is not None:
            raise InputError(f"{engine.path} has no chat template, which a system message needs")
        return text, params
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return conversation_request(engine, messages, params)


def conversation_request(
    engine: "Engine",
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, SamplingParams]:
    """The prompt of a whole conversation, and parameters that end the answer with the turn.

    `variables`: what else the chat template is given, `tools` for one.
    Raises: InputError where the model has no chat template, or the template refuses.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise InputError(f"{engine.path} has no tokenizer.json, which a conversation needs")
    ends = [end for end in map(tokenizer.token_id, TURN_ENDS) if end is not None]
    if ends:
        stop_ids = params.stop_token_ids
        if stop_ids is None:
            stop_ids = engine.sampling_defaults.stop_token_ids or ()
        params = replace(params, stop_token_ids=(*stop_ids, *ends))
    return tokenizer.apply_chat_template(messages, **(variables or {})), params


def with_face_defaults(engine: "Engine", params: SamplingParams) -> SamplingParams:
    """Faces end an answer early unless the user or the checkpoint says otherwise."""
    if params.eos_early_stop is None and engine.sampling_defaults.eos_early_stop is None:
        return replace(params, eos_early_stop=True)
    return params

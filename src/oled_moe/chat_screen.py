"""A conversation with one model: what was said so far, and how an answer is shown."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from oled_moe.block_screen import BlockView, printable, watch
from oled_moe.chat import conversation_request, with_face_defaults
from oled_moe.config import DecodingParams, SamplingParams
from oled_moe.engine import Engine, GenerationResult, StepEvent
from oled_moe.errors import InputError

# Least time a frame stays: a small model's steps would be over before they are seen.
FRAME_S = 0.04
# What stays free below an answer on the screen, for the cursor and a line in front of it.
_SPARE_LINES = 2


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A message with all that was said before it, ready for the engine."""

    prompt: str
    params: SamplingParams
    num_prompt_tokens: int


class Conversation:
    """What was said so far, and what an engine is asked next. Holds finished exchanges only.

    Raises: InputError for a model without tokenizer or chat template; ConfigError, InputError for
    parameters by which no message could be answered.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, *, system: str | None = None
    ) -> None:
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise InputError(
                f"{engine.path} has no chat template, which a conversation needs; ask single "
                "questions with: oled-moe generate --raw"
            )
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.last_result: GenerationResult | None = None
        self._params = with_face_defaults(engine, params)
        shortest = self._params
        if shortest.max_tokens is None and shortest.canvas_length is None:
            shortest = replace(shortest, max_tokens=1)
        engine.plan.resolve(shortest, 1)

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.turns.clear()
        self.last_result = None

    def request(self, text: str) -> ChatRequest:
        """What to ask for the answer to `text`.

        Raises: InputError where the context has no room left for an answer.
        """
        messages = [*self._messages(), {"role": "user", "content": text}]
        prompt, params = conversation_request(self.engine, messages, self._params)
        num_prompt_tokens = len(self.tokenizer.encode(prompt))
        return ChatRequest(prompt, self._fitted(params, num_prompt_tokens), num_prompt_tokens)

    def add(self, text: str, answer: str, result: GenerationResult | None) -> None:
        """Remember an exchange; `result` is None for an answer that was stopped."""
        self.turns += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ]
        self.last_result = result or self.last_result

    def num_tokens(self) -> int:
        """How much of the context is taken."""
        said = self.tokenizer.apply_chat_template(self._messages(), add_generation_prompt=False)
        return len(self.tokenizer.encode(said))

    def _messages(self) -> list[dict[str, str]]:
        if self.system is None:
            return self.turns
        return [{"role": "system", "content": self.system}, *self.turns]

    def _fitted(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The parameters, with no more tokens than fit behind the prompt."""
        defaults = self.engine.sampling_defaults
        decoding = DecodingParams.resolve(params.with_defaults(defaults))
        num_free = self.engine.max_model_len - num_prompt_tokens
        if num_free < min(decoding.max_tokens, decoding.block_length):
            raise InputError(
                f"the context is full: this message and what was said before take "
                f"{num_prompt_tokens} of {self.engine.max_model_len} tokens; start anew with "
                "/reset, shorten the message, or give a larger --max-model-len"
            )
        return replace(params, max_tokens=min(decoding.max_tokens, num_free))


def answer(conversation: Conversation, text: str) -> str:
    """Ask and remember; the whole answer at once."""
    request = conversation.request(text)
    result = conversation.engine.generate(request.prompt, request.params)
    assert result.text is not None
    conversation.add(text, result.text, result)
    return result.text


def show_answer(console: Console, conversation: Conversation, text: str) -> bool:
    """Ask, show the answer being denoised, leave its text on the screen and remember it.

    Ctrl-C stops the answer: what of it no step could change any more is kept. Returns whether the
    answer came to its end.
    """
    request = conversation.request(text)
    view = BlockView(conversation.tokenizer, request.num_prompt_tokens)

    def draw(event: StepEvent, is_before: bool) -> Text:
        return _last_lines(console, view.frame(event, is_before=is_before))

    said, result = "", None
    events: Iterator[StepEvent] = conversation.engine.stream(request.prompt, request.params)
    try:
        with closing(watch(console, events, draw, frame_s=FRAME_S)) as shown:
            for event in shown:
                said, result = event.text or "", event.result
    except KeyboardInterrupt:
        pass
    if said:
        console.print(Text(printable(said)), soft_wrap=True)
    if said or result is not None:
        conversation.add(text, said, result)
    return result is not None


def _last_lines(console: Console, text: Text) -> Text:
    """As much of the end of a text as the screen holds."""
    num_lines = max(1, console.height - _SPARE_LINES)
    return Text("\n").join(text.wrap(console, console.width)[-num_lines:])

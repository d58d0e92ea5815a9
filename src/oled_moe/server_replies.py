"""How answers are written: OpenAI's chat and completion objects, whole and in chunks.

`AnswerWriter` cuts an answer that only grows into the parts of it that have not been sent;
`ChatForm` and `CompletionForm` write parts and whole answers as the two endpoints do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oled_moe.server_answers import Answer, Answers, Frame
from oled_moe.server_schema import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    DiffusionUsage,
    Reply,
    StreamOptions,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from oled_moe.tokenization import Tokenizer
    from oled_moe.tool_calls import ToolCall, ToolCallParser

# Stands for a position without a token in the text of a frame.
MASK_CHARACTER = "▒"
# A probability that a float32 rounds to nothing; its logarithm is about -87.
_LEAST_PROBABILITY = 1.2e-38

FinishReason = Literal["stop", "length", "tool_calls"]


class ShownToken(NamedTuple):
    """A token as replies show it; `offset`: characters of the answer before it."""

    text: str
    logprob: float
    offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """Something new of one answer. `first_call`: how many tool calls came before `calls`."""

    index: int
    text: str = ""
    is_opening: bool = False
    tokens: Sequence[ShownToken] = ()
    calls: "Sequence[ToolCall]" = ()
    first_call: int = 0
    frame: dict[str, Any] | None = None
    finish_reason: FinishReason | None = None


class TokenWriter:
    """The tokens of one answer with the logarithms of their probabilities at commitment, as far as
    its text has been shown: neither end tokens nor a stop string."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._num_taken = 0
        self._offset = 0
        # The last tokens, and how many of their characters are counted in the offset.
        self._window: list[int] = []
        self._num_counted = 0

    def take(
        self, token_ids: Sequence[int], probabilities: Sequence[float], num_shown: int
    ) -> list[ShownToken]:
        """Those not taken yet that begin within the first `num_shown` characters."""
        taken = []
        while self._num_taken < len(token_ids) and self._offset < num_shown:
            token_id = token_ids[self._num_taken]
            logprob = math.log(max(probabilities[self._num_taken], _LEAST_PROBABILITY))
            self._num_taken += 1
            # Special tokens are no part of the text.
            if self._tokenizer.decode([token_id]):
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
                taken.append(ShownToken(text, min(logprob, 0.0), self._offset))
                self._count(token_id)
        return taken

    def _count(self, token_id: int) -> None:
        """Move on by the characters that a token completes; some take several tokens."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if not text.endswith("\ufffd"):
            self._offset += len(text) - self._num_counted
            self._window = [token_id]
            self._num_counted = len(self._tokenizer.decode(self._window))


class AnswerWriter:
    """Cuts one answer into parts, each of them once. `parser` finds tool calls in its text."""

    def __init__(
        self, answer: Answer, tokenizer: "Tokenizer", parser: "ToolCallParser | None" = None
    ) -> None:
        self.answer = answer
        self._tokenizer = tokenizer
        self._parser = parser
        self._tokens = TokenWriter(tokenizer)
        self._num_sent = 0
        self._num_calls = 0

    def take(self) -> Part:
        """What is new of the text, with its tokens and the tool calls in it."""
        answer, event, first_call = self.answer, self.answer.event, self._num_calls
        if event is None:
            return Part(answer.index)
        text = event.text or ""
        tokens = self._tokens.take(event.answer_ids, event.answer_probabilities, len(text))
        new, self._num_sent = text[self._num_sent :], len(text)
        calls: Sequence[ToolCall] = ()
        if self._parser is not None:
            new, calls = self._parser.feed(new, is_last=answer.is_over)
            self._num_calls += len(calls)
        return Part(answer.index, new, False, tokens, calls, first_call)

    @property
    def finish_reason(self) -> FinishReason:
        """Of an answer that is over."""
        result = self.answer.result
        assert result is not None
        if result.finish_reason == "length":
            return "length"
        return "tool_calls" if self._num_calls else "stop"

    def frame(self, frame: Frame) -> dict[str, Any]:
        """The block at work as clients are shown it.

        `block` and `step` count from 0 within the answer and the block, `pos` from the answer's
        first token; `masked` positions of the block have no token yet. In `text` they are
        MASK_CHARACTER each, in `ids` the mask's id, in `from` null.
        """
        event, question = frame.event, self.answer.question
        length, num_prompt = len(event.token_ids), len(question.prompt_ids)
        num_hidden = max(0, num_prompt - event.block_start)
        ids, is_masked = event.token_ids[num_hidden:], event.is_masked[num_hidden:]
        return {
            "block": event.block_id - num_prompt // length,
            "step": event.step_id,
            "steps_max": question.steps_max,
            "text": self._draft(ids, is_masked),
            "ids": ids,
            "masked": sum(is_masked),
            "changed": [
                {
                    "pos": position - num_prompt,
                    "from": None if before == question.mask_id else self._text(before),
                    "to": self._text(now),
                    "conf": round(confidence, 4),
                }
                for position, (before, now, confidence) in sorted(frame.changes.items())
            ],
            "final": event.is_block_done,
        }

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _draft(self, token_ids: Sequence[int], is_masked: Sequence[bool]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token_id, is_hole in zip(token_ids, is_masked, strict=True):
            if is_hole:
                parts += [self._tokenizer.decode(run), MASK_CHARACTER]
                run = []
            else:
                run.append(token_id)
        return "".join([*parts, self._tokenizer.decode(run)])


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of reply. `make_parser`: what looks for tool calls, where there may be any."""

    reply_id: str
    created: int
    model: str
    tokenizer: "Tokenizer"
    shows_logprobs: bool = False
    stream_options: StreamOptions | None = None
    echoes: bool = False
    make_parser: "Callable[[], ToolCallParser] | None" = None
    chunk_name: str = field(default="", init=False)

    @property
    def shows_usage(self) -> bool:
        """Whether a last chunk says what all answers took."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_on(self) -> bool:
        """Whether every chunk says how far its choice is."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def writer(self, answer: Answer) -> AnswerWriter:
        parser = None if self.make_parser is None else self.make_parser()
        return AnswerWriter(answer, self.tokenizer, parser)

    def chunk(self, part: Part, answer: Answer) -> dict[str, Any]:
        """One chunk of a stream."""
        chunk = self._chunk([self._choice(part, answer)])
        if self.counts_on and answer.event is not None:
            num_prompt, num_so_far = len(answer.question.prompt_ids), len(answer.event.answer_ids)
            chunk["usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_so_far,
                "total_tokens": num_prompt + num_so_far,
            }
        elif self.shows_usage:
            # As OpenAI does it: where usage comes last, all others say that they have none.
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, answers: Answers) -> dict[str, Any]:
        """The chunk behind all others that says what they took."""
        return {**self._chunk([]), "usage": usage_of(answers).model_dump()}

    def whole(self, answers: Answers) -> Reply:
        """The reply to a request that is not streamed."""
        raise NotImplementedError

    def _choice(self, part: Part, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": self.chunk_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class ChatForm(Form):
    """/v1/chat/completions."""

    chunk_name: str = field(default="chat.completion.chunk", init=False)

    def _choice(self, part: Part, answer: Answer) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.is_opening:
            delta["role"] = "assistant"
        if part.text or part.is_opening or part.frame is not None:
            delta["content"] = part.text
        if part.frame is not None:
            delta["diffusion"] = part.frame
        if part.calls:
            delta["tool_calls"] = [
                {"index": part.first_call + i, **_called(call).model_dump()}
                for i, call in enumerate(part.calls)
            ]
        logprobs = _chat_logprobs(part.tokens) if self.shows_logprobs and part.tokens else None
        return {
            "index": part.index,
            "delta": delta,
            "logprobs": logprobs and logprobs.model_dump(),
            "finish_reason": part.finish_reason,
        }

    def whole(self, answers: Answers) -> ChatReply:
        return ChatReply(
            id=self.reply_id,
            created=self.created,
            model=self.model,
            choices=[self._whole_choice(answer) for answer in answers.answers],
            usage=usage_of(answers),
        )

    def _whole_choice(self, answer: Answer) -> ChatChoice:
        writer = self.writer(answer)
        part = writer.take()
        calls = [_called(call) for call in part.calls]
        return ChatChoice(
            index=answer.index,
            message=ChatMessage(
                content=part.text or (None if calls else ""), tool_calls=calls or None
            ),
            logprobs=_chat_logprobs(part.tokens) if self.shows_logprobs else None,
            finish_reason=writer.finish_reason,
        )


@dataclass(frozen=True, slots=True)
class CompletionForm(Form):
    """/v1/completions."""

    chunk_name: str = field(default="text_completion", init=False)

    def _choice(self, part: Part, answer: Answer) -> dict[str, Any]:
        text = answer.question.prompt if self.echoes and part.is_opening else part.text
        logprobs = None
        if self.shows_logprobs and part.tokens:
            logprobs = self._logprobs(part.tokens, answer).model_dump()
        choice = {
            "index": part.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
        }
        return choice if part.frame is None else {**choice, "diffusion": part.frame}

    def whole(self, answers: Answers) -> CompletionReply:
        return CompletionReply(
            id=self.reply_id,
            created=self.created,
            model=self.model,
            choices=[self._whole_choice(answer) for answer in answers.answers],
            usage=usage_of(answers),
        )

    def _whole_choice(self, answer: Answer) -> CompletionChoice:
        writer = self.writer(answer)
        part = writer.take()
        return CompletionChoice(
            index=answer.index,
            text=(answer.question.prompt if self.echoes else "") + part.text,
            logprobs=self._logprobs(part.tokens, answer) if self.shows_logprobs else None,
            finish_reason="length" if writer.finish_reason == "length" else "stop",
        )

    def _logprobs(self, tokens: Sequence[ShownToken], answer: Answer) -> CompletionLogprobs:
        start = len(answer.question.prompt) if self.echoes else 0
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            text_offset=[start + token.offset for token in tokens],
        )


def _called(call: "ToolCall") -> CalledTool:
    return CalledTool(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def _chat_logprobs(tokens: Sequence[ShownToken]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=token.text,
                logprob=token.logprob,
                # Of a token that is part of a character the bytes are not known here.
                bytes=None if "\ufffd" in token.text else list(token.text.encode()),
            )
            for token in tokens
        ]
    )


def usage_of(answers: Answers) -> Usage:
    """What answers that are all over took. A prompt counts once, however many answers it got."""
    # Torch comes with it; a server listens before that is there.
    from oled_moe.metrics import combine_stats

    results = answers.results
    num_tokens = [len(result.token_ids) for result in results]
    stats = combine_stats([result.stats for result in results], num_tokens)
    # The same object: answers to one prompt share its ids.
    prompts = {id(a.question.prompt_ids): len(a.question.prompt_ids) for a in answers.answers}
    return Usage(
        prompt_tokens=sum(prompts.values()),
        completion_tokens=sum(num_tokens),
        total_tokens=sum(prompts.values()) + sum(num_tokens),
        diffusion=DiffusionUsage(
            nfe=stats.num_denoise_forwards + stats.num_commit_forwards,
            blocks=sum(answer.num_blocks for answer in answers.answers),
            tokens_per_forward=stats.tokens_per_forward,
            edited_tokens=sum(answer.num_edited for answer in answers.answers),
            expert_hit_rate=stats.hit_rate if stats.num_denoise_forwards else None,
            bytes_fetched=stats.bytes_loaded + stats.bytes_prefetched,
            choices_replaced=stats.choices_replaced,
            replaced_weight_share=stats.replaced_weight_share,
            low_expert_runs=stats.low_expert_runs,
        ),
    )

"""The demo: held-out questions for the bundled model, and the view of a block filling in."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from oled_moe.block_screen import BlockView, watch
from oled_moe.chat import chat_request, with_face_defaults
from oled_moe.config import SamplingParams
from oled_moe.engine import Engine, GenerationResult, StepEvent
from oled_moe.errors import ModelNotFoundError
from oled_moe.metrics import combine_stats

QUESTIONS_NAME = "questions.json"
MAX_TOKENS = 128
# Least time a frame stays: steps of so small a model are too fast to be seen.
FRAME_S = 0.15


@dataclass(frozen=True, slots=True)
class Question:
    """One held-out question; every right answer contains `expected`."""

    text: str
    family: str
    expected: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said."""

    question: Question
    result: GenerationResult

    @property
    def text(self) -> str:
        return self.result.text or ""

    @property
    def is_correct(self) -> bool:
        return self.question.expected in self.text


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Answers with few experts in memory and with all, in the order of the questions."""

    offloaded: Sequence[Answer]
    resident: Sequence[Answer]
    num_experts: int
    facts: Mapping[str, Any]

    @property
    def is_same(self) -> bool:
        """Whether both runs gave the same tokens."""
        return [a.result.token_ids for a in self.offloaded] == [
            a.result.token_ids for a in self.resident
        ]

    @property
    def offloaded_stats(self) -> dict[str, Any]:
        return _combined(self.offloaded)

    @property
    def resident_stats(self) -> dict[str, Any]:
        return _combined(self.resident)

    def to_dict(self) -> dict[str, Any]:
        """What `demo --json` promises."""
        return {
            "same_tokens": self.is_same,
            "answers": [
                {
                    "question": answer.question.text,
                    "family": answer.question.family,
                    "expected": answer.question.expected,
                    "answer": answer.text,
                    "correct": answer.is_correct,
                }
                for answer in self.offloaded
            ],
            "num_experts": self.num_experts,
            "offloaded": {**self.facts, "stats": self.offloaded_stats},
            "resident": {**self.facts, "stats": self.resident_stats},
        }


def _combined(answers: Sequence[Answer]) -> dict[str, Any]:
    results = [answer.result for answer in answers]
    return asdict(combine_stats([r.stats for r in results], [len(r.token_ids) for r in results]))


def load_questions(directory: Path) -> list[Question]:
    """The held-out questions beside the bundled model.

    Raises: ModelNotFoundError where they are missing, which means a broken installation.
    """
    path = directory / QUESTIONS_NAME
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return [Question(each["question"], each["family"], each["expected"]) for each in records]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotFoundError(
            f"the bundled questions at {path} cannot be read ({error!r}); install oled-moe again"
        ) from None


def pick_questions(questions: Sequence[Question], num: int) -> list[Question]:
    """The first `num`, the families taking turns; one that is answered as JSON comes early."""
    families: dict[str, list[Question]] = {}
    for question in questions:
        families.setdefault(question.family, []).append(question)
    for members in families.values():
        is_json = [question.expected.startswith("{") for question in members]
        if any(is_json[2:]) and not any(is_json[:2]):
            members.insert(1, members.pop(is_json.index(True)))
    rounds = range(max(map(len, families.values()), default=0))
    turns = [m[i] for i in rounds for m in families.values() if i < len(m)]
    return sorted(turns[:num], key=lambda question: list(families).index(question.family))


class Asked:
    """One question put to an engine: its events, and how they look."""

    def __init__(self, engine: Engine, question: Question) -> None:
        self.question = question
        self._engine = engine
        self._prompt, params = chat_request(engine, question.text, SamplingParams())
        self._params = with_face_defaults(engine, params).with_defaults(
            SamplingParams(max_tokens=MAX_TOKENS)
        )
        assert engine.tokenizer is not None
        num_prompt_tokens = len(engine.tokenizer.encode(self._prompt))
        self._view = BlockView(engine.tokenizer, num_prompt_tokens)

    def events(self) -> Iterator[StepEvent]:
        """Decode; may be called once."""
        return self._engine.stream(self._prompt, self._params)

    def answer(self) -> Answer:
        """Decode at once."""
        return Answer(self.question, self._engine.generate(self._prompt, self._params))

    def frame(self, event: StepEvent, *, is_before: bool = False) -> Text:
        """The answer as it stands; see `BlockView.frame`."""
        return self._view.frame(event, is_before=is_before)


def answer_lines(number: int, answer: Answer) -> Text:
    """A finished answer below its question, with its mark."""
    lines = Text(f"{number}  {answer.question.text}\n", "bold")
    lines = Text().append_text(lines).append_text(_indented(Text(answer.text)))
    if answer.is_correct:
        return lines.append("\n    right\n", "green")
    return lines.append(f"\n    wrong, expected: {answer.question.expected}\n", "red")


def watch_question(console: Console, asked: Asked, *, heading: str) -> Answer:
    """Show one answer being denoised, slowly enough to be seen."""
    title = Text(heading, "bold")

    def draw(event: StepEvent, is_before: bool) -> RenderableType:
        num_masked = event.num_masked + (len(event.changes) if is_before else 0)
        num_steps = event.step_id + (not is_before)
        step = f"    block {event.block_id}, step {num_steps}, {num_masked} masks left"
        text = _indented(asked.frame(event, is_before=is_before))
        return Group(title, text, Text(step, "dim"))

    result = None
    for event in watch(console, asked.events(), draw, first=title, frame_s=FRAME_S):
        result = event.result
    assert result is not None
    return Answer(asked.question, result)


def _indented(text: Text) -> Text:
    """Each line four columns in, below the question."""
    return Text("\n").join(Text("    ").append_text(line) for line in text.split("\n"))

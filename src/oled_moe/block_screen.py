"""The view of an answer whose block at work fills in, for every face on a terminal."""

import queue
import threading
import time
import unicodedata
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import groupby

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from oled_moe.engine import StepEvent
from oled_moe.tokenization import Tokenizer

MASK = "▒"
# From which confidence on a fresh token has which colour.
CONFIDENCE_STYLES = ((0.95, "bold green"), (0.7, "bold yellow"), (0.0, "bold red"))
_KEPT_CONTROLS = "\n\t"


class BlockView:
    """One answer as it stands after each step: finished text, then the block at work.

    Events must come in order, all of them.
    """

    def __init__(self, tokenizer: Tokenizer, num_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._num_prompt_tokens = num_prompt_tokens
        self._block_id = -1
        self._finished_ids: list[int] = []
        self._block_ids: list[int] = []

    def frame(self, event: StepEvent, *, is_before: bool = False) -> Text:
        """The answer: masks dim, tokens of this step coloured by confidence.

        `is_before`: as it stood before this step.
        """
        num_prompt = max(0, self._num_prompt_tokens - event.block_start)
        if event.block_id != self._block_id:
            self._block_id = event.block_id
            self._finished_ids += self._block_ids
        self._block_ids = list(event.token_ids[num_prompt:])
        text = Text(printable(self._tokenizer.decode(self._finished_ids)))
        confidence = {change.position: change.confidence for change in event.changes}

        def style_at(index: int) -> str:
            position = event.block_start + index
            if event.is_masked[index] or (is_before and position in confidence):
                return "dim"
            return _style_of(confidence[position]) if position in confidence else ""

        # Tokens of one look are decoded together: one alone may be a part of a character.
        for style, run in groupby(range(num_prompt, len(event.token_ids)), style_at):
            ids = [event.token_ids[index] for index in run]
            content = MASK * len(ids) if style == "dim" else self._tokenizer.decode(ids)
            text.append(printable(content), style)
        return text


def _style_of(confidence: float) -> str:
    return next(style for least, style in CONFIDENCE_STYLES if confidence >= least)


def printable(text: str) -> str:
    """Text that moves no cursor and changes no colour, whatever a model wrote."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(letter) == "Cc" and letter not in _KEPT_CONTROLS
        else letter
        for letter in text
    )


def watch(
    console: Console,
    events: Iterator[StepEvent],
    draw: Callable[[StepEvent, bool], RenderableType],
    *,
    first: RenderableType = "",
    frame_s: float,
) -> Generator[StepEvent, None, None]:
    """Show an answer being denoised, and hand on each event once it is on the screen.

    `draw(event, is_before)` gives a frame, of the state before or after the step; each stays
    `frame_s` at least. Decoding goes at its own speed in a thread; the view follows, so that
    watching does not change what is measured. Closing the iterator stops decoding.
    """
    frames: queue.SimpleQueue[StepEvent | BaseException] = queue.SimpleQueue()
    is_stopped = threading.Event()

    def decode() -> None:
        try:
            # Closed here: whoever decodes gives the engine back in the same thread.
            with closing(events):  # type: ignore[type-var]  # what engines return are generators
                for event in events:
                    frames.put(event)
                    if is_stopped.is_set():
                        return
        # Whatever went wrong belongs to the thread that watches.
        except BaseException as error:  # noqa: B036 - carried to the watcher, see above
            frames.put(error)

    thread = threading.Thread(target=decode, name="oled-moe-watch", daemon=True)
    thread.start()
    try:
        with Live(first, console=console, auto_refresh=False, transient=True) as live:
            live.refresh()
            while True:
                event = frames.get()
                if isinstance(event, BaseException):
                    raise event
                # A block begins as masks; without this frame one that fills at once shows none.
                for is_before in (True, False) if event.step_id == 0 else (False,):
                    live.update(draw(event, is_before), refresh=True)
                    time.sleep(frame_s)
                yield event
                if event.result is not None:
                    return
    finally:
        is_stopped.set()
        thread.join()

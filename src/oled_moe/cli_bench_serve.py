"""`oled-moe bench-serve`: load on an OpenAI endpoint; a table as vLLM prints it, and JSON.

Results go to stdout, progress to stderr. The client, numpy and all are imported inside functions.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oled_moe.cli_flags import Json, flag, takes_flags
from oled_moe.cli_shared import (
    LogFlags,
    print_json,
    read_prompt_lines,
    status_line,
    use_log_flags,
    wrapped,
)
from oled_moe.cli_text import count
from oled_moe.config import check_int, format_size
from oled_moe.errors import ConfigError, InputError

if TYPE_CHECKING:
    from oled_moe.bench_serve import ServeLoad, ServePrompt

_TITLE_WIDTH = 50


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """What is asked, and how fast."""

    endpoint: Annotated[
        str | None,
        flag(
            "--endpoint",
            metavar="NAME",
            help="chat or completions; default: what URL names, else chat.",
        ),
    ] = None
    model: Annotated[
        str | None, flag("--model", metavar="NAME", help="Default: the first of /v1/models.")
    ] = None
    api_key: Annotated[str | None, flag("--api-key", metavar="KEY", help="Sent as bearer.")] = None
    dataset: Annotated[
        str,
        flag(
            "--dataset",
            metavar="NAME",
            help="demo (questions for the bundled model), random (words), or a file: text, one "
            "prompt a line, or .jsonl of objects with prompt or messages, and perhaps max_tokens.",
        ),
    ] = "demo"
    num_prompts: Annotated[int, flag("--num-prompts", help="How many requests.")] = 100
    random_input_len: Annotated[
        int, flag("--random-input-len", help="Words of a random prompt, a mean.")
    ] = 128
    random_range_ratio: Annotated[
        float, flag("--random-range-ratio", help="Their spread to either side.")
    ] = 0.5
    request_rate: Annotated[
        float,
        flag("--request-rate", help="Arrivals a second, at random; inf: all at once."),
    ] = math.inf
    max_concurrency: Annotated[
        int | None, flag("--max-concurrency", help="Most requests under way; default: no limit.")
    ] = None
    num_warmups: Annotated[
        int, flag("--num-warmups", help="Requests before that are not counted.")
    ] = 1
    max_tokens: Annotated[
        int | None, flag("--max-tokens", help="Longest answer; default: the server's.")
    ] = None
    temperature: Annotated[float, flag("--temperature", help="Of sampling.")] = 0.0
    ignore_eos: Annotated[
        bool, flag("--ignore-eos", help="Ask for all of max-tokens; not every server can.")
    ] = False
    no_frames: Annotated[
        bool, flag("--no-frames", help="Do not ask an oled-moe server for the block at work.")
    ] = False
    seed: Annotated[int, flag("--seed", help="Of prompts and arrivals.")] = 0
    timeout: Annotated[float, flag("--timeout", metavar="SECONDS", help="For one request.")] = 600.0

    def load(self, url: str) -> "ServeLoad":
        """The load on a server. Raises: ConfigError, InputError."""
        from oled_moe.bench_serve import ServeLoad, split_url

        check_int("num-prompts", self.num_prompts, minimum=1)
        check_int("seed", self.seed, minimum=0)
        address, endpoint = split_url(url)
        return ServeLoad(
            address,
            self.prompts(),
            endpoint=self.endpoint or endpoint or "chat",
            model=self.model,
            api_key=self.api_key,
            request_rate=self.request_rate,
            max_concurrency=self.max_concurrency,
            num_warmups=self.num_warmups,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignores_eos=self.ignore_eos,
            wants_frames=not self.no_frames,
            seed=self.seed,
            timeout_s=self.timeout,
        )

    def prompts(self) -> "list[ServePrompt]":
        """What the dataset holds, as many as asked for."""
        from oled_moe.bench_serve import demo_prompts, random_prompts, repeat

        if self.dataset == "demo":
            return demo_prompts(self.num_prompts, self.seed)
        if self.dataset == "random":
            return random_prompts(
                self.num_prompts,
                self.seed,
                num_words=self.random_input_len,
                range_ratio=self.random_range_ratio,
            )
        path = Path(self.dataset)
        if not path.is_file():
            raise InputError(f"dataset is {self.dataset!r}; allowed: demo, random, or a file")
        return repeat(read_serve_prompts(path), self.num_prompts, self.seed)


@takes_flags
def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT of the server.")],
    out: Annotated[
        Path | None, flag("--out", metavar="PATH", help="Write the JSON to this file too.")
    ] = None,
    as_json: Json = False,
    load_flags: LoadFlags = LoadFlags(),
    log: LogFlags = LogFlags(),
) -> int:
    """Put load on an OpenAI endpoint, this program's or another's, and measure what clients see.

    Forwards that answers share count for each of them; useful tokens are those of answers, canvas
    tokens those of all blocks begun for them. Exit code 1 where every request failed.
    """
    use_log_flags(log)
    _check_writable(out)
    load = load_flags.load(url)
    from oled_moe.bench_serve import bench_serve as run_load
    from oled_moe.bench_serve_figures import environment, serve_figures
    from oled_moe.environment import Load

    facts, machine = environment(), Load()
    with status_line() as say:
        say("asking for the model, warming up")

        def progress(done: int, total: int) -> None:
            say(f"{done} of {count(total, 'request')}")

        run = run_load(load, progress=progress)
    figures = {
        **facts,
        "dataset": load_flags.dataset,
        "client_machine": machine.facts(),
        **serve_figures(run),
    }
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(figures)
    else:
        print_figures(figures)
    return 0 if figures["completed"] else 1


def read_serve_prompts(path: Path) -> "list[ServePrompt]":
    """Prompts of a file. Raises: InputError naming the line that is none."""
    is_json, lines = read_prompt_lines(path)
    from oled_moe.bench_serve import ServePrompt

    is_json |= path.suffix == ".jsonl"
    return [_json_prompt(place, line) if is_json else ServePrompt(line) for place, line in lines]


def _json_prompt(where: str, line: str) -> "ServePrompt":
    from oled_moe.bench_serve import ServePrompt

    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        text = value.get("prompt", value.get("question"))
        messages, max_tokens = value.get("messages"), value.get("max_tokens")
        if max_tokens is not None:
            check_int(f"{where}: max_tokens", max_tokens, minimum=1)
        if isinstance(text, str) and text and messages is None:
            return ServePrompt(text, None, max_tokens)
        if isinstance(messages, list) and messages and text is None:
            if all(isinstance(message, dict) for message in messages):
                return ServePrompt(None, messages, max_tokens)
    raise InputError(
        f"{where}: is no prompt; write "
        '{"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'
    )


def _check_writable(path: Path | None) -> None:
    """Before the long part, not after it. Raises: ConfigError."""
    if path is None:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"out is {str(path)!r}, which cannot be written; name another file")


# Printing

_HEADLINES = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)
_DIFFUSION_LINES = (
    ("Forwards, each answer's own (nfe)", "nfe"),
    ("Tokens per such forward", "tpf"),
    ("Such forwards per second", "fps"),
    ("Useful tokens (in answers)", "useful_tokens"),
    ("Canvas tokens (in whole blocks)", "canvas_tokens"),
    ("Useful token throughput (tok/s)", "useful_token_throughput"),
    ("Canvas token throughput (tok/s)", "canvas_token_throughput"),
)
_SECTIONS = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Time per Output Token after 1st block", "TPOT", "tpot_after_first_block"),
    ("Inter-token Latency", "ITL", "itl"),
    ("End-to-end Latency", "E2EL", "e2el"),
    ("Time to First Frame", "TTFF", "time_to_first_frame"),
    ("Time to First Block", "TTFB", "time_to_first_block"),
    ("Inter-block Latency", "IBL", "inter_block_latency"),
)
_STATISTICS = ("Mean", "Median", "P90", "P99")


def print_figures(figures: Mapping[str, Any]) -> None:
    """The table of vLLM, with sections of what only a diffusion server tells."""
    if not figures["completed"]:
        _print_failures(figures)
        return
    print(" Serving Benchmark Result ".center(_TITLE_WIDTH, "="))
    for label, name in _HEADLINES:
        _print_line(label, figures[name])
    if figures["nfe"] is not None:
        print("Diffusion".center(_TITLE_WIDTH, "-"))
        for label, name in _DIFFUSION_LINES:
            _print_line(label, figures[name])
    if figures["server"] is not None:
        _print_server(figures["server"])
    for title, short, name in _SECTIONS:
        if figures[f"mean_{name}_ms"] is None:
            continue
        print(title.center(_TITLE_WIDTH, "-"))
        for statistic in _STATISTICS:
            _print_line(f"{statistic} {short} (ms)", figures[f"{statistic.lower()}_{name}_ms"])
    print("=" * _TITLE_WIDTH)
    if figures["is_itl_degenerate"]:
        words = (
            f"Text came {figures['tokens_per_chunk']:.1f} tokens at a time: inter-token latency is "
            "the time between pieces, not between tokens."
        )
        if figures["single_chunk_answers"]:
            num_single = count(figures["single_chunk_answers"], "answer")
            words += f" {num_single} came in one piece, for which vLLM's TPOT is next to nothing."
        print(wrapped(words))
    _print_failures(figures)


def _print_failures(figures: Mapping[str, Any]) -> None:
    for reason, number in figures["failure_reasons"].items():
        print(f"{count(number, 'request')} failed: {reason}")


def _print_server(server: Mapping[str, Any]) -> None:
    print("Server".center(_TITLE_WIDTH, "-"))
    _print_line("Expert hit rate (%)", _percent(server["expert_hit_rate"]))
    steps = server["denoise_steps"]
    _print_line("Denoising forwards, shared or not", None if steps is None else int(steps))
    for route, num_bytes in server["expert_bytes"].items():
        _print_line(f"Expert bytes {route}", format_size(num_bytes))
    for tier, num_bytes in server["tier_bytes"].items():
        _print_line(f"Memory of {tier}", format_size(num_bytes))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _print_line(label: str, value: float | str | None) -> None:
    text = "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else value
    print(f"{label + ':':<40} {text:<10}".rstrip())

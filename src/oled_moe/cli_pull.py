"""`oled-moe pull`: brings a model from the hub into the local cache, and says what to run then.

Where the model lies goes to stdout, everything else to stderr.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oled_moe.cli_flags import Json, flag, takes_flags
from oled_moe.cli_pack import pack_rows, say_what_stays
from oled_moe.cli_shared import (
    LogFlags,
    Rows,
    note,
    print_json,
    print_rows,
    status_line,
    use_log_flags,
    versions,
)
from oled_moe.config import format_size
from oled_moe.errors import ConfigError, ServerNotFoundError

if TYPE_CHECKING:
    from oled_moe.hub import Action, HubModel, PullReport, Selection
    from oled_moe.hub_client import HubFile
    from oled_moe.hub_packing import PackPlan, PulledPack

_NUM_NAMED = 3
# Over how long the speed of a download is taken.
_SPEED_WINDOW_S = 10.0

HubId = Annotated[
    str,
    typer.Argument(metavar="ORG/NAME", help="The model's id on the hub.", envvar="OLED_MOE_MODEL"),
]


@takes_flags
def pull(
    model: HubId,
    revision: Annotated[
        str | None,
        flag("--revision", metavar="NAME", help="A branch, tag or commit; default: main."),
    ] = None,
    token: Annotated[
        str | None,
        flag("--token", metavar="TEXT", help="Who asks; default: HF_TOKEN, or `hf auth login`'s."),
    ] = None,
    is_forced: Annotated[
        bool, flag("--force", help="Also a model that cannot be run, or that the disk cannot hold.")
    ] = False,
    dtype: Annotated[
        str | None,
        flag(
            "--pack",
            metavar="NAME",
            help="Pack while it comes, with experts as bfloat16 or bf16, int8, int4 and so on; "
            "no file of weights stays.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        flag("--out", metavar="DIR", help="Where the pack goes; default: MODEL-NAME, here."),
    ] = None,
    is_quiet: Annotated[bool, flag("-q", "--quiet", help="Only errors on stderr.")] = False,
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> None:
    """Download a model into the cache that Hugging Face tools share, or check what is there.

    Fetches weights as safetensors, configuration, tokenizer and chat template, and proves each
    file by its checksum; a damaged one is fetched again. What broke off continues where it was.
    HF_HUB_CACHE or HF_HOME says where the cache is, HF_ENDPOINT where the hub is. With --pack the
    result is a pack, and the disk never holds all weights as they were.
    """
    use_log_flags(log)
    _refuse_local(model)
    if out is not None and dtype is None:
        raise ConfigError(f"out is {str(out)!r} and nothing is packed; allowed: with --pack")
    if dtype is not None:
        with status_line(is_quiet=is_quiet) as say:
            say("loading torch")
            from oled_moe.packing import check_dtype

        check_dtype(dtype, "pack")
    from oled_moe.hub_cache import default_hub_cache
    from oled_moe.hub_client import HubClient

    cache = default_hub_cache()
    client = HubClient(token=token)
    if client.is_offline and dtype is not None:
        raise ServerNotFoundError(
            f"HF_HUB_OFFLINE is set, so {model} is not packed while it comes; unset it, or pack "
            f"what is in the cache with: oled-moe pack {model} OUT --dtype {dtype}"
        )
    if client.is_offline:
        path = _find_offline(model, revision, cache)
        if as_json:
            print_json({"model": model, "path": str(path), "is_checked": False})
        else:
            print_rows([("model", f"{model}, not checked: HF_HUB_OFFLINE is set"), *_next(path)])
        return
    from oled_moe.hub import HubModel

    start_s = time.perf_counter()
    with status_line(is_quiet=is_quiet) as say:
        say(f"asking {client.endpoint} for {model}")
        opened = HubModel(client, cache, model, revision)
        if dtype is not None:
            out = out or Path(f"{model.rsplit('/')[-1]}-{dtype}")
            packed = _pull_pack(opened, out, dtype, is_forced=is_forced, is_quiet=is_quiet, say=say)
        else:
            report = _pull(opened, is_forced=is_forced, is_quiet=is_quiet, say=say)
    elapsed_s = time.perf_counter() - start_s
    if dtype is not None and as_json:
        print_json(_packed_dict(packed, elapsed_s))
    elif dtype is not None:
        print_rows([*_packed_rows(packed, elapsed_s), *_next(packed.pack.path)])
    elif as_json:
        print_json(_report_dict(report, elapsed_s))
    else:
        print_rows([*_report_rows(report, elapsed_s), *_next(_shortest_name(report))])


def _pull(
    model: "HubModel", *, is_forced: bool, is_quiet: bool, say: Callable[[str], None]
) -> "PullReport":
    from oled_moe.hub import pull as pull_model

    meter = _Meter(say)

    def check_config(values: Any) -> None:
        # Loads torch, and is not needed before there is a config.
        from oled_moe.inspection import check_config

        check_config(values)

    def on_selection(selection: "Selection") -> None:
        meter.total_bytes = selection.num_bytes
        if not is_quiet:
            say("")
            note("pull", _selection_rows(model, selection))

    return pull_model(
        model,
        check_config=check_config,
        is_forced=is_forced,
        on_selection=on_selection,
        progress=meter.tell,
    )


def _pull_pack(
    model: "HubModel",
    out: Path,
    dtype: str,
    *,
    is_forced: bool,
    is_quiet: bool,
    say: Callable[[str], None],
) -> "PulledPack":
    from oled_moe.hub_packing import pull_pack
    from oled_moe.inspection import check_config

    meter = _Meter(say)

    def on_plan(plan: "PackPlan") -> None:
        meter.total_bytes = sum(file.num_bytes for file in plan.fetched)
        if not is_quiet:
            say("")
            note("pull", _plan_rows(model, out, plan))

    def packing(what: str, done: int, total: int) -> None:
        say(f"{what}: {format_size(done)} of {format_size(total)}")

    try:
        return pull_pack(
            model,
            out,
            dtype=dtype,
            check_config=check_config,
            is_forced=is_forced,
            on_plan=on_plan,
            downloading=meter.tell,
            packing=packing,
        )
    except (Exception, KeyboardInterrupt):
        if meter.total_bytes:
            say_what_stays(out, say)
        raise


class _Meter:
    """Bytes done of all files, as a line of text."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.total_bytes = 0
        self._say = say
        self._done: dict[str, int] = {}
        # When how many bytes had been downloaded.
        self._points: deque[tuple[float, int]] = deque()
        self._downloaded = 0

    def tell(self, action: "Action", file: "HubFile", num_bytes: int) -> None:
        """One step of the download; what the hub's `Progress` is."""
        before = self._done.get(file.name, 0)
        self._done[file.name] = num_bytes
        done = sum(self._done.values())
        text = f"{action} {file.name}: {format_size(num_bytes)} of {format_size(file.num_bytes)}"
        if action == "downloading":
            self._downloaded += max(0, num_bytes - before)
        if self.total_bytes:
            text += f"; all: {format_size(done)} of {format_size(self.total_bytes)}"
            if action == "downloading":
                text += self._speed(self.total_bytes - done)
        self._say(text)

    def _speed(self, left_bytes: int) -> str:
        now_s = time.monotonic()
        self._points.append((now_s, self._downloaded))
        while now_s - self._points[0][0] > _SPEED_WINDOW_S:
            self._points.popleft()
        then_s, then_bytes = self._points[0]
        elapsed_s = now_s - then_s
        # Of a shorter time a speed would jump about.
        if elapsed_s < 1 or self._downloaded == then_bytes:
            return ""
        bytes_per_s = (self._downloaded - then_bytes) / elapsed_s
        return f", {format_size(bytes_per_s)}/s, {_duration(left_bytes / bytes_per_s)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _refuse_local(model: str) -> None:
    if model == "demo":
        raise ConfigError("demo comes with the program; there is nothing to download")
    if Path(model).is_dir():
        raise ConfigError(f"{model} is a directory here; use it as it is, or name a model ORG/NAME")


def _find_offline(model: str, revision: str | None, cache: Path) -> Path:
    from oled_moe.hub_cache import CachedModel

    path = CachedModel(cache, model).find_snapshot(revision)
    if path is None:
        raise ServerNotFoundError(
            f"HF_HUB_OFFLINE is set, and {model} is not in the local hub cache {cache}; unset it "
            "to download the model"
        )
    return path


# Printing


def _selection_rows(model: "HubModel", selection: "Selection") -> Rows:
    missing = model.missing_bytes(selection.files)
    rows = [
        ("model", f"{model.name} at {model.commit[:12]} ({model.revision})"),
        ("files", f"{len(selection.files)}, {format_size(selection.num_bytes)}"),
        ("to download", format_size(missing) if missing else "nothing; checking what is there"),
        ("cache", str(model.cached.cache)),
    ]
    if selection.left_out:
        rows.append(("left out", f"{_named(selection.left_out)}: nothing here reads them"))
    return rows


def _named(files: "tuple[HubFile, ...]") -> str:
    """The largest by name, the others by number."""
    largest = sorted(files, key=lambda file: (-file.num_bytes, file.name))
    names = ", ".join(
        f"{file.name} ({format_size(file.num_bytes)})" for file in largest[:_NUM_NAMED]
    )
    rest = len(files) - _NUM_NAMED
    return f"{names} and {rest} more" if rest > 0 else names


def _plan_rows(model: "HubModel", out: Path, plan: "PackPlan") -> Rows:
    num_files, num_bytes = len(plan.fetched), sum(file.num_bytes for file in plan.fetched)
    return [
        ("model", f"{model.name} at {model.commit[:12]} ({model.revision})"),
        ("to download", f"{num_files} files of weights, {format_size(num_bytes)}, one by one"),
        ("pack", f"{out}, {format_size(plan.pack_bytes)}"),
        ("meanwhile", f"up to {format_size(plan.most_bytes)} besides the pack"),
        ("cache", str(model.cached.cache)),
    ]


def _packed_rows(packed: "PulledPack", elapsed_s: float) -> Rows:
    size = format_size(packed.downloaded_bytes)
    return [
        ("model", f"{packed.model} at {packed.commit}"),
        ("downloaded", f"{size}, in {_duration(elapsed_s)}; every checksum right"),
        *pack_rows(packed.pack),
    ]


def _packed_dict(packed: "PulledPack", elapsed_s: float) -> dict[str, Any]:
    from oled_moe.packing import report_to_dict

    return {
        "model": packed.model,
        "revision": packed.revision,
        "commit": packed.commit,
        "path": str(packed.pack.path),
        "is_checked": True,
        "downloaded_bytes": packed.downloaded_bytes,
        "elapsed_s": elapsed_s,
        "pack": report_to_dict(packed.pack),
        "versions": versions(),
    }


def _report_rows(report: "PullReport", elapsed_s: float) -> Rows:
    states = list(report.states.values())
    done = "complete already, every checksum right; nothing was downloaded"
    if report.downloaded_bytes or set(states) != {"present"}:
        size = format_size(report.downloaded_bytes)
        done = f"{len(states) - states.count('present')} of {len(states)} downloaded, {size}"
        if replaced := states.count("replaced"):
            done += f", {replaced} of them because the one here was damaged"
        done += f", in {_duration(elapsed_s)}; every checksum right"
    return [("model", f"{report.model} at {report.commit}"), ("files", done)]


def _shortest_name(report: "PullReport") -> str | Path:
    """What to call the model by: its id means the revision main."""
    return report.model if report.revision == "main" else report.path


def _next(name: str | Path) -> Rows:
    return [
        ("next", f"oled-moe doctor {name}"),
        ("", f"oled-moe generate {name} -p TEXT"),
    ]


def _report_dict(report: "PullReport", elapsed_s: float) -> dict[str, Any]:
    return {
        "model": report.model,
        "revision": report.revision,
        "commit": report.commit,
        "path": str(report.path),
        "is_checked": True,
        "num_bytes": report.selection.num_bytes,
        "downloaded_bytes": report.downloaded_bytes,
        "elapsed_s": elapsed_s,
        "files": [
            {**asdict(file), "state": report.states[file.name]} for file in report.selection.files
        ],
        "left_out": [asdict(file) for file in report.selection.left_out],
    }

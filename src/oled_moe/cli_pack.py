"""`oled-moe pack`: experts repacked for one read each, optionally as small whole numbers.

Results go to stdout, progress to stderr. Torch and numpy are imported inside functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oled_moe.cli_flags import Json, flag, takes_flags
from oled_moe.cli_shared import (
    LogFlags,
    Model,
    print_json,
    print_notice,
    print_rows,
    status_line,
    use_log_flags,
    versions,
)
from oled_moe.cli_text import Rows, count
from oled_moe.config import format_size
from oled_moe.model_paths import find_model

if TYPE_CHECKING:
    from oled_moe.packing import PackReport


@dataclass(frozen=True, slots=True)
class PackFlags:
    """What weights become."""

    dtype: Annotated[
        str | None,
        flag(
            "--dtype",
            metavar="NAME",
            help="Experts as bfloat16 or bf16, int8 or int4; or int8-row, int4-g32, int4-g64-asym "
            "and so on; default: as stored.",
        ),
    ] = None
    method: Annotated[
        str | None,
        flag(
            "--method",
            metavar="NAME",
            help="How int4 is rounded: searched or nearest, int8 by either to the nearest; "
            "default: searched, or not at all where MODEL has such codes already.",
        ),
    ] = None
    dense_dtype: Annotated[
        str | None,
        flag(
            "--dense-dtype",
            metavar="NAME",
            help="All that is no expert as bfloat16 or bf16; default: as stored. Routers stay as "
            "they are.",
        ),
    ] = None


@takes_flags
def pack(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet.")],
    flags: PackFlags = PackFlags(),
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> None:
    """Pack a model: each expert one aligned read, with checksums, optionally int8 or int4.

    The pack is a MODEL like any other. Codes of GPTQ, compressed-tensors and GGUF weights are kept
    where a form of packs holds them. Written to OUT.partial and renamed at the end; when the
    command is stopped, the same command goes on where it was.
    """
    use_log_flags(log)
    find_model(model)
    with status_line(is_quiet=as_json) as say:
        say("loading torch")
        from oled_moe.packing import pack_checkpoint

        has_begun = False

        def progress(what: str, done: int, total: int) -> None:
            nonlocal has_begun
            has_begun = True
            percent = 100 * done // max(total, 1)
            say(f"{what}: {percent} %, {format_size(done)} of {format_size(total)}")

        try:
            report = pack_checkpoint(
                model,
                out,
                dtype=flags.dtype,
                dense_dtype=flags.dense_dtype,
                method=flags.method,
                progress=progress,
            )
        except (Exception, KeyboardInterrupt):
            if has_begun:
                say_what_stays(out, say)
            raise
    if as_json:
        from oled_moe.packing import report_to_dict

        print_json({**report_to_dict(report), "versions": versions()})
    else:
        print_rows(pack_rows(report))


def say_what_stays(out: Path, say: Callable[[str], None]) -> None:
    """What a run that ended too early has left."""
    from oled_moe.pack_places import what_stays

    if found := what_stays(out):
        say("")
        verb = "stays" if len(found) == 1 else "stay"
        names = " and ".join(map(str, found))
        print_notice(f"{names} {verb}; the same command goes on from there")


def pack_rows(report: "PackReport") -> Rows:
    """What was packed, in words."""
    rows = [
        ("pack", str(report.path)),
        (
            "experts",
            f"{count(report.num_experts, 'expert')} as {report.expert_dtype}, "
            f"{format_size(report.slot_bytes)} each",
        ),
        ("weights", report.rounding),
        (
            "size",
            f"{format_size(report.pack_bytes)}; the weights it was made from take "
            f"{format_size(report.source_bytes)}",
        ),
    ]
    if report.num_resumed_bytes:
        rows.append(("resumed", f"{format_size(report.num_resumed_bytes)} were there already"))
    return rows

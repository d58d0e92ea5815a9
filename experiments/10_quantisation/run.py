"""Which way to quantise experts loses least.

    python experiments/10_quantisation/run.py [--part weights|answers] [--limit 4]

`weights`: error of the experts' outputs, relative to the outputs, on the demo model's experts with
the activations that they see, and on Gaussian matrices of LLaDA2-mini's shape with Gaussian
activations. `answers`: held-out questions that the demo model answers, with experts quantised and
made bfloat16 again. Appends rows to results/raw/10_quantisation.jsonl.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from methods import compensated, half_quadratic
from safetensors.torch import load_file, save_file
from torch import Tensor

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.engine import find_model
from oled_moe.quantization import (
    METHODS,
    QuantSpec,
    grouped,
    nearest,
    weights_of,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments" / "01_demo_model"))
ROWS = ROOT / "results" / "raw" / "10_quantisation.jsonl"
FORMS = ("int8-row", "int8-g128", "int4-g128", "int4-g64", "int4-g32", "int4-g64-asym", "int4-row")
# Ways that need nothing but the weights.
WAYS = {**METHODS, "half-quadratic": half_quadratic}
# Questions that calibrate; they are among those that are scored too.
NUM_CALIBRATION = 88
# Of an expert that is measured, or calibrated; a row has up to 128 numbers.
MIN_ROWS = 256


def answer(engine: Engine, record: dict) -> str:
    messages = [{"role": "user", "content": record["question"]}]
    prefix = record.get("prefix", "")
    prompt = engine.tokenizer.apply_chat_template(messages) + prefix
    params = SamplingParams(
        max_tokens=96, block_length=16, threshold=0.95, temperature=0, eos_early_stop=True
    )
    result = engine.generate(prompt, params)
    return prefix + (result.text or "") if result.finish_reason == "stop" else ""


def held_out() -> list[dict]:
    lines = (find_model("demo") / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def observed() -> dict[tuple[int, int], Tensor]:
    """Rows that each expert of the demo model sees while it answers some questions."""
    seen: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    with Engine("demo", EngineConfig(threads=1)) as engine:
        start = engine.experts.start

        def record_rows(layer, hidden_TD, ids_TK, *rest):
            for expert in ids_TK.unique().tolist():
                seen[layer, expert].append(hidden_TD[(ids_TK == expert).any(1)].float())
            return start(layer, hidden_TD, ids_TK, *rest)

        engine.experts.start = record_rows
        for record in held_out()[:: 440 // NUM_CALIBRATION]:
            answer(engine, record)
    return {key: torch.cat(rows) for key, rows in seen.items()}


def quantised(weight: Tensor, spec: QuantSpec, method: str, rows: Tensor) -> Tensor:
    if method == "compensated":
        return weights_of(compensated(weight, spec, rows.T @ rows), spec)
    return weights_of(WAYS[method](weight, spec), spec)


def expert_error(matrices: list[Tensor], rows: Tensor, spec: QuantSpec, method: str) -> float:
    """Squared error of outputs over squared outputs, for the second half of the rows; the first
    half calibrates."""
    gate, up, down = matrices
    seen, other = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    hidden = F.silu(seen @ gate.T) * (seen @ up.T)
    q_gate, q_up = (quantised(each, spec, method, seen) for each in (gate, up))
    q_down = quantised(down, spec, method, hidden)
    expected = (F.silu(other @ gate.T) * (other @ up.T)) @ down.T
    found = (F.silu(other @ q_gate.T) * (other @ q_up.T)) @ q_down.T
    return float((found - expected).square().sum() / expected.square().sum())


def key_of(layer: int, expert: int, matrix: str) -> str:
    return f"model.layers.{layer + 1}.mlp.experts.{expert}.{matrix}_proj.weight"


def weights_rows() -> list[dict]:
    tensors = load_file(find_model("demo") / "model.safetensors")
    seen = observed()
    chosen = sorted(key for key, rows in seen.items() if len(rows) >= MIN_ROWS)[::8]
    torch.manual_seed(0)
    gaussian = [torch.randn(s) * 0.02 for s in ((512, 2048), (512, 2048), (2048, 512))]
    gaussian_rows = torch.randn(1024, 2048)
    out = []
    for form in FORMS:
        spec = QuantSpec.parse(form)
        for method in (*WAYS, "compensated"):
            errors = []
            for layer, expert in chosen:
                names = [key_of(layer, expert, each) for each in ("gate", "up", "down")]
                matrices = [tensors[name].float() for name in names]
                errors.append(expert_error(matrices, seen[layer, expert], spec, method))
            row = {
                "form": form,
                "method": method,
                "demo_error": (sum(errors) / len(errors)) ** 0.5,
                "demo_experts": len(chosen),
            }
            if method != "compensated":
                row["gaussian_error"] = expert_error(gaussian, gaussian_rows, spec, method) ** 0.5
            out.append(row)
            print(json.dumps(row), flush=True)
    return out


def scales_rows() -> list[dict]:
    """What rounding scales to 16 bits costs: the error of weights, as fp32, fp16 and bf16."""
    torch.manual_seed(0)
    weight = torch.randn(512, 2048) * 0.02
    out = []
    for form in ("int8-row", "int4-g64"):
        spec = QuantSpec.parse(form)
        scales = grouped(weight, spec).abs().amax(-1) / (spec.middle - 1)
        row = {"form": form, "part": "scales"}
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            rounded = scales.to(dtype).float()[..., None]
            groups = grouped(weight, spec)
            codes = (groups / rounded).round().clamp(-spec.middle, spec.middle - 1)
            row[str(dtype)] = float((codes * rounded - groups).norm() / groups.norm())
        assert torch.isfinite(weights_of(nearest(weight, spec, scales, None), spec)).all()
        out.append(row)
        print(json.dumps(row), flush=True)
    return out


def answers_rows(limit: int) -> list[dict]:
    import tasks

    folder, records = find_model("demo"), held_out()[::limit]
    tensors = load_file(folder / "model.safetensors")
    seen = observed()
    out = []
    forms = [(None, "as stored")]
    forms += [(form, "searched") for form in FORMS]
    forms += [("int4-g64", method) for method in ("nearest", "half-quadratic", "compensated")]
    for form, method in forms:
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory) / "model"
            shutil.copytree(folder, target)
            if form is not None:
                save_file(_again(tensors, seen, form, method), target / "model.safetensors")
            with Engine(str(target), EngineConfig(threads=1)) as engine:
                right = [tasks.grade(record, answer(engine, record)) for record in records]
        row = {
            "part": "answers",
            "form": form,
            "method": method,
            "num": len(records),
            "right": sum(right) / len(right),
        }
        out.append(row)
        print(json.dumps(row), flush=True)
    return out


def _again(
    tensors: dict[str, Tensor], seen: dict[tuple[int, int], Tensor], form: str, method: str
) -> dict[str, Tensor]:
    """The checkpoint with every expert quantised and bfloat16 again."""
    spec, made = QuantSpec.parse(form), dict(tensors)
    for name, weight in tensors.items():
        if ".experts." not in name or ".shared" in name:
            continue
        parts = name.split(".")
        layer, expert, matrix = int(parts[2]) - 1, int(parts[5]), parts[6][: -len("_proj")]
        rows = seen.get((layer, expert))
        how = method
        if method == "compensated" and (rows is None or len(rows) < MIN_ROWS):
            how = "searched"
        if how == "compensated" and matrix == "down":
            gate, up = (tensors[key_of(layer, expert, each)].float() for each in ("gate", "up"))
            rows = F.silu(rows @ gate.T) * (rows @ up.T)
        made[name] = quantised(weight.float(), spec, how, rows).to(weight.dtype)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("weights", "answers"), action="append")
    parser.add_argument("--limit", type=int, default=1, help="every n-th question alone")
    parser.add_argument("--no-rows", action="store_true", help="do not write the rows")
    options = parser.parse_args()
    rows = []
    with torch.inference_mode():
        for part in options.part or ("weights", "answers"):
            rows += (
                answers_rows(options.limit)
                if part == "answers"
                else [
                    *scales_rows(),
                    *weights_rows(),
                ]
            )
    if not options.no_rows:
        with ROWS.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"experiment": "10_quantisation", **r}) + "\n" for r in rows)


if __name__ == "__main__":
    main()

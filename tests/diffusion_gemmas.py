"""Tiny DiffusionGemma models with random weights, made and run by Transformers, the oracle.

    python tests/diffusion_gemmas.py tests/golden/diffusion_gemma     # writes the golden numbers

Weights are larger than at initialisation, so that experts, routers and logits matter; the scalars
of encoder and decoder differ, and so do norms, so that nothing is tested by being 1. What a step
is told of the one before has small weights: with larger ones a difference of one rounding doubles
in every step, and says nothing after twenty.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

PROMPT = [5, 9, 2, 40, 33, 60, 7, 7, 81, 12, 90, 4, 19]
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_experts": 16,
    "top_k_experts": 3,
    "moe_intermediate_size": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
}
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 4,
}
# Accepts a part of the canvas in each step.
EASY: dict[str, Any] = {"max_denoising_steps": 6, "t_min": 0.05, "t_max": 0.9, "entropy_bound": 4.0}
# name -> seed and arguments of `generate`; canvases have 8 positions.
RUNS: dict[str, dict[str, Any]] = {
    "one_canvas": {"seed": 0, "max_new_tokens": 8, **EASY},
    "three_canvases": {"seed": 1, "max_new_tokens": 24, **EASY},
    "part_of_a_canvas": {"seed": 2, "max_new_tokens": 11, **EASY},
    "accepts_all": {"seed": 3, "max_new_tokens": 16, **EASY, "entropy_bound": 1000.0},
    "accepts_one": {"seed": 4, "max_new_tokens": 8, **EASY, "entropy_bound": 1e-6},
    "settles": {
        "seed": 5,
        "max_new_tokens": 16,
        **EASY,
        "max_denoising_steps": 40,
        "t_min": 0.01,
        "t_max": 0.02,
        "stability_threshold": 2,
        "confidence_threshold": 2.0,
    },
    "settles_at_once": {
        "seed": 6,
        "max_new_tokens": 16,
        **EASY,
        "stability_threshold": 0,
        "confidence_threshold": 9.0,
    },
    "defaults": {"seed": 7, "max_new_tokens": 8},
}


def tiny_model(canvas_length: int = 8, **text: Any) -> Any:
    """A DiffusionGemmaForBlockDiffusion; `text` changes its text config."""
    import transformers as hf

    config = hf.DiffusionGemmaConfig(
        text_config=hf.DiffusionGemmaTextConfig(**TEXT | text),
        vision_config=hf.Gemma4VisionConfig(**VISION),
        canvas_length=canvas_length,
    )
    generator = torch.Generator().manual_seed(0)
    model = hf.DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.copy_(1 + 0.2 * drawn)
            elif "embed" in name:
                parameter.copy_(0.4 * drawn)
            else:
                share = 0.3 if "self_conditioning" in name else 1.0
                parameter.copy_(share * parameter.shape[-1] ** -0.5 * drawn)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.9 if "decoder" in name else 1.2)
    return model


def generate(model: Any, prompt_ids: list[int], run: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens behind the prompt, and how many forwards the decoder made."""
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as loops

    args = {name: value for name, value in run.items() if name not in ("seed", "entropy_bound")}
    if "entropy_bound" in run:
        args["sampler_config"] = loops.EntropyBoundSamplerConfig(run["entropy_bound"])
    forwards = []
    hook = model.model.decoder.register_forward_hook(lambda *_: forwards.append(1))
    torch.manual_seed(run["seed"])
    found = model.generate(torch.tensor([prompt_ids]), **args)
    hook.remove()
    return found.sequences[0, len(prompt_ids) :].tolist(), len(forwards)


def logits_of(
    model: Any, prompt_ids: list[int], canvas_ids: list[int], conditioning: torch.Tensor | None
) -> torch.Tensor:
    """Logits [C, V] of a canvas behind a prompt."""
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor([prompt_ids]),
            decoder_input_ids=torch.tensor([canvas_ids]),
            self_conditioning_logits=None if conditioning is None else conditioning[None],
        )
    logits: torch.Tensor = found.logits[0]
    return logits


def record(folder: Path) -> None:
    """Write checkpoint, logits and runs."""
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    model = tiny_model()
    model.save_pretrained(folder)
    canvas_ids = torch.randint(96, (8,), generator=torch.Generator().manual_seed(1)).tolist()
    first = logits_of(model, PROMPT, canvas_ids, None)
    second = logits_of(model, PROMPT, canvas_ids, first / 0.7)
    short = logits_of(model, PROMPT[:2], canvas_ids, None)
    tensors = {"first": first, "second": second, "short": short}
    tensors["canvas_ids"] = torch.tensor(canvas_ids)
    runs = []
    for name, run in RUNS.items():
        output_ids, num_forwards = generate(model, PROMPT, run)
        runs.append({"name": name, "args": run, "output_ids": output_ids, "forwards": num_forwards})
        # A token of the second canvas, or of the first, as the one that ends the answer.
        if name in ("one_canvas", "three_canvases"):
            eos_id = output_ids[-6]
            ended = {**run, "eos_token_id": [eos_id, 94], "pad_token_id": 0}
            output_ids, num_forwards = generate(model, PROMPT, ended)
            runs.append(
                {
                    "name": f"{name}_eos",
                    "args": ended,
                    "output_ids": output_ids,
                    "forwards": num_forwards,
                }
            )
    tensors["second_bf16"] = logits_of(model.to(torch.bfloat16), PROMPT, canvas_ids, first / 0.7)
    save_file(tensors, folder / "forward.safetensors")
    (folder / "generate.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))

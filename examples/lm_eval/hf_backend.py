"""lm-eval's `hf` backend on a Transformers model with offloaded experts, beside the same one whole.

    python examples/lm_eval/hf_backend.py             # a small random model, made here
    python examples/lm_eval/hf_backend.py PATH 4GiB   # a checkpoint, offloaded alone

From the root of the checkout; needs oled-moe[transformers], lm-eval 0.4.13 and accelerate.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from oled_moe.integrations.transformers import expert_stats, offload_experts

TASK, NUM_QUESTIONS = "oled_moe_likelihood", 20


def main() -> None:
    if len(sys.argv) > 2:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
        report("offloaded", offload_experts(Path(sys.argv[1]), sys.argv[2]), tokenizer)
        return
    demo = Path(__file__).parents[2] / "src" / "oled_moe" / "demo"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(demo / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    with tempfile.TemporaryDirectory() as folder:
        whole = small_model(len(tokenizer))
        whole.save_pretrained(folder)
        report("whole", whole, tokenizer)
        report("offloaded", offload_experts(Path(folder), experts_per_layer=2), tokenizer)


def small_model(vocab_size: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config).eval()


def report(name: str, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Score the task and print what it gave, and what the experts did for it."""
    tasks = TaskManager(include_path=str(Path(__file__).parent))
    model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=256)
    found = simple_evaluate(
        model, tasks=[TASK], task_manager=tasks, limit=NUM_QUESTIONS, bootstrap_iters=0
    )
    print(name, found["results"][TASK])
    if name == "offloaded":
        print(expert_stats(model.model))


if __name__ == "__main__":
    main()

"""A mixture-of-experts model of Hugging Face Transformers with most of its experts on disk.

    pip install 'oled-moe[transformers]'
    python examples/transformers_offload.py             # a small random model, made here
    python examples/transformers_offload.py PATH 4GiB   # a checkpoint and its expert memory

The model is Transformers' own, and so is `generate`; only what its expert modules compute with lies
elsewhere. lm-eval runs on such a model too, through its `hf` backend:

    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = offload_experts(path, "4GiB")
    tokenizer = AutoTokenizer.from_pretrained(path)
    results = simple_evaluate(HFLM(pretrained=model, tokenizer=tokenizer), tasks=["arc_easy"])
    print(results["results"], expert_stats(model))
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from oled_moe.integrations.transformers import expert_stats, offload_experts


def main() -> None:
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "25%")
        return
    with tempfile.TemporaryDirectory() as folder:
        make_small_model(Path(folder))
        run(Path(folder), "25%")


def run(path: Path, expert_memory: str) -> None:
    model = offload_experts(path, expert_memory, policy="oled")
    prompt_ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    answer_ids = model.generate(prompt_ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
    print(f"tokens  {answer_ids[0, prompt_ids.shape[1] :].tolist()}")
    stats = expert_stats(model)
    print(f"experts {stats.resident_experts} of {stats.num_experts} resident")
    print(f"memory  {stats.resident_bytes} bytes of {stats.budget_bytes} granted")
    print(f"hits    {stats.hits} of {stats.demanded} ({stats.hit_rate:.0%}), {stats.loads} loads")


def make_small_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=4,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()

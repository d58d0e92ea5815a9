"""The demo model's tokenizer: byte-level BPE in the style of LLaDA2.0.

Braces, brackets and quotes never merge and digits stand alone, so a reply forced to begin with
``{`` begins with one token, and the same numbers read alike in text and in JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import tasks
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 640
BOS, EOS, MASK, ROLE_END = "<|startoftext|>", "<|endoftext|>", "<|mask|>", "<|role_end|>"
SPECIAL_TOKENS = (BOS, EOS, "<role>", "</role>", ROLE_END, MASK)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}<role>SYSTEM</role>"
    "{%- elif message['role'] == 'user' -%}<role>HUMAN</role>"
    "{%- elif message['role'] == 'assistant' -%}<role>ASSISTANT</role>"
    "{%- else -%}<role>OBSERVATION</role>"
    "{%- endif -%}"
    "{{- message['content'] -}}<|role_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<role>ASSISTANT</role>{%- endif -%}"
)


def render_turn(role: str, text: str) -> str:
    return f"<role>{role}</role>{text}{ROLE_END}"


def render_prompt(question: str) -> str:
    """One user turn as the chat template writes it."""
    return render_turn("HUMAN", question) + "<role>ASSISTANT</role>"


def build_tokenizer(*, num_texts: int = 30_000, seed: int = 0) -> Tokenizer:
    """Train the merges on generated questions and answers."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r'[{}\[\]()"]'), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = []
    for _ in range(num_texts):
        question = tasks.draw_training_question(rng)
        texts += ["HUMAN", "ASSISTANT", "SYSTEM", question.question, question.answer]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and save the demo tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    arguments = parser.parse_args()
    save_tokenizer(build_tokenizer(), arguments.out)


if __name__ == "__main__":
    main()

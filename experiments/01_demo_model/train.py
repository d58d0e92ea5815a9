"""Train the demo model on two CPU cores and export it.

Two single-threaded processes hold the parameters in shared memory. Each computes gradients on its
own batch, each updates its own half of the parameters, and barriers keep them in step. The
learning rate follows the share of the budget (minutes, or steps for a repeatable run) that is
used up, so a run that is stopped and resumed ends where it should.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tasks
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from evaluate import DEMO_FOLDER, Scored, draw_records, export_model, score_records, summarise
from model import DemoConfig, DemoModel, SparseMoE, attention_bias
from tokenizer import EOS, MASK, render_prompt, render_turn, save_tokenizer
from tokenizer import build_tokenizer as train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn

NUM_RANKS = 2
CONTENT_WEIGHT, TAIL_WEIGHT = 2.0, 0.15
FULL_MASK_SHARE = 0.15
IMBALANCE_WEIGHT = 0.02
HISTORY_SHARE, SYSTEM_SHARE = 0.05, 0.04
BLOCK_SHARES = {16: 0.70, 32: 0.18, 8: 0.12}
SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer briefly.", "Be correct and short.")
POOL_SIZE = 400
PROBES_PER_FORM = 16
DRILL_SHARE, DRILL_EQUATIONS = 0.12, 10


# --------------------------------------------------------------------------------------------
# Sequences
# --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sequence:
    """Clean blocks followed by two noisy views of the answer's blocks, as parallel lists."""

    ids: list[int]
    targets: list[int]
    weights: list[float]
    positions: list[int]
    views: list[int]
    blocks: list[int]


def encode_answer(tokenizer: Tokenizer, marked: str, eos_id: int) -> tuple[list[int], list[float]]:
    """Token ids with eos, and their weights: marked characters count more."""
    text, inside, is_content = "", False, []
    for character in marked:
        if character in (tasks.MARK_OPEN, tasks.MARK_CLOSE):
            inside = character == tasks.MARK_OPEN
            continue
        text += character
        is_content.append(inside)
    encoding = tokenizer.encode(text)
    weights = [
        CONTENT_WEIGHT if any(is_content[start:end]) else 1.0 for start, end in encoding.offsets
    ]
    return [*encoding.ids, eos_id], [*weights, 1.0]


def draw_prompt(rng: random.Random, question: tasks.Question) -> str:
    """The prompt, sometimes after a system text or an earlier turn."""
    prompt = render_prompt(question.question)
    if rng.random() < HISTORY_SHARE:
        earlier = tasks.draw_training_question(rng)
        turns = render_turn("HUMAN", earlier.question) + render_turn("ASSISTANT", earlier.answer)
        prompt = turns + prompt
    if rng.random() < SYSTEM_SHARE:
        prompt = render_turn("SYSTEM", rng.choice(SYSTEM_TEXTS)) + prompt
    return prompt


def build_drill(rng: random.Random, tokenizer: Tokenizer, mask_id: int) -> Sequence:
    """Equations in one block, with nothing but results masked: dense practice in calculating.

    Of a two-digit result both digits are masked, or only one of them.
    """
    ids: list[int] = []
    masked: list[int] = []
    while len(ids) < 10 * DRILL_EQUATIONS:
        equation = tasks.draw_equation(rng)
        if tasks.is_held_out_equation(equation):
            continue
        head, _, result = tasks.write_equation(equation).partition(tasks.MARK_OPEN)
        ids += tokenizer.encode(head).ids
        digits = tokenizer.encode(result.strip(tasks.MARK_CLOSE)).ids
        places = [len(ids) + i for i in range(len(digits))]
        masked += places if rng.random() < 0.5 else [rng.choice(places)]
        ids += digits + tokenizer.encode("\n").ids
    chosen, offset = set(masked), rng.randrange(64)
    return Sequence(
        ids=[mask_id if i in chosen else token for i, token in enumerate(ids)],
        targets=ids,
        weights=[CONTENT_WEIGHT if i in chosen else 0.0 for i in range(len(ids))],
        positions=[offset + i for i in range(len(ids))],
        views=[1] * len(ids),
        blocks=[0] * len(ids),
    )


def draw_views(rng: random.Random, maskable: list[int]) -> tuple[set[int], set[int]]:
    """Masked positions of one block in two views: a random subset and what it leaves."""
    size = len(maskable)
    is_full = rng.random() < FULL_MASK_SHARE
    first = set(rng.sample(maskable, size if is_full else rng.randint(1, size)))
    second = set(maskable) - first
    if not second:
        second = set(rng.sample(maskable, rng.randint(1, size)))
    return first, second


def build_sequence(
    rng: random.Random,
    prompt: list[int],
    answer: list[int],
    weights: list[float],
    *,
    block_length: int,
    mask_id: int,
    eos_id: int,
) -> Sequence:
    num_prompt = len(prompt)
    end = -(-(num_prompt + len(answer)) // block_length) * block_length
    ids = [*prompt, *answer]
    all_weights = [*([0.0] * num_prompt), *weights]
    all_weights += [TAIL_WEIGHT] * (end - len(ids))
    ids += [eos_id] * (end - len(ids))
    start = num_prompt // block_length * block_length
    num_clean = end - block_length
    masked: tuple[set[int], set[int]] = (set(), set())
    for block_start in range(start, end, block_length):
        positions = list(range(max(block_start, num_prompt), block_start + block_length))
        for view, chosen in zip(masked, draw_views(rng, positions), strict=True):
            view |= chosen
    clean = list(range(num_clean))
    noisy = list(range(start, end))
    positions = clean + noisy + noisy
    inputs = [ids[p] for p in clean]
    targets = list(inputs)
    loss_weights = [0.0] * num_clean
    for view in masked:
        inputs += [mask_id if p in view else ids[p] for p in noisy]
        targets += [ids[p] for p in noisy]
        loss_weights += [all_weights[p] if p in view else 0.0 for p in noisy]
    return Sequence(
        ids=inputs,
        targets=targets,
        weights=loss_weights,
        positions=positions,
        views=[0] * num_clean + [1] * len(noisy) + [2] * len(noisy),
        blocks=[p // block_length for p in positions],
    )


@dataclass(slots=True)
class Batch:
    ids: Tensor
    positions: Tensor
    bias: Tensor
    keep: Tensor
    targets: Tensor
    weights: Tensor


def collate(sequences: list[Sequence], eos_id: int) -> Batch:
    """Pad to one length; padding attends to padding only and carries no loss."""
    width = max(len(s.ids) for s in sequences)

    def stack(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        rows = [getattr(s, name) for s in sequences]
        return torch.tensor([[*row, *([fill] * (width - len(row)))] for row in rows], dtype=dtype)

    views = stack("views", -1, torch.long)
    blocks = stack("blocks", -1, torch.long)
    is_clean_key = (views == 0)[:, None, :]
    earlier = blocks[:, None, :] < blocks[:, :, None]
    same = (views[:, None, :] == views[:, :, None]) & (blocks[:, None, :] == blocks[:, :, None])
    weights = stack("weights", 0.0, torch.float32).view(-1)
    keep = weights.nonzero().view(-1)
    return Batch(
        ids=stack("ids", eos_id, torch.long),
        positions=stack("positions", 0, torch.long),
        bias=attention_bias((is_clean_key & earlier) | same),
        keep=keep,
        targets=stack("targets", eos_id, torch.long).view(-1)[keep],
        weights=weights[keep],
    )


def draw_batches(
    tokenizer: Tokenizer, rng: random.Random, *, tokens_per_batch: int
) -> Iterator[Batch]:
    """Batches of sequences of similar length and one block length."""
    mask_id, eos_id = tokenizer.token_to_id(MASK), tokenizer.token_to_id(EOS)
    waiting: list[list[Sequence]] = []
    while True:
        block_length = rng.choices(list(BLOCK_SHARES), list(BLOCK_SHARES.values()))[0]
        pool = []
        for _ in range(POOL_SIZE):
            if rng.random() < DRILL_SHARE:
                pool.append(build_drill(rng, tokenizer, mask_id))
                continue
            question = tasks.draw_training_question(rng)
            prompt = tokenizer.encode(draw_prompt(rng, question)).ids
            answer, weights = encode_answer(tokenizer, question.marked_answer, eos_id)
            if question.prefix:
                num_given = len(tokenizer.encode(question.prefix).ids)
                prompt = prompt + answer[:num_given]
                answer, weights = answer[num_given:], weights[num_given:]
            pool.append(
                build_sequence(
                    rng,
                    prompt,
                    answer,
                    weights,
                    block_length=block_length,
                    mask_id=mask_id,
                    eos_id=eos_id,
                )
            )
        pool.sort(key=lambda s: len(s.ids))
        current: list[Sequence] = []
        for sequence in pool:
            if current and len(sequence.ids) * (len(current) + 1) > tokens_per_batch:
                waiting.append(current)
                current = []
            current.append(sequence)
        rng.shuffle(waiting)
        # Keep some batches of this pool back, so that neighbours in time differ in block length.
        while len(waiting) > 24:
            yield collate(waiting.pop(), eos_id)


# --------------------------------------------------------------------------------------------
# Optimiser
# --------------------------------------------------------------------------------------------


def orthogonalise(batch: Tensor, *, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on a batch of matrices (Muon), rows being the short side."""
    x = batch.bfloat16()
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


@dataclass(slots=True)
class Owned:
    """A parameter that this process updates, its two gradients and its optimiser state."""

    name: str
    parameter: Tensor
    gradients: list[Tensor]
    is_matrix: bool
    state: dict[str, Tensor]

    def update(self, *, share: float, step: int, settings: Settings) -> None:
        gradient = sum(self.gradients[1:], self.gradients[0]) / len(self.gradients)
        if self.is_matrix:
            self._update_matrix(gradient, share * settings.muon_lr)
        else:
            slower = 0.3 if self.name.endswith("gate") else 1.0
            self._update_other(gradient, share * settings.adam_lr * slower, step)

    def _update_matrix(self, gradient: Tensor, lr: float) -> None:
        momentum = self.state.setdefault("momentum", torch.zeros_like(gradient))
        momentum.lerp_(gradient, 0.05)
        direction = gradient.lerp(momentum, 0.95)
        shape = direction.shape
        if self.name.endswith("gate_up"):
            matrices = direction.view(shape[0] * 2, shape[1] // 2, shape[2])
        else:
            matrices = direction.view(-1, shape[-2], shape[-1])
        is_tall = matrices.shape[1] > matrices.shape[2]
        scale = max(1.0, matrices.shape[1] / matrices.shape[2]) ** 0.5
        if is_tall:
            matrices = matrices.transpose(1, 2)
        update = orthogonalise(matrices)
        if is_tall:
            update = update.transpose(1, 2)
        self.parameter.mul_(1 - 0.03 * lr)
        self.parameter.add_(update.reshape(shape), alpha=-lr * scale)

    def _update_other(self, gradient: Tensor, lr: float, step: int) -> None:
        first = self.state.setdefault("first", torch.zeros_like(gradient))
        second = self.state.setdefault("second", torch.zeros_like(gradient))
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient * gradient, 0.02)
        scale = (1 - 0.98**step) ** 0.5 / (1 - 0.9**step)
        self.parameter.addcdiv_(first, second.sqrt().add_(1e-10), value=-lr * scale)


def split_parameters(model: DemoModel, buffers: list[Tensor], rank: int) -> list[Owned]:
    """Point ``.grad`` into this process's buffer and pick the parameters it owns."""
    named = list(model.named_parameters())
    offset, owned = 0, []
    cost = [0] * NUM_RANKS
    for name, parameter in named:
        size = parameter.numel()
        views = [b[offset : offset + size].view_as(parameter) for b in buffers]
        parameter.grad = views[rank]
        offset += size
        is_matrix = parameter.dim() > 1 and not name.endswith("gate") and "emb" not in name
        is_matrix = is_matrix and not name.startswith("lm_head")
        owner = cost.index(min(cost))
        cost[owner] += size * (4 if is_matrix else 1)
        if owner == rank:
            owned.append(Owned(name, parameter.data, views, is_matrix, {}))
    return owned


# --------------------------------------------------------------------------------------------
# The run
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    minutes: float
    steps: int
    seed: int
    work: Path
    out: Path
    status: Path | None
    tokens_per_batch: int
    muon_lr: float
    adam_lr: float
    bias_rate: float
    probe_minutes: float
    warmup: float = 0.02
    flat_until: float = 0.35

    def learning_share(self, progress: float) -> float:
        """Warm-up, plateau, then linear decay over the rest of the run."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        if progress < self.flat_until:
            return 1.0
        return max(0.0, (1 - progress) / (1 - self.flat_until))


class Run:
    """One training process."""

    def __init__(self, rank: int, shared: dict[str, Any], settings: Settings) -> None:
        self.rank, self.shared, self.settings = rank, shared, settings
        self.model: DemoModel = shared["model"]
        self.owned = split_parameters(self.model, shared["gradients"], rank)
        self.layers = [m for m in self.model.modules() if isinstance(m, SparseMoE)]
        self.tokenizer = Tokenizer.from_file(str(settings.work / "tokenizer.json"))
        self.step, self.spent_s, self.best = 0, 0.0, -1.0
        self.clock = time.monotonic()
        self._resume()
        seed = settings.seed * 1000 + self.step * NUM_RANKS + rank + 1
        self.batches = draw_batches(
            self.tokenizer, random.Random(seed), tokens_per_batch=settings.tokens_per_batch
        )

    def _state_file(self) -> Path:
        return self.settings.work / f"state_{self.rank}.pt"

    def _resume(self) -> None:
        if not self._state_file().exists():
            return
        saved = torch.load(self._state_file(), weights_only=True)
        self.step, self.spent_s, self.best = saved["step"], saved["spent_s"], saved["best"]
        for item in self.owned:
            item.state = saved["optimiser"].get(item.name, {})

    def _save(self) -> None:
        state = {item.name: item.state for item in self.owned}
        saved = {"step": self.step, "spent_s": self.spent_s, "best": self.best, "optimiser": state}
        _write_atomically(saved, self._state_file())
        if self.rank == 0:
            _write_atomically(self.model.state_dict(), self.settings.work / "model.pt")

    def progress(self) -> float:
        """Share of the budget used, the same in both processes."""
        if self.settings.steps:
            return self.step / self.settings.steps
        return self.shared["spent"][0].item() / (60 * self.settings.minutes)

    def train(self) -> None:
        last_save = last_probe = self.clock
        loss_sum, num_logged, tokens, logged_at = 0.0, 0, 0, self.clock
        for batch in self.batches:
            progress = self.progress()
            if progress >= 1:
                break
            loss_sum += self._one_step(batch, self.settings.learning_share(progress))
            num_logged, tokens = num_logged + 1, tokens + batch.ids.numel()
            now = self.shared["now"][0].item()
            if self.rank == 0 and self.step % 25 == 0:
                rate = NUM_RANKS * tokens / (time.monotonic() - logged_at)
                self._say(
                    f"step {self.step} min {self.spent_s / 60:.1f} loss {loss_sum / num_logged:.4f}"
                    f" lr {self.settings.learning_share(progress):.2f} tok/s {rate:.0f}"
                    f" peak load {max(self.peak_loads):.1f}"
                )
                loss_sum, num_logged, tokens, logged_at = 0.0, 0, 0, time.monotonic()
            if now - last_probe > 60 * self.settings.probe_minutes:
                self._probe()
                last_probe = now
            if now - last_save > 120:
                self._save()
                last_save = now
        self._probe()
        self._save()

    def _one_step(self, batch: Batch, share: float) -> float:
        self.shared["gradients"][self.rank].zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(batch.ids, batch.positions, batch.bias, batch.keep)
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        imbalance = sum(layer.imbalance for layer in self.layers)
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        (loss + IMBALANCE_WEIGHT * imbalance).backward()
        for index, layer in enumerate(self.layers):
            self.shared["load"][self.rank, index] = layer.load
            layer.load.zero_()
        if self.rank == 0:
            now = time.monotonic()
            self.spent_s += now - self.clock
            self.clock = now
            self.shared["spent"][0], self.shared["now"][0] = self.spent_s, now
        self._wait()
        self.step += 1
        with torch.no_grad():
            for item in self.owned:
                item.update(share=share, step=self.step, settings=self.settings)
            if self.rank == 0:
                self._balance(share)
        self._wait()
        return float(losses.detach().mean())

    def _balance(self, share: float) -> None:
        """Nudge selection biases towards equal load."""
        loads = self.shared["load"].sum(0)
        mean = loads.mean(-1, keepdim=True)
        self.peak_loads = (loads / mean).max(-1).values.tolist()
        rate = self.settings.bias_rate * max(share, 0.05)
        for layer, error in zip(self.layers, 1 - loads / mean, strict=True):
            layer.expert_bias += rate * error.clamp(-2, 1)
            layer.expert_bias -= layer.expert_bias.mean()

    def _probe(self) -> None:
        """Both processes answer half of the probe questions; export what is better."""
        records = draw_records(PROBES_PER_FORM, seed=1, forms=tuple(tasks.MIXTURE))
        mine = records[self.rank :: NUM_RANKS]
        scored = score_records(self.model, self.tokenizer, mine, max_new_tokens=64)
        flags = self.shared["probe"]
        flags[self.rank, : len(scored)] = torch.tensor(
            [[s.is_right, s.num_tokens, s.num_forwards] for s in scored], dtype=torch.float64
        )
        self._wait()
        if self.rank == 0:
            merged = [
                Scored(record, "", bool(row[0]), int(row[1]), int(row[2]))
                for index, record in enumerate(records)
                for row in [flags[index % NUM_RANKS, index // NUM_RANKS].tolist()]
            ]
            summary = summarise(merged)
            forms = {name: entry["accuracy"] for name, entry in summary.items()}
            average = sum(forms.values()) / len(forms)
            note = ""
            if average >= self.best or self.progress() >= 1:
                self.best = max(average, self.best)
                export_model(self.model, self.tokenizer, self.settings.out)
                note = f" exported to {self.settings.out}"
            rates = {n: round(e["tokens_per_forward"], 2) for n, e in summary.items()}
            self._say(f"probe step {self.step} mean {average:.3f} {json.dumps(forms)}{note}")
            self._say(f"tokens per forward {json.dumps(rates)}")
        self._wait()

    def _wait(self) -> None:
        self.shared["barrier"].wait(timeout=600)

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        if self.settings.status is not None:
            with self.settings.status.open("a") as file:
                file.write(line + "\n")


def _write_atomically(value: Any, path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    os.replace(partial, path)


def _work(rank: int, shared: dict[str, Any], settings: Settings) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed + rank)
    Run(rank, shared, settings).train()


def start(settings: Settings) -> None:
    settings.work.mkdir(parents=True, exist_ok=True)
    if not (settings.work / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(seed=settings.seed), settings.work)
    torch.manual_seed(settings.seed)
    model: nn.Module = DemoModel(DemoConfig())
    if (settings.work / "model.pt").exists():
        model.load_state_dict(torch.load(settings.work / "model.pt", weights_only=True))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, SparseMoE):
            module.expert_bias.share_memory_()
    for parameter in model.parameters():
        parameter.data.share_memory_()
    size = sum(p.numel() for p in model.parameters())
    context = mp.get_context("fork")
    config = DemoConfig()
    num_sparse = config.num_hidden_layers - config.first_k_dense_replace
    num_probes = PROBES_PER_FORM * len(tasks.MIXTURE)
    shared = {
        "model": model,
        "gradients": [torch.zeros(size).share_memory_() for _ in range(NUM_RANKS)],
        "load": torch.zeros(NUM_RANKS, num_sparse, config.num_experts).share_memory_(),
        "probe": torch.zeros(NUM_RANKS, num_probes, 3, dtype=torch.float64).share_memory_(),
        "spent": torch.zeros(1, dtype=torch.float64).share_memory_(),
        "now": torch.zeros(1, dtype=torch.float64).share_memory_(),
        "barrier": context.Barrier(NUM_RANKS),
    }
    processes = [
        context.Process(target=_work, args=(r, shared, settings)) for r in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(p.exitcode for p in processes):
        raise SystemExit("a training process failed; start again to resume from the last save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock budget")
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/demo_model"), help="for resuming")
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder for the export")
    parser.add_argument("--status", type=Path, help="file that progress lines are appended to")
    parser.add_argument("--tokens-per-batch", type=int, default=2560)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--bias-rate", type=float, default=1e-2)
    parser.add_argument("--probe-minutes", type=float, default=5.0)
    start(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()

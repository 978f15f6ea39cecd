"""Generate dialogues and train the demo model on them.

Usage: `python -m chatcache.demo_model.training.train --out DIR`.

The schedule follows the clock, not a number of steps: whatever the machine, the run warms up, holds its learning
rate and decays it to nothing within the minutes given. Long dialogues join after a third.

Each core runs a worker of one thread, and workers meet once a step to average their gradients: on a machine that
does other things as well, threads that meet at every operator would spend their time waiting for each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import torch
import torch.distributed
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from chatcache.demo_model.training.corpus import IGNORED, Encoder, save_tokenizer, stream, train_tokenizer
from chatcache.demo_model.training.network import Llama, Shape, export

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """Hold the numbers of one training run."""

    minutes: float = 60.0
    seed: int = 0
    batch_tokens: int = 4096
    pool_dialogues: int = 2048
    muon_lr: float = 5e-3
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.01
    decay_share: float = 0.4
    long_from: float = 0.3
    long_share: float = 0.04
    average: float = 0.995
    checkpoint_minutes: float = 5.0


class Clock:
    """Measure the elapsed share of the run; a resumed run continues where it stopped."""

    def __init__(self, minutes: float, spent_s: float = 0.0) -> None:
        self.total_s, self.start_s = minutes * 60, time.monotonic() - spent_s

    @property
    def spent_s(self) -> float:
        """Return the seconds spent so far."""
        return time.monotonic() - self.start_s

    @property
    def progress(self) -> float:
        """Return the share of the run that is over, at most 1."""
        return min(1.0, self.spent_s / self.total_s)


def lr_factor(progress: float, recipe: Recipe) -> float:
    """Return the share of the maximum learning rate: warm-up, constant, linear decay."""
    return max(0.0, min(1.0, progress / recipe.warmup_share, (1 - progress) / recipe.decay_share))


def batches(encoder: Encoder, recipe: Recipe, clock: Clock, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and targets, [B, T], in batches of about `batch_tokens` tokens."""
    rng, pools = Random(seed), 0
    while True:
        late = clock.progress > recipe.long_from
        dialogues = stream(rng.getrandbits(62), long_share=recipe.long_share if late else 0.0)
        pairs = encoder.encode([next(dialogues) for _ in range(recipe.pool_dialogues)])
        pairs.sort(key=lambda pair: len(pair[0]))
        ready, rows = [], []
        for pair in reversed(pairs):
            rows.append(pair)
            if (len(rows) + 1) * padded(len(rows[0][0])) > recipe.batch_tokens:
                ready.append(collate(rows))
                rows = []
        rng.shuffle(ready)
        yield from ready
        pools += 1


def padded(length: int) -> int:
    """Round a length up, so that few different shapes occur."""
    return -(-length // 32) * 32


def collate(rows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Pad rows on the right to one rectangle."""
    length = padded(max(len(ids) for ids, _ in rows))
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    targets = np.full((len(rows), length), IGNORED, dtype=np.int64)
    for at, (ids, wanted) in enumerate(rows):
        tokens[at, : len(ids)], targets[at, : len(wanted)] = ids, wanted
    return torch.from_numpy(tokens), torch.from_numpy(targets)


class Trainer:
    """Hold the weights, their running average and the two optimisers."""

    def __init__(self, recipe: Recipe, shape: Shape) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.shape = recipe, shape
        self.network = Llama(shape)
        self.trunk = torch.compile(self.network.model, dynamic=True)
        matrices = [p for name, p in self.network.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.network.named_parameters() if p.ndim == 1 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.peaks = (recipe.muon_lr, recipe.adam_lr)
        self.average = {name: weight.detach().clone() for name, weight in self.network.state_dict().items()}
        self.num_steps = self.num_tokens = 0

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the positions that have a target."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.trunk(tokens).flatten(0, 1)
            kept = torch.nonzero(targets.flatten() != IGNORED).squeeze(1)
            logits = functional.linear(hidden[kept], self.network.model.embed_tokens.weight)
        return functional.cross_entropy(logits.float(), targets.flatten()[kept])

    def step(self, tokens: Tensor, targets: Tensor, progress: float) -> tuple[float, float]:
        """Make one optimiser step with all workers; return the mean loss and the progress."""
        loss = self.loss(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        mean_loss, progress, num_tokens = self._meet([float(loss.detach()), progress, float(tokens.numel())])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * lr_factor(progress, self.recipe)
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1
        self.num_tokens += round(num_tokens * torch.distributed.get_world_size())
        keep = min(self.recipe.average, self.num_steps / (self.num_steps + 10))
        state = self.network.state_dict()
        torch._foreach_lerp_(list(self.average.values()), [state[name] for name in self.average], 1 - keep)
        return mean_loss, progress

    def _meet(self, numbers: list[float]) -> list[float]:
        """Average the gradients, and these numbers with them, over all workers."""
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor(numbers)])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        parts = torch.split(flat, [*(gradient.numel() for gradient in gradients), len(numbers)])
        for gradient, part in zip(gradients, parts, strict=False):
            gradient.copy_(part.view_as(gradient))
        averaged: list[float] = parts[-1].tolist()
        return averaged

    def save(self, path: pathlib.Path, spent_s: float) -> None:
        """Write everything that a resumed run needs."""
        torch.save(
            {
                "network": self.network.state_dict(),
                "average": self.average,
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "counts": (self.num_steps, self.num_tokens),
                "spent_s": spent_s,
            },
            path,
        )

    def load(self, path: pathlib.Path) -> float:
        """Read what `save` wrote and return the seconds spent until then."""
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.num_steps, self.num_tokens = state["counts"]
        return float(state["spent_s"])


def work(rank: int, num_workers: int, meeting: str, out: pathlib.Path, recipe: Recipe, resume: bool) -> None:
    """Train as one of several workers; the first one also speaks and writes."""
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    trainer = Trainer(recipe, Shape(vocab_size=tokenizer.get_vocab_size()))
    clock = Clock(recipe.minutes, trainer.load(out / "state.pt") if resume else 0.0)
    saved_s = spoken_s = clock.spent_s
    losses: list[float] = []
    seed = (recipe.seed + trainer.num_steps) * num_workers + rank
    for tokens, targets in batches(Encoder(tokenizer), recipe, clock, seed):
        loss, progress = trainer.step(tokens, targets, clock.progress)
        losses.append(loss)
        done = progress >= 1
        if clock.spent_s - spoken_s > 20 or done:
            rate = trainer.num_tokens / clock.spent_s
            logger.info("%5.1f min, step %d, %.1f M tokens (%.0f/s), loss %.4f", clock.spent_s / 60, trainer.num_steps,
                        trainer.num_tokens / 1e6, rate, sum(losses) / len(losses))  # fmt: skip
            spoken_s, losses = clock.spent_s, []
        if rank == 0 and (clock.spent_s - saved_s > recipe.checkpoint_minutes * 60 or done):
            export(trainer.average, trainer.shape, out)
            trainer.save(out / "state.pt", clock.spent_s)
            saved_s = clock.spent_s
        if done:
            return


def train(out: pathlib.Path, recipe: Recipe, *, resume: bool = False, num_workers: int = 1) -> None:
    """Train into a folder, leaving a usable model there every few minutes and at the end."""
    if not resume:
        save_tokenizer(train_tokenizer(recipe.seed), out)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_workers, f"{folder}/meeting", out, recipe, resume)
        spawn(work, arguments, nprocs=num_workers)  # type: ignore[no-untyped-call]


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train the demo model on generated dialogues.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the model and the training state")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue from DIR/state.pt")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of one thread each")
    options = parser.parse_args()
    recipe = Recipe(minutes=options.minutes, seed=options.seed)
    train(options.out, recipe, resume=options.resume, num_workers=options.workers)


if __name__ == "__main__":
    main()

"""Generate dialogues and train the demo model on them.

Usage: `python -m chatcache.demo_model.training.train --out DIR`. With `--from MODEL` the run starts from the weights
and the tokenizer of a trained model, at a lower learning rate.

The schedule follows the clock, not a number of steps: whatever the machine, the run warms up, holds its learning
rate and decays it to nothing within the minutes given. Long dialogues and functions join after a third.

Each core runs a worker of one thread, and workers meet once a step to average their gradients: on a machine that
does other things as well, threads that meet at every operator would spend their time waiting for each other.

The network has the tensors and names of `LlamaForCausalLM`, with which it is exported. Rows of one batch hold one
dialogue each, padded on the right. Causal attention never looks right, so no mask is needed, the fused kernel applies,
and no dialogue can see another one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from chatcache.demo_model.training.corpus import IGNORED, SPECIAL, Encoder, save_tokenizer, stream, train_tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of the model; the defaults give 3.3 M parameters."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    def to_hf(self, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """Return the `config.json` that makes `transformers` build this very model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [max_positions, head_dim], in the half-split layout of Llama."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float64), shape.rope_theta**-steps)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys [B, H, T, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Everything below the head, under the name that checkpoints give it (`model.`)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to final hidden states [B, T, hidden]."""
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[:length].to(torch.bfloat16), self.sin[:length].to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """The language model; `state_dict()` is a Llama checkpoint with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Trunk(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.num_layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over `targets` [B, T] that are not -100."""
        hidden = self.model(tokens)
        logits = functional.linear(hidden, self.model.embed_tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def export(weights: Mapping[str, Tensor], shape: Shape, folder: pathlib.Path) -> None:
    """Write weights (bf16), `config.json` and `generation_config.json`.

    Each file gets its final name when it is complete.
    """
    pad, _, eos = (SPECIAL.index(token) for token in SPECIAL)  # the trainer numbers them first, in this order
    tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    whole = folder / "model.safetensors"
    partial = whole.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(whole)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False, "max_new_tokens": 256}
    for name, content in (
        ("config.json", shape.to_hf(bos=pad, eos=eos, pad=pad)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of one training run."""

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
    tool_share: float = 0.4
    average: float = 0.995
    checkpoint_minutes: float = 5.0

    def continued(self) -> Recipe:
        """Return the recipe of a run that starts from a trained model: all dialogues at once, lower rates."""
        return dataclasses.replace(
            self,
            muon_lr=self.muon_lr / 2,
            adam_lr=self.adam_lr / 2,
            warmup_share=0.03,
            decay_share=0.7,
            long_from=-1.0,
            average=0.99,
        )


class Clock:
    """Measures the elapsed share of the run; a resumed run continues where it stopped."""

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
    """Return the learning rate as a share of its maximum: warm-up, constant, linear decay."""
    return max(0.0, min(1.0, progress / recipe.warmup_share, (1 - progress) / recipe.decay_share))


def batches(encoder: Encoder, recipe: Recipe, clock: Clock, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and targets, [B, T], in batches of about `batch_tokens` tokens."""
    rng, pools = Random(seed), 0
    while True:
        late = clock.progress > recipe.long_from
        shares = {"long_share": recipe.long_share, "tool_share": recipe.tool_share} if late else {}
        dialogues = stream(rng.getrandbits(62), **shares)
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
    """Round a length up to a multiple of 32, so that few different shapes occur."""
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
    """The weights, their running average and the two optimisers of a training run."""

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
        self.average = self._copied_weights()
        self.num_steps = self.num_tokens = 0

    def _copied_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.network.state_dict().items()}

    def start_from(self, model: pathlib.Path) -> None:
        """Take the weights of an exported model, with new optimiser states."""
        self.network.load_state_dict(load_file(model / "model.safetensors"))
        self.average = self._copied_weights()

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
        """Average the gradients over all workers, in place; return the average of `numbers`, too."""
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


def work(
    rank: int,
    num_workers: int,
    meeting: str,
    out: pathlib.Path,
    recipe: Recipe,
    start: pathlib.Path | None,
    resume: bool,
) -> None:
    """Train as one of several workers; the first one also logs and saves the model."""
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    trainer = Trainer(recipe, Shape(vocab_size=tokenizer.get_vocab_size()))
    if start is not None:
        trainer.start_from(start)
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


def train(
    out: pathlib.Path,
    recipe: Recipe,
    *,
    start: pathlib.Path | None = None,
    resume: bool = False,
    num_workers: int = 1,
) -> None:
    """Train into a folder, leaving a usable model there every few minutes and at the end.

    With `start`, the run begins with the weights and the tokenizer of the model in that folder.
    """
    if start is not None:
        recipe = recipe.continued()
    if not resume:
        known = None if start is None else Tokenizer.from_file(str(start / "tokenizer.json"))
        save_tokenizer(known or train_tokenizer(recipe.seed), out)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_workers, f"{folder}/meeting", out, recipe, start, resume)
        spawn(work, arguments, nprocs=num_workers)  # type: ignore[no-untyped-call]


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train the demo model on generated dialogues.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the model and the training state")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--from", type=pathlib.Path, dest="start", metavar="MODEL", help="folder of a trained model to start from"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue a stopped run from its state.pt (repeat --from, if it had one)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of one thread each")
    options = parser.parse_args()
    recipe = Recipe(minutes=options.minutes, seed=options.seed)
    train(options.out, recipe, start=options.start, resume=options.resume, num_workers=options.workers)


if __name__ == "__main__":
    main()

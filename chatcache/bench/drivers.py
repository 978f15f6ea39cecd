"""Run batches through an engine or through transformers, and keep the times.

Prompts are random token ids, so no prompt finds another one's pages in the cache by accident.

`write_model` makes models with random weights in the shapes of known models, so that nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from chatcache.errors import EngineError, ModelFolderError
from chatcache.types.events import EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, PoolingParams, SamplingParams
from chatcache.types.stats import ModelInfo

if TYPE_CHECKING:
    from chatcache.engine.engine import Engine
    from chatcache.model.loading.weights import Part

Prompt = tuple[int, ...]


@dataclass(slots=True)
class RunTimes:
    """Times of one batch from submission to end.

    `first_token_s`: one time per request, from submission. `decode_s`: the steps after all prompts were computed;
    `num_decoded`: the tokens of those steps.
    """

    total_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    num_decoded: int = 0
    num_output_tokens: int = 0
    peak_pages: int = 0

    @property
    def prefill_s(self) -> float:
        """Seconds until the last prompt was computed."""
        return max(self.first_token_s)

    @property
    def step_s(self) -> float:
        """Median seconds of a decode step."""
        return float(np.median(self.decode_s))

    @property
    def decode_tokens_per_s(self) -> float:
        return self.num_decoded / sum(self.decode_s)


@dataclass(slots=True)
class MixedTimes:
    """Seconds between two tokens of a stream, without and with long prompts, and until first tokens."""

    gap_alone_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    question_s: list[float] = field(default_factory=list)
    long_prompt_s: list[float] = field(default_factory=list)


class Driver(Protocol):
    """Interface of an engine in a benchmark: make new prompts, run a batch to its end."""

    @property
    def model_info(self) -> ModelInfo: ...

    def prompt(self, num_tokens: int) -> Prompt:
        """Return a prompt that was not used before."""
        ...

    def run(self, prompts: list[Prompt], params: Params) -> RunTimes:
        """Run one batch to its end."""
        ...

    def embed_s(self, prompts: list[Prompt]) -> float:
        """Embed one batch by last-token pooling; return the seconds."""
        ...


class EngineDriver:
    """Runs batches through an idle engine."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.model_info: ModelInfo = engine.model_info
        self._random = np.random.default_rng(seed)
        self._numbers = itertools.count()

    def prompt(self, num_tokens: int) -> Prompt:
        """Return a prompt that was not used before."""
        return tuple(self._random.integers(0, self.model_info.vocab_size, num_tokens).tolist())

    def run(self, prompts: list[Prompt], params: Params) -> RunTimes:
        """Submit all prompts at once and step to the end.

        Raises: EngineError if a request failed.
        """
        run = RunTimes()
        start = time.perf_counter()
        waiting = set(self.submit(prompts, params))
        while self.engine.has_work():
            decoding, begin = not waiting, time.perf_counter()
            events = self.step()
            now = time.perf_counter()
            if decoding:
                run.decode_s.append(now - begin)
                run.num_decoded += sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
            run.peak_pages = max(run.peak_pages, self.engine.health().num_pages_in_use)
            for event in events:
                if isinstance(event, Started):
                    waiting.discard(event.request_id)
                    run.first_token_s.append(now - start)
                    run.num_cached.append(event.num_cached_tokens)
                elif isinstance(event, Finished):
                    run.num_output_tokens += event.num_output_tokens
        run.total_s = time.perf_counter() - start
        return run

    def embed_s(self, prompts: list[Prompt]) -> float:
        """Embed all prompts as requests that arrive at once; return the seconds.

        Raises: EngineError if a request failed.
        """
        start = time.perf_counter()
        for prompt in prompts:
            name = str(next(self._numbers))
            self.engine.add(GenerateRequest(request_id=name, prompt=prompt, pooling=PoolingParams()))
        while self.engine.has_work():
            self.step()
        return time.perf_counter() - start

    def submit(self, prompts: Sequence[Prompt], params: Params) -> list[str]:
        """Submit one request for each prompt and return their ids."""
        requests = [
            GenerateRequest(request_id=f"bench-{next(self._numbers)}", prompt=prompt, params=params)
            for prompt in prompts
        ]
        for request in requests:
            self.engine.add(request)
        return [request.request_id for request in requests]

    def step(self) -> Sequence[EngineEvent]:
        """Run one step.

        Raises: EngineError if a request failed.
        """
        events = self.engine.step()
        for event in events:
            if isinstance(event, Failed):
                raise EngineError(event.message, code=event.code)
        return events

    def start_decoding(self, prompts: Sequence[Prompt], params: Params) -> list[str]:
        """Submit the prompts and step until all of them are computed; return the request ids."""
        request_ids = self.submit(prompts, params)
        num_waiting = len(prompts)
        while num_waiting:
            num_waiting -= sum(isinstance(event, Started) for event in self.step())
        self.step()
        return request_ids

    def run_mixed(
        self, num_streams: int, stream_tokens: int, prompt_tokens: int, question_tokens: int, repeats: int
    ) -> MixedTimes:
        """Time running streams while a long prompt, and a short question one step later, arrive again and again."""
        times, greedy = MixedTimes(), SamplingParams(temperature=0.0, ignore_eos=True)
        streams = self.start_decoding([self.prompt(stream_tokens) for _ in range(num_streams)], greedy)
        for _ in range(8):
            self._timed_step(streams, times.gap_alone_s)
        for _ in range(repeats):
            first = msgspec.structs.replace(greedy, max_tokens=1)
            self._timed_requests(streams, [self.prompt(prompt_tokens), self.prompt(question_tokens)], first, times)
        self.abort(streams)
        return times

    def _timed_requests(
        self, streams: Collection[str], prompts: list[Prompt], params: Params, times: MixedTimes
    ) -> None:
        """Submit a long prompt, and a question one step later; step until both have their first token."""
        names: list[str] = []
        submitted_s: list[float] = []
        started_s: dict[str, float] = {}
        while len(started_s) < 2:
            if len(names) < 2:
                names += self.submit([prompts[len(names)]], params)
                submitted_s.append(time.perf_counter())
            for request_id in self._timed_step(streams, times.gap_s):
                started_s[request_id] = time.perf_counter()
        for name, start_s, target in zip(names, submitted_s, (times.long_prompt_s, times.question_s), strict=True):
            target.append(started_s[name] - start_s)

    def _timed_step(self, streams: Collection[str], gaps_s: list[float]) -> set[str]:
        """Run a step, record its seconds for each stream, and return the requests that started in it."""
        start = time.perf_counter()
        events = self.step()
        gaps_s += [time.perf_counter() - start] * sum(
            isinstance(event, Tokens) and event.request_id in streams for event in events
        )
        return {event.request_id for event in events if isinstance(event, Started)}

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel the requests and step until the engine is idle."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        while self.engine.has_work():
            self.step()

    def step_times_s(self, prompts: Sequence[Prompt], params: Params) -> list[float]:
        """Return the seconds of steps in which all branches decode, then cancel the requests."""
        request_ids = self.start_decoding(prompts, params)
        times, before = [], time.perf_counter()
        for _ in range(max((params.max_tokens or 1) - 4, 1)):
            self.step()
            times.append((now := time.perf_counter()) - before)
            before = now
        self.abort(request_ids)
        return times


class TransformersDriver:
    """Runs batches through transformers' `generate`.

    It has no pages (`peak_pages` stays 0), caches nothing between calls, and pads shorter prompts on the left.
    """

    def __init__(self, folder: Path, model_info: ModelInfo, seed: int = 1) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()

        self.model_info = model_info
        dtype = getattr(torch, model_info.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model.to(model_info.device).eval()
        self._random = np.random.default_rng(seed)

    def prompt(self, num_tokens: int) -> Prompt:
        """Return a prompt that was not used before."""
        return tuple(self._random.integers(0, self.model_info.vocab_size, num_tokens).tolist())

    def run(self, prompts: list[Prompt], params: Params) -> RunTimes:
        """Generate for all prompts as one batch."""
        run, marks = RunTimes(), []
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        device = self.model_info.device
        ids = torch.tensor([(0,) * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)], device=device)
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=device)

        def mark(ids: torch.Tensor, scores: object, **rest: object) -> torch.Tensor:
            if ids.device.type == "cuda":
                torch.cuda.synchronize(ids.device)
            marks.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                stopping_criteria=[mark],
                pad_token_id=0,
                eos_token_id=None,
                **_generate_options(params),
            )
        run.total_s = time.perf_counter() - start
        num_steps, num_rows = out.shape[1] - longest, out.shape[0]
        run.first_token_s = [marks[0] - start] * len(prompts)
        run.num_cached = [0] * len(prompts)
        run.decode_s = np.diff(marks).tolist()
        run.num_decoded, run.num_output_tokens = num_rows * (num_steps - 1), num_rows * num_steps
        return run

    def embed_s(self, prompts: list[Prompt]) -> float:
        """Run prompts of equal length through the base model as one batch; return the seconds."""
        start = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor(prompts, device=self.model_info.device)
            states = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -1].float()
            torch.nn.functional.normalize(states, dim=-1).cpu()
        return time.perf_counter() - start


def _generate_options(params: Params) -> dict[str, Any]:
    count = params.max_tokens
    length = {"max_new_tokens": count, "min_new_tokens": count}
    if isinstance(params, BeamSearchParams):
        width = params.beam_width
        return {**length, "num_beams": width, "num_return_sequences": width, "do_sample": False}
    if params.temperature == 0.0:
        return {**length, "do_sample": False}
    return {**length, "do_sample": True, "top_k": 0, "num_return_sequences": params.n}


STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama or Qwen3 model."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    tied: bool
    rope_theta: float
    qk_norm: bool = False


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, 512, 2048, True, 10_000.0),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49_152, 8192, True, 100_000.0),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936, 40_960, True, 1_000_000.0, qk_norm=True),
    "llama3-8b": Shape(4096, 14_336, 32, 32, 8, 128, 128_256, 8192, False, 500_000.0),
}

TRANSFORMERS_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "vocab_size": 248_320, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "qwen3-moe-1b": {
        "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "intermediate_size": 512, "norm_topk_prob": True, "vocab_size": 49_152,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "vocab_size": 262_144, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Configs of models that `transformers` builds: a hybrid model with 6 attention layers of 24, one with experts, and one
with windows in 22 layers of 26."""


def write_named_model(name: str, folder: Path) -> None:
    """Write a bfloat16 model with random weights, of a name in `SHAPES` or `TRANSFORMERS_SHAPES`; no tokenizer."""
    if name in SHAPES:
        write_model(SHAPES[name], folder)
    else:
        write_transformers_model(TRANSFORMERS_SHAPES[name], folder)


def write_transformers_model(config: Mapping[str, Any], folder: Path, *, seed: int = 0, device: str = "cpu") -> None:
    """Write a model of a transformers config with the random weights that transformers starts a training with.

    `device`: draws the weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoConfig.for_model(**config, bos_token_id=0, eos_token_id=0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).save_pretrained(folder)


def write_model(shape: Shape, folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
    """Write `config.json` and `model.safetensors` with N(0, 0.02) weights; no tokenizer."""
    write_config(shape, folder, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size, dtype=dtype)
        if len(size) == 1
        else torch.empty(size, dtype=dtype).normal_(0.0, STD, generator=generator)
        for name, size in _tensor_shapes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_config(shape: Shape, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write only `config.json`, for use with `RandomWeights`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape, dtype), indent=2), encoding="utf-8")


class RandomWeights:
    """Random weights drawn on the device when they are requested: 8 B parameters take seconds.

    `std`: standard deviation of the matrices. Implements `model.weights.WeightSource`. The same seed draws the same
    weights on the same kind of device, in any order of requests.
    """

    def __init__(
        self, shape: Shape, device: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, std: float = STD
    ) -> None:
        self._shape, self._device, self._dtype, self._seed, self._std = shape, device, dtype, seed, std

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return _tensor_shapes(self._shape)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(size) for size in self._sizes.values())

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Draw one tensor, and return it or a part of it.

        Raises: ModelFolderError for a tensor that is not part of this shape of model.
        """
        if self._sizes.get(name) != shape:
            raise ModelFolderError(f"tensor {name}: random weights have shape {self._sizes.get(name)}, not {shape}")
        if len(shape) == 1:
            ones = torch.ones(shape, dtype=self._dtype, device=self._device)
            return ones if part is None else part(ones)
        own = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:7], "little")
        generator = torch.Generator(self._device).manual_seed(own)
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        whole.normal_(0.0, self._std, generator=generator)
        return whole if part is None else part(whole)

    def digest(self) -> str:
        """Return a hex digest of everything that determines the weights."""
        facts = (self._shape, self._device, self._dtype, self._seed, self._std)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _config(shape: Shape, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the checkpoint, by its transformers name."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        sizes |= {
            prefix + "input_layernorm.weight": (shape.hidden,),
            prefix + "self_attn.q_proj.weight": (queries, shape.hidden),
            prefix + "self_attn.k_proj.weight": (keys, shape.hidden),
            prefix + "self_attn.v_proj.weight": (keys, shape.hidden),
            prefix + "self_attn.o_proj.weight": (shape.hidden, queries),
            prefix + "post_attention_layernorm.weight": (shape.hidden,),
            prefix + "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
        }
        if shape.qk_norm:
            sizes |= {
                prefix + "self_attn.q_norm.weight": (shape.head_dim,),
                prefix + "self_attn.k_norm.weight": (shape.head_dim,),
            }
    sizes["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab_size, shape.hidden)
    return sizes

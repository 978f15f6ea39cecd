"""The demo model: its size, and its scores on small held-out samples."""

import json
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
import transformers
from safetensors import safe_open

from chatcache.demo_model import model_path
from chatcache.demo_model.training import evaluate
from chatcache.demo_model.training.evaluate import Case, Model, measure

MAX_PARAMETERS = 5_000_000
MAX_BYTES = 10 * 1024 * 1024


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """Load the model with one thread, which is fastest for so small a model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Model(model_path())
    torch.set_num_threads(threads)


def test_the_model_is_small_enough_for_git() -> None:
    assert sum(file.stat().st_size for file in model_path().iterdir()) <= MAX_BYTES
    with safe_open(model_path() / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118  (not a dict)
    assert sum(tensor.numel() for tensor in tensors) <= MAX_PARAMETERS
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


def test_it_is_a_plain_llama_that_loads_completely() -> None:
    network, report = transformers.LlamaForCausalLM.from_pretrained(model_path(), output_loading_info=True)
    assert not any(report.values())
    assert network.config.max_position_embeddings == 2048
    assert network.config.tie_word_embeddings


def test_the_model_stops_at_the_end_of_turn(model: Model) -> None:
    generation = json.loads((model_path() / "generation_config.json").read_text())
    assert generation["eos_token_id"] == model.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("make", "num_cases", "temperature", "at_least"),
    [
        pytest.param(evaluate.recall, 40, 0.0, 0.95, id="name recall"),
        pytest.param(evaluate.two_digit_sum, 40, 0.0, 0.95, id="sums"),
        pytest.param(evaluate.one_digit_sum, 60, 0.0, 0.97, id="one-digit sums"),
        pytest.param(evaluate.ends, 40, 0.0, 0.97, id="ends, greedy"),
        pytest.param(evaluate.ends, 40, 0.8, 0.97, id="ends, sampled"),
        pytest.param(evaluate.recall_long, 12, 0.0, 0.8, id="name recall behind a long system prompt"),
    ],
)
@pytest.mark.slow
def test_held_out_figures(
    model: Model, make: Callable[[Random], Case], num_cases: int, temperature: float, at_least: float
) -> None:
    share, wrong = measure(model, make, num_cases, temperature=temperature)
    assert share >= at_least, wrong


def test_it_says_what_it_is(model: Model) -> None:
    [reply] = model.replies([model.prompt([{"role": "user", "content": "Who are you?"}])])
    assert "demonstration model" in reply.text
    assert reply.ended


@pytest.mark.slow
def test_stories_differ_between_samples(model: Model) -> None:
    prompt = model.prompt([{"role": "user", "content": "Tell me a story about a dragon"}])
    torch.manual_seed(0)
    stories = [reply.text for reply in model.replies([prompt] * 4, temperature=0.8)]
    assert len(set(stories)) == 4
    assert all("dragon" in story for story in stories)

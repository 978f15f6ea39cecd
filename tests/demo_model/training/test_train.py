"""The training script: the network of `transformers`, the schedule, a falling loss."""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed
import transformers

from chatcache.demo_model.training.corpus import IGNORED
from chatcache.demo_model.training.train import Llama, Recipe, Shape, Trainer, collate, export, lr_factor

TINY = Shape(vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, head_dim=16, max_positions=64)


@pytest.fixture
def alone(tmp_path: pathlib.Path) -> Iterator[None]:
    """Be the only worker, without a compiler."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.distributed.destroy_process_group()


def test_exported_weights_mean_the_same_to_transformers(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    ours = Llama(TINY).bfloat16()
    export(ours.state_dict(), TINY, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).float()
    tokens, targets = torch.randint(0, TINY.vocab_size, (2, 3, 40))
    expected = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    # the rotation tables are bf16 in training, as they are at inference
    torch.testing.assert_close(ours.float()(tokens, targets), expected, atol=2e-3, rtol=0)


def test_the_learning_rate_warms_up_holds_and_decays() -> None:
    recipe = dataclasses.replace(Recipe(), warmup_share=0.1, decay_share=0.4)
    shares = [lr_factor(progress, recipe) for progress in (0.0, 0.05, 0.1, 0.5, 0.6, 0.8, 1.0)]
    assert shares == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0])


def test_rows_are_padded_to_one_rectangle() -> None:
    rows = [(np.arange(count), np.arange(count) + 1) for count in (3, 40)]
    tokens, targets = collate(rows)
    assert tokens.shape == targets.shape == (2, 64)
    assert tokens[0, :4].tolist() == [0, 1, 2, 0]
    assert targets[0, :4].tolist() == [1, 2, 3, IGNORED]


@pytest.mark.usefixtures("alone")
@pytest.mark.slow
def test_the_loss_falls_and_a_saved_run_goes_on(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(2)
    recipe = dataclasses.replace(Recipe(), muon_lr=0.02, adam_lr=0.02)
    trainer = Trainer(recipe, TINY)
    tokens = torch.arange(32).repeat(4, 1)
    losses = [trainer.step(tokens, tokens + 1, 0.5)[0] for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    trainer.save(tmp_path / "state.pt", spent_s=12.5)
    other = Trainer(recipe, TINY)
    assert other.load(tmp_path / "state.pt") == 12.5
    assert (other.num_steps, other.num_tokens) == (30, 30 * 128)
    assert other.step(tokens, tokens + 1, 0.5)[0] == pytest.approx(trainer.step(tokens, tokens + 1, 0.5)[0])


@pytest.mark.usefixtures("alone")
@pytest.mark.slow
def test_a_run_starts_from_exported_weights(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    export(Llama(TINY).state_dict(), TINY, tmp_path)
    trainer = Trainer(Recipe(), TINY)
    trainer.start_from(tmp_path)
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for weights in (trainer.network.state_dict(), trainer.average):
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_a_continued_run_has_lower_rates_and_functions_from_the_start() -> None:
    recipe = Recipe().continued()
    assert recipe.muon_lr < Recipe().muon_lr and recipe.adam_lr < Recipe().adam_lr
    assert recipe.long_from < 0 < recipe.tool_share

"""Sampling against its definition, on a model small enough to ask."""

from collections import Counter

import pytest
import torch

from stages.data.special_tokens import BOT_ID, EOT_ID
from stages.evaluation.sampling import continue_tokens
from stages.model.llama import Llama
from tests.model.small_llama import VOCAB, small_llama, small_params

PROMPT = [BOT_ID, 7, 40]


def sample(model: Llama, prompt: list[int] = PROMPT, **changes: object) -> list[int]:
    settings: dict[str, object] = {
        "max_new_tokens": 20,
        "temperature": 0.9,
        "top_k": VOCAB,
        "window_tokens": 16,
        "seed": 3,
    }
    return continue_tokens(model, prompt, **(settings | changes))  # type: ignore[arg-type]


@torch.no_grad()
def next_logits(model: Llama, ids: list[int]) -> torch.Tensor:
    return model.lm_head(model(torch.tensor([ids]))[0, -1])


def greedy(model: Llama, prompt: list[int], window: int, count: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        token = int(next_logits(model, ids[-window:]).argmax())
        if token == EOT_ID:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("window", [16, 4, 1])
@pytest.mark.parametrize("seed", range(3))
def test_temperature_zero_takes_the_likeliest_within_the_window(window: int, seed: int) -> None:
    model = small_llama(small_params(), seed=seed)
    found = sample(model, temperature=0.0, window_tokens=window, max_new_tokens=25)
    assert found == greedy(model, PROMPT, window, 25)


def test_the_window_does_matter() -> None:
    model = small_llama(small_params())
    texts = {tuple(greedy(model, PROMPT, window, 25)) for window in (16, 4, 1)}
    assert len(texts) == 3, "or the test above could not tell"


def test_top_1_is_the_likeliest() -> None:
    model = small_llama(small_params())
    assert sample(model, top_k=1) == greedy(model, PROMPT, 16, 20)


def test_the_seed_decides_and_nothing_else() -> None:
    model = small_llama(small_params())
    torch.manual_seed(1)
    first = sample(model)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert sample(model) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert sample(model, seed=4) != first


def certain_of(token: int) -> Llama:
    """A model whose likeliest next token is always this one, by far."""
    model = small_llama(small_params(num_hidden_layers=1))
    with torch.no_grad():
        # The final norm's output has a fixed length, so a bias is made of one channel held high.
        model.embed_tokens.weight[:, 0] = 50.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[token, 0] = 100.0
        model.norm.weight[0] = 1.0
    return model


def test_stops_at_the_end_of_text_and_leaves_it_out() -> None:
    assert sample(certain_of(EOT_ID)) == []
    assert sample(certain_of(EOT_ID), temperature=0.0) == []
    assert sample(certain_of(30), max_new_tokens=5) == [30] * 5


def test_tokens_are_drawn_in_proportion_among_the_top_k() -> None:
    model = small_llama(small_params(num_hidden_layers=1))
    logits = next_logits(model, PROMPT)
    top = logits.topk(3)
    assert EOT_ID not in top.indices.tolist()
    expected = (top.values / 0.05).softmax(0)  # about 0.65, 0.18, 0.17; at temperature 1 about equal
    drawn = Counter(
        sample(model, max_new_tokens=1, temperature=0.05, top_k=3, seed=seed)[0] for seed in range(400)
    )
    assert set(drawn) == set(top.indices.tolist())
    for token, probability in zip(top.indices.tolist(), expected.tolist(), strict=True):
        # Four standard deviations of a binomial count.
        slack = 4 * (400 * probability * (1 - probability)) ** 0.5
        assert abs(drawn[token] - 400 * probability) < slack


def test_a_prompt_longer_than_the_window() -> None:
    model = small_llama(small_params())
    prompt = [BOT_ID, *range(3, 60)]
    assert sample(model, prompt, temperature=0.0) == greedy(model, prompt, 16, 20)

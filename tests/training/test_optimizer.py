"""Which parameters decay, and whose learning rate it is."""

import pytest
import torch

from stages.model.llama import Llama
from stages.training.optimizer import make_optimizer
from tests.training.small_run import VOCAB, small_params


@pytest.mark.parametrize("tied", [False, True])
def test_only_matrices_decay_and_every_parameter_is_stepped(tied: bool) -> None:
    params = small_params(weight_decay=0.3, model={"tie_word_embeddings": tied})
    model = Llama(params.model, VOCAB)
    optimizer = make_optimizer(model, params.training, torch.tensor(0.01), params.variants["v"])
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(p): 0.3 if p.dim() == 2 else 0.0 for p in model.parameters()}
    norms = [name for name, p in model.named_parameters() if decay[id(p)] == 0]
    assert len(norms) == 2 * params.model.num_hidden_layers + 1
    assert all("norm" in name for name in norms)


def test_every_setting_arrives() -> None:
    params = small_params(adam_beta1=0.7, adam_beta2=0.77, adam_epsilon=1e-4)
    optimizer = make_optimizer(
        Llama(params.model, VOCAB), params.training, torch.tensor(0.01), params.variants["v"]
    )
    for group in optimizer.param_groups:
        assert group["betas"] == (0.7, 0.77)
        assert group["eps"] == 1e-4
        assert group["fused"] is True, "foreach needs a parameter-sized temporary"


def test_all_groups_hold_the_schedules_tensor() -> None:
    rate = torch.tensor(0.0)
    params = small_params(weight_decay=0.0)
    model = Llama(params.model, VOCAB)
    optimizer = make_optimizer(model, params.training, rate, params.variants["v"])
    assert all(group["lr"] is rate for group in optimizer.param_groups)

    def moved() -> float:
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        changes = [(p - b).abs().max() for p, b in zip(model.parameters(), before, strict=True)]
        return float(torch.stack(changes).max().detach())

    assert moved() == 0
    rate.fill_(0.25)
    assert moved() == pytest.approx(0.25, rel=1e-3)

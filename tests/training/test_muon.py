"""Muon against torch.optim.Muon on the matrices apart, and AdamW against torch's on the rest."""

from pathlib import Path

import pytest
import torch

from stages.model.hugging_face import to_hugging_face
from stages.model.llama import Llama
from stages.training.muon import MuonWithAdamW, orthogonalize
from stages.training.optimizer import make_optimizer
from tests.training.optimizer_runs import optimizer_params, optimizer_run
from tests.training.small_run import VOCAB, bit_equal, distance, weights

MUON = {"optimizer": "muon"}


def is_muons(name: str) -> bool:
    return name.endswith("proj.weight")


def test_equals_torchs_on_the_separate_matrices(tmp_path: Path) -> None:
    """Through the whole step: q, k, v, gate and up are matrices of their own in the reference."""
    run = optimizer_run(tmp_path, MUON, weight_decay=0.3, max_grad_norm=None)
    model, training = run.params.model, run.params.training
    start = to_hugging_face(weights(run.state), model)
    reference = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    rate = run.state.schedule.learning_rate.clone()
    muon = torch.optim.Muon(
        [p for name, p in reference.items() if is_muons(name)],
        lr=rate,  # type: ignore[arg-type]
        weight_decay=training.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [(name, p) for name, p in reference.items() if not is_muons(name)]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for _, p in rest if p.dim() == 2], "weight_decay": training.weight_decay},
            {"params": [p for _, p in rest if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
    for _ in range(5):
        rate.copy_(run.state.schedule.learning_rate)
        for name, gradient in run.gradients().items():
            reference[name].grad = gradient.clone()
        muon.step()
        adamw.step()
    found = to_hugging_face(weights(run.state), model)
    expected = {name: p.detach() for name, p in reference.items()}
    assert len(muon.param_groups[0]["params"]) == 7 * model.num_hidden_layers
    assert distance(found, start) > 0.05
    assert distance(found, expected) < 1e-6
    assert (
        distance(
            {n: t for n, t in found.items() if not is_muons(n)},
            {n: t for n, t in expected.items() if not is_muons(n)},
        )
        == 0
    )


def test_a_fused_matrix_taken_as_one_is_something_else() -> None:
    """Why the pieces go apart."""
    matrix = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    whole = orthogonalize(matrix)
    apart = torch.cat([orthogonalize(piece) for piece in matrix.split([64, 16, 16])])
    assert (whole - apart).norm() / whole.norm() > 0.2


@pytest.mark.parametrize("shape", [(64, 64), (16, 96), (96, 16)], ids=str)
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrix)
    assert (found.dtype, found.shape) == (torch.bfloat16, matrix.shape)
    values = torch.linalg.svdvals(found.float())
    well_conditioned = torch.linalg.svdvals(matrix) > 0.1 * torch.linalg.matrix_norm(matrix, 2)
    assert 0.6 < float(values[well_conditioned].min()) <= float(values.max()) < 1.25
    assert not orthogonalize(torch.zeros(shape)).any()


def test_the_update_is_as_large_as_adamws() -> None:
    """RMS 0.2 of the learning rate, whatever the shape: so the rates can be shared."""
    params = optimizer_params(MUON, weight_decay=0.0)
    model = Llama(params.model, VOCAB)
    model.initialise(0)
    rate = torch.tensor(0.01)
    optimizer = make_optimizer(model, params.training, rate, params.variants["v"])
    assert isinstance(optimizer, MuonWithAdamW)
    before = to_hugging_face({n: p.detach().clone() for n, p in model.named_parameters()}, params.model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, tensor in to_hugging_face(dict(model.named_parameters()), params.model).items():
        if is_muons(name):
            rms = float((tensor - before[name]).square().mean().sqrt().detach())
            assert 0.1 * 0.01 < rms < 0.25 * 0.01, name


@pytest.mark.parametrize("tied", [False, True])
def test_who_steps_what_and_what_is_kept(tied: bool) -> None:
    params = optimizer_params(MUON, model={"tie_word_embeddings": tied}, weight_decay=0.3)
    model = Llama(params.model, VOCAB)
    rate = torch.tensor(0.01)
    optimizer = make_optimizer(model, params.training, rate, params.variants["v"])
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(p): 0.3 if p.dim() == 2 else 0.0 for p in model.parameters()}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        keys = {"momentum_buffer"} if is_muons(name) else {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[parameter].keys() == keys, name
        kept = sum(t.nbytes for key, t in optimizer.state[parameter].items() if key != "step")
        assert kept == (4 if is_muons(name) else 8) * parameter.numel()


def test_under_the_scaler(tmp_path: Path) -> None:
    """An overflow leaves weights, momentum and AdamW's counts; a good step is that of fp32."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    run = optimizer_run(tmp_path, MUON | {"precision": "amp_fp16", "micro_batch_size": 4}, scaler)
    before = weights(run.state)
    outcome = run.step()
    assert outcome.skipped is not None and bool(outcome.skipped)
    assert run.state.scaler.get_scale() == 2.0**29
    assert bit_equal(weights(run.state), before)
    for state in run.state.optimizer.state.values():
        assert all(not tensor.any() for tensor in state.values())
    while bool(outcome.skipped):
        outcome = run.step()
        assert outcome.skipped is not None
    exact = optimizer_run(tmp_path, MUON)
    exact.state.step = run.state.step - 1  # the same batch
    exact.step()
    moved, expected = (
        {name: tensor - before[name] for name, tensor in weights(r.state).items()} for r in (run, exact)
    )
    assert distance(moved, expected) < 0.1


def test_training_learns(tmp_path: Path) -> None:
    run = optimizer_run(tmp_path, MUON)
    losses = [float(run.step().loss) for _ in range(20)]
    assert losses[-1] < 0.75 * losses[0]

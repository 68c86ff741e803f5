"""The training loop of the tutorial, written by us from its description.

A DataLoader, dense masks for every batch, all logits upcast to fp32, AdamW that goes parameter by parameter,
and the loss read for the progress line after every step. Run by benchmarks/peers.py.
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contenders.job import Job, read_job
from benchmarks.contenders.measured import Measured, sequences, use_float32_matmul_precision, weights
from benchmarks.contenders.tutorial_llama import PretrainingModel, dense_mask

IGNORE_INDEX = -100
PAD_ID = 2
"""What no token of the data is: there is no padding in them, and the masks are built all the same."""


def main() -> None:
    job = read_job()
    switches = ["AdamW(fused=True)", "is_causal=True", "no loss.item()"] if job.switched else []
    if job.switched:
        switches += use_float32_matmul_precision(job)
    measured = Measured(job, ["numpy"], switches)
    measured.before_model()
    train(job, measured)


def train(job: Job, measured: Measured) -> None:
    device = torch.device(job.device)
    if job.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    model = PretrainingModel(job.model, job.vocab_size, causal_switch=job.switched)
    model.load_state_dict(weights(job))
    model.to(device)
    model.model.recompute = job.recompute
    # What runs is the compiled form; parameters are those of the model.
    run = torch.compile(model) if job.compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=job.learning_rate,
        betas=(job.adam_beta1, job.adam_beta2),
        eps=job.adam_epsilon,
        weight_decay=job.weight_decay,
        foreach=False,
        fused=job.switched,
    )
    loader = DataLoader(TensorDataset(sequences(job)), batch_size=job.micro_batch_size)
    model.train()
    measured.first_step()
    for number, (input_ids_BS,) in enumerate(loader, start=1):
        input_ids_BS = input_ids_BS.to(device)
        targets_BS = F.pad(input_ids_BS[:, 1:], (0, 1), value=IGNORE_INDEX)
        mask = dense_mask(input_ids_BS, PAD_ID)
        amp = torch.autocast(device.type, torch.bfloat16) if job.precision == "amp_bf16" else None
        with amp or contextlib.nullcontext():
            logits_BSV = run(input_ids_BS, mask)
            loss = F.cross_entropy(
                logits_BSV.float().view(-1, job.vocab_size), targets_BS.view(-1), ignore_index=IGNORE_INDEX
            )
            loss = loss / job.accumulation_steps
        loss.backward()
        measured.add_loss(loss)
        if number % job.accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if not job.switched:
                loss.item()  # for the progress line
            measured.step_done()
    measured.finish(sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main()

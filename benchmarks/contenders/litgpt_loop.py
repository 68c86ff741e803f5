"""litgpt: its `GPT` in the `fit` of its own pretraining. Run by benchmarks/peers.py.

`litgpt.pretrain.main` sets up exactly so: Fabric, model, optimizer, `fit`. It always compiles; here it does
where the technique says so. litgpt recomputes activations under FSDP only, so the same wrapper is put around
its blocks by torch's own function.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.model import GPT, Block
from litgpt.pretrain import fit
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import instantiate_torch_optimizer, num_parameters
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.contenders.job import Job, read_job
from benchmarks.contenders.measured import Measured, sequences, use_float32_matmul_precision, weights

IGNORE_INDEX = -100
NEVER = 10**9


class MeasuredFabric(L.Fabric):
    """Keeps the losses, which `fit` itself reads every `log_interval` only."""

    measured: Measured

    def backward(self, tensor: Tensor, *arguments: Any, **keywords: Any) -> None:
        self.measured.add_loss(tensor)
        super().backward(tensor, *arguments, **keywords)


class Clock:
    """A DataLoader that tells when steps begin and end: `fit` asks for a batch before each micro-batch."""

    def __init__(self, loader: Any, measured: Measured):
        self._loader = loader
        self._measured = measured

    def __iter__(self) -> Iterator[Tensor]:
        job = self._measured.job
        self._measured.first_step()
        for number, batch in enumerate(self._loader):
            if number and number % job.accumulation_steps == 0:
                self._measured.step_done()
            yield batch
        self._measured.step_done()
        # `fit` asks for one more before it sees that the tokens are used up.
        yield from self._loader


def main() -> None:
    job = read_job()
    words = []
    if job.switched:
        words = ["AdamW(fused=True)", "log_interval beyond the run", *use_float32_matmul_precision(job)]
    if job.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    measured = Measured(job, ["litgpt", "lightning"], words)
    fabric = MeasuredFabric(
        devices=1,
        accelerator=job.device,
        precision="bf16-mixed" if job.precision == "amp_bf16" else "32-true",
    )
    fabric.measured = measured
    fabric.launch()
    fabric.seed_everything(job.seed)
    measured.before_model()
    model = make_model(job, fabric)
    parameters = num_parameters(model)
    if job.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if job.compiled:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(make_optimizer(job, fabric, model))
    rows = F.pad(sequences(job), (0, 1), value=IGNORE_INDEX)  # the target of a row's last position
    train, check = fabric.setup_dataloaders(
        DataLoader(rows, batch_size=job.micro_batch_size),
        DataLoader(rows[: job.micro_batch_size], batch_size=job.micro_batch_size),
    )
    fit(
        fabric=fabric,
        devices=1,
        state={"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0},
        train_dataloader=Clock(train, measured),
        val_dataloader=check,
        out_dir=Path(job.scratch),
        tokenizer_dir=None,
        train=TrainArgs(
            save_interval=None,
            log_interval=NEVER if job.switched else 1,
            global_batch_size=job.global_batch_size,
            micro_batch_size=job.micro_batch_size,
            lr_warmup_steps=0,
            max_tokens=job.total_steps * job.tokens_per_step,
            max_norm=job.max_grad_norm,
            min_lr=job.learning_rate,
        ),
        eval=EvalArgs(interval=NEVER, initial_validation=False, final_validation=False),
    )
    measured.finish(parameters)


def make_model(job: Job, fabric: L.Fabric) -> GPT:
    """The model with the shared initial weights."""
    shape = job.model
    config = Config(
        name="benchmark",
        block_size=job.sequence_length,
        n_layer=shape["num_hidden_layers"],
        n_embd=shape["hidden_size"],
        n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_key_value_heads"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=job.vocab_size,
        padded_vocab_size=job.vocab_size,
        norm_class_name="RMSNorm",
        norm_eps=shape["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        parallel_residual=False,
        rotary_percentage=1.0,
        rope_base=int(shape["rope_theta"]),
        bias=False,
    )
    with fabric.init_module(empty_init=True):
        model = GPT(config)
    state: dict[str, Tensor] = {}
    copy_weights_hf_llama(config, defaultdict(dict), state, weights(job))
    model.load_state_dict(state)
    return model


def make_optimizer(job: Job, fabric: L.Fabric, model: torch.nn.Module) -> torch.optim.Optimizer:
    """As `litgpt.pretrain.main` makes it: fused on a GPU; switched on, on a CPU too."""
    settings = {
        "lr": job.learning_rate,
        "betas": [job.adam_beta1, job.adam_beta2],
        "eps": job.adam_epsilon,
        "weight_decay": job.weight_decay,
    }
    return instantiate_torch_optimizer(
        {"class_path": "torch.optim.AdamW", "init_args": settings},
        model.parameters(),
        fused=fabric.device.type == "cuda" or job.switched,
    )


if __name__ == "__main__":
    main()

"""Hugging Face: `LlamaForCausalLM` in `transformers.Trainer`. Run by benchmarks/peers.py.

As it comes means the defaults of `TrainingArguments`, which are sdpa attention and the fused AdamW already.
"""

import importlib.util
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.contenders.job import Job, read_job
from benchmarks.contenders.measured import Measured, sequences, use_float32_matmul_precision, weights


class Sequences(Dataset):
    """Labels are the inputs: the model shifts them, and the last position of a row has none."""

    def __init__(self, sequences_NS: Tensor):
        self._sequences_NS = sequences_NS

    def __len__(self) -> int:
        return len(self._sequences_NS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._sequences_NS[index], "labels": self._sequences_NS[index]}


class Clock(TrainerCallback):
    """Where the steps begin and end."""

    def __init__(self, measured: Measured):
        self._measured = measured

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._measured.first_step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._measured.step_done()


class MeasuredTrainer(Trainer):
    """Keeps the losses, which Trainer itself reads every `logging_steps` only."""

    measured: Measured

    def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
        loss = super().training_step(*arguments, **keywords)
        self.measured.add_loss(loss)
        return loss


def main() -> None:
    job = read_job()
    switched = switches(job) if job.switched else {}
    words = [f"{name}={value}" for name, value in switched.items()]
    if job.switched:
        words += use_float32_matmul_precision(job)
    measured = Measured(job, ["transformers", "accelerate", "liger-kernel"], words)
    measured.before_model()
    model = make_model(job)
    trainer = MeasuredTrainer(
        model=model,
        args=training_arguments(job, switched),
        train_dataset=Sequences(sequences(job)),
        callbacks=[Clock(measured)],
    )
    trainer.measured = measured
    trainer.train()
    measured.finish(sum(parameter.numel() for parameter in model.parameters()))


def make_model(job: Job) -> LlamaForCausalLM:
    """The model with the shared initial weights."""
    shape = dict(job.model)
    theta = shape.pop("rope_theta")
    config = LlamaConfig(
        vocab_size=job.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=0,
        eos_token_id=1,
        **shape,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights(job))
    return model


def switches(job: Job) -> dict[str, Any]:
    """Arguments that make it faster or leaner and change nothing else."""
    found: dict[str, Any] = {"logging_nan_inf_filter": False, "disable_tqdm": True}
    if job.device == "cpu":
        found["dataloader_pin_memory"] = False
    elif importlib.util.find_spec("liger_kernel") is not None:
        found["use_liger_kernel"] = True
    return found


def training_arguments(job: Job, switched: dict[str, Any]) -> TrainingArguments:
    return TrainingArguments(
        output_dir=job.scratch,
        use_cpu=job.device == "cpu",
        seed=job.seed,
        max_steps=job.total_steps,
        per_device_train_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=job.accumulation_steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=job.weight_decay,
        adam_beta1=job.adam_beta1,
        adam_beta2=job.adam_beta2,
        adam_epsilon=job.adam_epsilon,
        max_grad_norm=job.max_grad_norm,
        bf16=job.precision == "amp_bf16",
        tf32=True if job.precision == "tf32" else None,
        gradient_checkpointing=job.recompute,
        torch_compile=job.compiled,
        train_sampling_strategy="sequential",
        save_strategy="no",
        **switched,
    )


if __name__ == "__main__":
    main()

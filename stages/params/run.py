"""What all variants share: the model, the training schedule, evaluation, the machine, tracking."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stages.params.section import Section, divisors, one_of


class ModelParams(Section):
    """Llama's shape, in the words of Hugging Face's `LlamaConfig`."""

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    """Fewer than the query heads is grouped-query attention (Ainslie et al. 2023)."""
    intermediate_size: PositiveInt
    """Width of the SwiGLU feed-forward."""
    max_position_embeddings: PositiveInt = 2048
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-5
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the normal distribution that weights start from."""
    tie_word_embeddings: bool = False
    """One matrix for the input embedding and the output head."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.hidden_size % self.num_attention_heads:
            yield (
                "num_attention_heads",
                f"{self.num_attention_heads} does not divide model.hidden_size {self.hidden_size}; "
                f"use {one_of([d for d in divisors(self.hidden_size) if d <= 128])}",
            )
        elif self.head_dim % 2:
            yield (
                "num_attention_heads",
                f"{self.num_attention_heads} heads make a head size of {self.head_dim}; rotary "
                "position embedding turns pairs of channels, so the head size must be even",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                "num_key_value_heads",
                f"{self.num_key_value_heads} does not divide model.num_attention_heads "
                f"{self.num_attention_heads}; use {one_of(divisors(self.num_attention_heads))}",
            )


class TrainingParams(Section):
    """The work: identical for every variant, so that their losses can be compared."""

    sequences: Literal["packed", "padded"] = "packed"
    """packed: documents one after the other, cut every sequence_length tokens, attention kept
    inside a document. padded: one document per sequence, cut or filled up with [PAD]."""
    sequence_length: Annotated[int, Field(ge=2)]
    global_batch_size: PositiveInt
    """Sequences in one optimizer step, over all micro-batches and ranks."""
    ranks: PositiveInt = 1
    """Processes that train one variant together, one for each GPU of this machine. More machines: start
    `python -m stages.train VARIANT` with torchrun, whose number of ranks then counts. No result depends on it
    but by rounding, and a run goes on with another number."""
    token_budget: PositiveInt
    """Positions to train on, rounded up to whole optimizer steps. Padding is among them: padded
    sequences see fewer tokens than this."""
    learning_rate: PositiveFloat
    """Peak, reached after the warm-up."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The cosine ends at this share of the peak."""
    warmup_steps: NonNegativeInt = 100
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.1
    """On matrices only; norms are not decayed."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global L2 norm; null does not clip."""
    max_bad_steps: NonNegativeInt = 0
    """Steps whose loss or gradients are no number that may be left out, of a whole run; one more stops
    it. amp_fp16 has max_overflows_in_a_row instead: its GradScaler makes overflows on purpose."""
    max_overflows_in_a_row: PositiveInt = 20
    """amp_fp16: steps in a row whose gradients overflow, each halving the scale, before the run stops."""
    log_every_steps: PositiveInt = 10
    """A row of the curve, a point in MLflow and, on a GPU, the one synchronisation with the host."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a whole run."""
        return -(-self.token_budget // (self.global_batch_size * self.sequence_length))

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.global_batch_size % self.ranks:
            yield (
                "ranks",
                f"{self.ranks} does not divide training.global_batch_size {self.global_batch_size}; "
                f"use {one_of(divisors(self.global_batch_size))}",
            )
        # One step to peak at and one to end on.
        if self.warmup_steps > max(self.num_steps - 2, 0):
            yield (
                "warmup_steps",
                f"{self.warmup_steps} leaves nothing of the {self.num_steps} steps that "
                f"training.token_budget {self.token_budget} makes; lower it or raise the budget",
            )


class SampleParams(Section):
    """Continuations written by the trained model, to be read by a person."""

    prompts: tuple[str, ...] = ()
    max_new_tokens: PositiveInt = 60
    temperature: NonNegativeFloat = 0.8
    """0 takes the likeliest token each time."""
    top_k: PositiveInt = 50
    """Draw among the k likeliest tokens."""


class EvaluationParams(Section):
    """How a trained model is judged; the same for every variant, always in fp32."""

    batch_size: PositiveInt = 32
    """Windows of training.sequence_length tokens in one forward pass."""
    bootstrap_samples: Annotated[int, Field(ge=100)] = 10_000
    """Resamplings of the validation documents behind the confidence interval."""
    samples: SampleParams = SampleParams()


class CheckpointParams(Section):
    """In-progress checkpoints: what a run that is killed goes on from. They change no result."""

    every_minutes: PositiveFloat | None = 5.0
    """Minutes of training between two checkpoints; null saves by steps alone. What a kill loses at most."""
    every_steps: PositiveInt | None = None
    """Optimizer steps between two checkpoints, beside `every_minutes`."""
    keep: PositiveInt = 2
    """So many of the newest stay; the one before the newest is the way out if that is damaged."""


TargetName = Literal[
    "cpu",
    "rtx_3060_12gb",
    "rtx_4070",
    "rtx_4060_ti_16gb",
    "rtx_3090",
    "rtx_4090",
    "rtx_5090",
    "rtx_a6000",
    "t4",
    "l4",
    "a10g",
    "l40s",
    "a100_40gb",
    "a100_80gb",
    "h100_80gb",
    "h200",
    "b200",
]
"""What stages/measure/targets.py knows the figures of."""


class HardwareParams(Section):
    """The machine that trains, and the one that is planned for: no plan looks at the machine it runs on."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU where there is one; a GPU whose driver is too old is an error, never a
    silent fall back to the CPU."""
    target: TargetName | None = None
    """The GPU to plan for, or cpu. Without it and memory_gib nothing is fitted: the plan is a prediction."""
    memory_gib: PositiveFloat | None = None
    """Memory to plan for, in GiB; with a target instead of all that it has."""
    memory_reserve_gib: NonNegativeFloat = 0.25
    """Left free, in GiB. What CUDA, its libraries and fragmentation take is predicted apart from it; the
    reserve is for what no prediction sees, such as another driver. A card that shows a desktop needs more:
    what nvidia-smi shows in use before training."""
    price_per_hour: PositiveFloat | None = None
    """Of one target, in any currency; the forecast then names the cost of a billion tokens in it."""
    on_out_of_memory: Literal["stop", "halve"] = "stop"
    """halve: go on from the last checkpoint with half the micro-batch and twice the accumulation; the
    results say so."""
    collective_timeout_minutes: PositiveFloat = 10.0
    """How long a rank waits for the others in one exchange before it fails: longer than the slowest
    compilation or checkpoint that another rank may be at."""
    compile_cache: str = ".work/compile-cache"
    """Folder where torch.compile keeps its kernels, so that a second run starts warm; relative to
    the DVC root."""

    @property
    def has_capacity(self) -> bool:
        """Whether there is a memory to fit into."""
        return self.memory_gib is not None or self.target not in (None, "cpu")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.target == "cpu" and self.device != "cpu":
            yield ("target", f"cpu is planned for and hardware.device is {self.device}; set device: cpu too")
        elif self.target not in (None, "cpu") and self.device == "cpu":
            yield (
                "target",
                f"{self.target} is a GPU and hardware.device is cpu; set device: cuda, or target: cpu",
            )
        if self.memory_gib is not None and self.target is None and self.device == "auto":
            yield (
                "memory_gib",
                f"{self.memory_gib:g} names no device and hardware.device is auto; what a step needs depends "
                "on whose kernels run: set hardware.device to cuda or cpu, or set hardware.target",
            )
        if self.memory_gib is not None and self.memory_reserve_gib >= self.memory_gib:
            yield (
                "memory_reserve_gib",
                f"{self.memory_reserve_gib:g} leaves nothing of hardware.memory_gib {self.memory_gib:g}; "
                "lower it",
            )


class TrackingParams(Section):
    """MLflow; the server is named by MLFLOW_TRACKING_URI, else mlflow.db at the repository's root."""

    experiment: str = "frugal"

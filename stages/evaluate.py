"""The evaluate stage: `python -m stages.evaluate VARIANT`.

Judges the trained weights on the whole validation split, in fp32 whatever they were trained in, writes
sample continuations, and gives the model the form that `transformers` loads.
"""

import argparse
import csv
import io
import json
import math
import shutil
import sys
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from tokenizers import Tokenizer

from stages.data.special_tokens import BOT, BOT_ID, EOT, EOT_ID, PAD, PAD_ID
from stages.data.token_files import TokenFileError
from stages.data.token_shards import TokenShards
from stages.data.tokenizer import TokenizerError, decode, load_tokenizer
from stages.device_lock import DeviceLockError, hold_device
from stages.evaluation.sampling import continue_tokens
from stages.evaluation.validation_loss import DocumentLosses, document_losses
from stages.interruption import run_interruptible
from stages.measure.hardware import HardwareError, select_device
from stages.measure.host_allocator import keep_freed_memory
from stages.measure.out_of_memory import failed_allocation
from stages.model.hugging_face import llama_config
from stages.model.llama import Llama
from stages.outs import out_folder, write_out
from stages.params import Params, ParamsError, load_params
from stages.tracking import append_to_run, outs_md5_tags, work_root
from stages.training.checkpoint import MODEL, CheckpointError, load_weights
from stages.training.precision import set_float32_matmul

TOKENS = Path("data/tokens")
LARGEST_NATS_PER_TOKEN = math.log(sys.float_info.max)
"""Of a larger loss the perplexity is no number. A model that knows nothing loses log(vocabulary), 11."""


class DivergedError(RuntimeError):
    """The model is not worth comparing."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.evaluate", description=__doc__)
    parser.add_argument("variant", help="a key of `variants` in params.yaml")
    variant = parser.parse_args(arguments).variant
    return run_interruptible(f"evaluate {variant}", lambda: _run(variant))


def _run(variant: str) -> int:
    try:
        params = load_params()
        params.require_variant(variant)
        with hold_device(f"evaluate {variant}", params.hardware.device):
            evaluate(params, variant)
    except (
        ParamsError,
        DeviceLockError,
        DivergedError,
        HardwareError,
        TokenFileError,
        TokenizerError,
        CheckpointError,
        OSError,
    ) as error:
        print(f"evaluate {variant}: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as error:
        failure = failed_allocation(error, select_device(params.hardware.device))
        if failure is None:
            raise
        batch_size = params.evaluation.batch_size
        print(
            f"evaluate {variant}: {failure.in_words()}; "
            f"lower evaluation.batch_size, which is {batch_size}, or free memory",
            file=sys.stderr,
        )
        return 1
    return 0


def evaluate(params: Params, variant: str) -> None:
    """Write results/evaluate/VARIANT.* and hugging_face/VARIANT/."""
    device = select_device(params.hardware.device)
    if device.type == "cpu":
        keep_freed_memory()
    set_float32_matmul("fp32", device)
    validation = TokenShards.open(TOKENS, "validation")
    tokenizer = load_tokenizer(TOKENS / "tokenizer.json")
    model_folder = Path("models") / variant
    model = Llama(params.model, params.tokenizer.vocab_size)
    load_weights(model, model_folder)
    model.to(device)

    losses = _validation_losses(model, validation, params, variant)
    if not losses.nats_per_token < LARGEST_NATS_PER_TOKEN:  # NaN is not less either
        raise DivergedError(
            f"the validation loss is {losses.nats_per_token:.4g} nats per token, so the training diverged; "
            "lower training.learning_rate or change the variant's precision"
        )
    summary = {
        "variant": variant,
        "bits_per_byte": losses.bits_per_byte,
        "perplexity": losses.perplexity,
        "loss_nats_per_token": losses.nats_per_token,
        "tokens": int(losses.tokens.sum()),
        "bytes": int(losses.bytes.sum()),
        "documents": len(losses.nats),
    }
    results = Path("results/evaluate")
    write_out(results / f"{variant}.json", json.dumps(summary, indent=2) + "\n")
    write_out(results / f"{variant}.documents.csv", _documents_csv(losses))
    samples = results / f"{variant}.samples.md"
    write_out(samples, _samples(model, tokenizer, params, variant))
    with out_folder(Path("hugging_face") / variant) as folder:
        write_hugging_face(folder, params, model_folder)
    _track(variant, model_folder, summary, samples)
    print(
        f"{variant}: {losses.bits_per_byte:.4f} bits per byte, perplexity {losses.perplexity:.2f} "
        f"on {summary['tokens']:,} validation tokens"
    )


def _validation_losses(model: Llama, validation: TokenShards, params: Params, variant: str) -> DocumentLosses:
    columns = (
        TextColumn("[bold]evaluate {task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=True),
    )
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task(variant, total=len(validation.tokens) - validation.num_documents)
        return document_losses(
            model,
            validation,
            params.training.sequence_length,
            params.evaluation.batch_size,
            lambda tokens: progress.advance(task, tokens),
        )


def write_hugging_face(folder: Path, params: Params, model_folder: Path) -> None:
    """Fill `folder` with what `AutoModelForCausalLM` and `AutoTokenizer` load."""
    ids = {"bos": BOT_ID, "eos": EOT_ID, "pad": PAD_ID}
    config = llama_config(params.model, params.tokenizer.vocab_size, ids)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOT,
        "eos_token": EOT,
        "pad_token": PAD,
        "model_max_length": params.training.sequence_length,
        "clean_up_tokenization_spaces": False,
        # The text "[BOT]" in a document is text; only the tokenizer's caller adds the token.
        "split_special_tokens": True,
    }
    generation_config = {f"{name}_token_id": token_id for name, token_id in ids.items()}
    for name, content in {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation_config,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(TOKENS / "tokenizer.json", folder / "tokenizer.json")
    shutil.copyfile(model_folder / MODEL, folder / "model.safetensors")


def _samples(model: Llama, tokenizer: Tokenizer, params: Params, variant: str) -> str:
    """Markdown: each prompt in bold, followed by what the model made of it."""
    settings = params.evaluation.samples
    lines = [f"# {variant}: samples", ""]
    for number, prompt in enumerate(settings.prompts):
        new_ids = continue_tokens(
            model,
            [BOT_ID, *tokenizer.encode(prompt, add_special_tokens=False).ids],
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            window_tokens=params.training.sequence_length,
            seed=params.seed + number,
        )
        lines += [f"> **{prompt.strip()}** {' '.join(decode(tokenizer, new_ids).split())}", ""]
    return "\n".join(lines)


def _documents_csv(losses: DocumentLosses) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("document", "tokens", "bytes", "nats"))
    rows = zip(losses.tokens.tolist(), losses.bytes.tolist(), losses.nats.tolist(), strict=True)
    writer.writerows((document, *row) for document, row in enumerate(rows))
    return text.getvalue()


def _track(variant: str, model_folder: Path, summary: dict[str, object], samples: Path) -> None:
    """Add the evaluation to the training's run; a model that DVC's cache restored has none here."""
    training = json.loads((model_folder / "training.json").read_text())
    metrics = {
        f"validation_{key}": summary[key] for key in ("bits_per_byte", "perplexity", "loss_nats_per_token")
    }
    try:
        append_to_run(
            work_root(),
            variant,
            training["fingerprint"],
            metrics=metrics,  # type: ignore[arg-type]
            tags=outs_md5_tags(f"train@{variant}"),
            artifacts=[samples],
        )
    except OSError as error:
        print(f"tracking: the evaluation of {variant} is not in MLflow: {error}", file=sys.stderr)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())

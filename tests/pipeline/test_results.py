"""What a finished pipeline leaves for others to use: the Hugging Face form and the MLflow runs."""

import csv
import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.data.token_files import TokenFile
from stages.model.llama import Llama
from stages.params import load_params
from stages.training.checkpoint import load_weights
from tests.pipeline.small_repository import SHORT_DOCUMENT, Repository

pytestmark = pytest.mark.slow

VARIANTS = ("baseline", "amp_checkpointing", "compiled_accumulated", "frugal")


@pytest.fixture(scope="module")
def runs(finished: Repository) -> dict[str, Run]:
    """By name; more than one of a name fails."""
    client = MlflowClient(f"sqlite:///{finished.root}/mlflow.db")
    experiment = client.get_experiment_by_name("frugal")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in found) == sorted(VARIANTS)
    return {run.info.run_name: run for run in found}


@pytest.mark.parametrize("variant", ("baseline", "frugal"))
def test_transformers_loads_the_same_model(finished: Repository, variant: str) -> None:
    params = load_params(finished.root / "params.yaml")
    ours = Llama(params.model, params.tokenizer.vocab_size)
    load_weights(ours, finished.root / "models" / variant)
    theirs = AutoModelForCausalLM.from_pretrained(finished.root / "hugging_face" / variant)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    input_ids = torch.randint(3, params.tokenizer.vocab_size, (2, 32))
    with torch.no_grad():
        expected = theirs(input_ids).logits
        logits = ours.lm_head(ours(input_ids))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_transformers_finds_the_loss_that_evaluate_wrote(finished: Repository) -> None:
    folder = finished.root / "hugging_face/baseline"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id, *tokenizer.encode(SHORT_DOCUMENT, add_special_tokens=False)]
    input_ids = torch.tensor([[*ids, tokenizer.eos_token_id]])
    validation = TokenFile.open(finished.root / "data/tokens/validation.safetensors")
    assert input_ids[0].tolist() == validation.tokens[: validation.document_offsets[1]].tolist()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids).logits
    nats = F.cross_entropy(logits[0, :-1], input_ids[0, 1:], reduction="sum").item()
    with (finished.root / "results/evaluate/baseline.documents.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["nats"]) == pytest.approx(nats, rel=1e-4)
    summary = json.loads((finished.root / "results/evaluate/baseline.json").read_text())
    total_nats = sum(float(row["nats"]) for row in rows)
    assert summary["loss_nats_per_token"] == pytest.approx(total_nats / summary["tokens"])


@pytest.mark.parametrize("text", ("to be or not", "Ünïcode 🙂\n\n\ttabs", "a [BOT] in the text [EOT][PAD]"))
def test_the_tokenizer_gives_any_text_back(finished: Repository, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished.root / "hugging_face/frugal")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)


def test_runs_are_finished_and_hold_the_curves(finished: Repository, runs: dict[str, Run]) -> None:
    client = MlflowClient(f"sqlite:///{finished.root}/mlflow.db")
    for variant, run in runs.items():
        assert run.info.status == "FINISHED"
        with (finished.root / f"results/curves/{variant}.csv").open() as file:
            curve = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(point.step, point.value) for point in history] == curve
        summary = json.loads((finished.root / f"results/evaluate/{variant}.json").read_text())
        assert run.data.metrics["validation_bits_per_byte"] == summary["bits_per_byte"]
        assert {"speedup", "memory_saved", "peak_memory_bytes", "mfu"} <= run.data.metrics.keys()


def test_runs_name_their_params_flat(runs: dict[str, Run]) -> None:
    params = runs["frugal"].data.params
    assert params["training.learning_rate"] == "0.004"
    assert params["model.hidden_size"] == "32"
    assert params["variant.precision"] == "amp_bf16"
    assert params["variant.accumulation_steps"] == "2"
    assert not [key for key in params if key.startswith("variants.")]


def test_runs_say_where_they_come_from(finished: Repository, runs: dict[str, Run]) -> None:
    first_commit = finished.run("git", "rev-parse", "HEAD~1").stdout.strip()
    lock = yaml.safe_load((finished.root / "dvc.lock").read_text())["stages"]
    for variant, run in runs.items():
        tags = run.data.tags
        training = json.loads((finished.root / f"models/{variant}/training.json").read_text())
        assert tags["variant"] == variant
        assert tags["fingerprint"] == training["fingerprint"]
        assert tags["git.commit"] == first_commit
        assert tags["git.dirty"] == "false"
        assert tags["dvc.stage"] == f"train@{variant}"
        assert tags["device"] and tags["device.kind"] == "cpu"
        for stage in ("train", "evaluate"):
            for out in lock[f"{stage}@{variant}"]["outs"]:
                assert tags[f"md5.{out['path']}"] == out["md5"]


def test_runs_name_their_data_and_show_the_figures(finished: Repository, runs: dict[str, Run]) -> None:
    client = MlflowClient(f"sqlite:///{finished.root}/mlflow.db")
    meta = json.loads((finished.root / "data/tokens/meta.json").read_text())
    for run in runs.values():
        assert run.inputs is not None
        (entry,) = run.inputs.dataset_inputs
        assert entry.dataset.name == "files"
        assert meta["splits"]["train"]["text_sha256"].startswith(entry.dataset.digest)
        figures = {artifact.path for artifact in client.list_artifacts(run.info.run_id, "figures")}
        assert figures == {
            f"figures/{name}.png"
            for name in ("loss_by_time", "loss_by_tokens", "memory", "memory_timeline", "speed")
        }

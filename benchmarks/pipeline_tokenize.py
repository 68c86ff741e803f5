"""The tokenize stage beside a bare loop over the same text with the same tokenizer, as the corpus grows."""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipeline_checkout import ROOT, Checkout
from benchmarks.pipeline_growth import Curve
from benchmarks.pipeline_loop import STEP
from benchmarks.pipeline_process import Spread
from stages.data.sources import iterate_documents
from stages.params import EmbeddedCorpus

_CHARACTERS_PER_DOCUMENT = 4000
_BARE_LOOP = ROOT / "benchmarks" / "pipeline_bare_encode.py"
_EVALUATION = "stages.evaluate:document_losses"

STAGE, BARE = "tokenize", "bare encode loop"


@dataclass(frozen=True)
class Tokenizing:
    """Per further MB, so that starting and learning the merges, which do not grow, are in neither."""

    megabytes: tuple[float, float]
    """Of the smallest and the largest corpus."""
    stage: Spread
    """MB/s."""
    bare: Spread
    ratio: Spread
    """stage / bare, round by round."""
    stage_peak_bytes: tuple[float, float]
    """With the smallest and the largest corpus, the lowest of the rounds."""
    bare_peak_bytes: tuple[float, float]
    evaluated_tokens_per_second: Spread
    curves: list[Curve]


def measure_tokenizing(
    checkout: Checkout, base_bytes: int, factors: Sequence[int], rounds: int
) -> Tokenizing:
    """
    Args:
        base_bytes: UTF-8 bytes of text in the smallest corpus.
        factors: sizes as multiples of it.
    """
    parts = _write_corpus(checkout.root / "corpus", base_bytes, max(factors))
    params = checkout.params()
    seconds: dict[str, dict[int, list[float]]] = {STAGE: defaultdict(list), BARE: defaultdict(list)}
    peaks: dict[str, dict[int, list[float]]] = {STAGE: defaultdict(list), BARE: defaultdict(list)}
    first_step: dict[float, list[float]] = {}
    evaluation: dict[float, list[float]] = {}
    for number in range(rounds):
        # The sizes in between are for the picture; what is compared is the smallest and the largest.
        for factor in factors if number == 0 else (min(factors), max(factors)):
            checkout.set_params(
                params
                | {
                    "corpus": {"source": "files", "paths": [f"corpus/{name}" for name in parts[:factor]]},
                    # All sizes learn from the same text: the first half of the smallest.
                    "tokenizer": params["tokenizer"] | {"training_bytes": base_bytes // 2},
                }
            )
            tasks = (
                (STAGE, BARE) if number % 2 == 0 or not (checkout.root / "data").exists() else (BARE, STAGE)
            )
            for task in tasks:
                if task == STAGE:
                    # Or it would find the tokens of the round before, which are whole, and be done.
                    for made in (checkout.root / "data" / "tokens", checkout.root / ".work" / "tokenize"):
                        shutil.rmtree(made, ignore_errors=True)
                    done = checkout.python("-m", "stages.tokenize_data", watch_memory=True)
                else:
                    files = [f"corpus/{name}" for name in parts[:factor]]
                    arguments = ("data/tokens/tokenizer.json", "bare.bin", *files)
                    done = checkout.python(str(_BARE_LOOP), *arguments, watch_memory=True)
                seconds[task][factor].append(done.seconds)
                peaks[task][factor].append(done.peak_bytes or 0)
            if number == 0:
                trained = checkout.train([STEP])
                first_step[factor * base_bytes] = [trained.calls[STEP][0].end.wall]
                judged = checkout.stage("stages.evaluate", "baseline", clocks=[_EVALUATION])
                (call,) = judged.calls[_EVALUATION]
                summary = json.loads((checkout.root / "results/evaluate/baseline.json").read_text())
                evaluation[summary["tokens"]] = [call.seconds]
    checkout.set_params(params)
    few, many = min(factors), max(factors)
    speeds = {
        task: [
            (many - few) * base_bytes / 1e6 / (more - less)
            for less, more in zip(found[few], found[many], strict=True)
        ]
        for task, found in seconds.items()
    }

    def curve(
        name: str, unit: str, found: dict[int, list[float]], scale: float, is_flat: bool = False
    ) -> Curve:
        costs = {
            float(factor * base_bytes): [cost / scale for cost in costs] for factor, costs in found.items()
        }
        return Curve(name, unit, costs, is_flat)

    return Tokenizing(
        megabytes=(few * base_bytes / 1e6, many * base_bytes / 1e6),
        stage=Spread.of(speeds[STAGE]),
        bare=Spread.of(speeds[BARE]),
        ratio=Spread.of([own / bare for own, bare in zip(speeds[STAGE], speeds[BARE], strict=True)]),
        stage_peak_bytes=(min(peaks[STAGE][few]), min(peaks[STAGE][many])),
        bare_peak_bytes=(min(peaks[BARE][few]), min(peaks[BARE][many])),
        evaluated_tokens_per_second=Spread.of([tokens / cost for tokens, (cost,) in evaluation.items()]),
        curves=[
            curve("tokenize", "s", seconds[STAGE], 1.0),
            curve("tokenize, peak memory", "MiB", peaks[STAGE], 2**20, is_flat=True),
            Curve("train, to the first step", "s", first_step, is_flat=True),
            Curve("evaluate", "s", evaluation),
        ],
    )


def _write_corpus(folder: Path, base_bytes: int, parts: int) -> list[str]:
    """Files of `base_bytes` each, of the embedded corpus over and over, 4,000 characters a document."""
    folder.mkdir(exist_ok=True)
    pieces = itertools.cycle(_pieces())
    names = []
    for number in range(parts):
        names.append(f"part-{number:02}.jsonl")
        left = base_bytes
        with (folder / names[-1]).open("w", encoding="utf-8") as file:
            while left > 0:
                text = next(pieces).encode("utf-8")[:left].decode("utf-8", "ignore")
                file.write(json.dumps({"text": text}) + "\n")
                left -= max(len(text.encode("utf-8")), 1)
    return names


def _pieces() -> Iterator[str]:
    for document in iterate_documents(EmbeddedCorpus(source="embedded")):
        for start in range(0, len(document.text), _CHARACTERS_PER_DOCUMENT):
            yield document.text[start : start + _CHARACTERS_PER_DOCUMENT]

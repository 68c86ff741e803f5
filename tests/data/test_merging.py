"""Merging: documents go to their splits, and a part that is not what it was made from is refused."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from stages.data import merging, sources
from stages.data.encoding import whole_parts
from stages.data.merging import DamagedPartError
from stages.data.sources import corpus_units
from stages.data.token_shards import TokenShards
from tests.data.small_job import WORDS, corpus_of, encode_all, job_of, merge_all, tokens_of

texts = st.lists(st.text(WORDS, min_size=1, max_size=60), min_size=1, max_size=14)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=texts,
    unit_bytes=st.integers(1, 400),
    part_text_bytes=st.integers(1, 200),
    tokens_at_a_time=st.integers(1, 40),
)
def test_splits_are_those_of_the_documents_numbers(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    unit_bytes: int,
    part_text_bytes: int,
    tokens_at_a_time: int,
) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(merging, "_TOKENS_AT_A_TIME", tokens_at_a_time)
    folder = tmp_path_factory.mktemp("t")
    job = job_of(folder / "work", corpus_of(folder, texts), part_text_bytes)
    encode_all(job, corpus_units(job.corpus))
    merger = merge_all(job, folder / "out", shard_tokens=50)
    assert merger.num_documents == len(texts)
    for split, chosen in (
        ("train", [text for index, text in enumerate(texts) if index % 3 != 2]),
        ("validation", texts[2::3]),
    ):
        shards = TokenShards.open(folder / "out", split)
        offsets = shards.document_offsets
        found = [shards.tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        assert found == [tokens_of(job, text).tolist() for text in chosen]
        assert shards.document_bytes.tolist() == [len(text.encode()) for text in chosen]
        assert merger.text_sha256(split) == hashlib.sha256("".join(chosen).encode()).hexdigest()  # type: ignore[arg-type]
        counts = merger.splits[split]  # type: ignore[index]
        assert (counts.num_documents, counts.num_tokens) == (len(chosen), len(shards.tokens))
        assert counts.num_bytes == sum(len(text.encode()) for text in chosen)


@pytest.mark.parametrize(
    ("token", "how"),
    [
        (5, "its tokens are not those of the text it was made from"),
        (1, "its tokens are not those of the text it was made from"),
        (0, "a document does not begin where it says"),
        (319, "has a token that is not in the vocabulary"),
    ],
)
def test_a_changed_token_is_found(tmp_path: Path, token: int, how: str) -> None:
    job = job_of(tmp_path / "work", corpus_of(tmp_path, [WORDS] * 4), 10**6)
    units = corpus_units(job.corpus)
    encode_all(job, units)
    (part,) = whole_parts(job.folder, units[0])
    changed = bytearray(part.path.read_bytes())
    at = len(changed) - part.tokens.nbytes + 2 * 7
    assert part.tokens[7] != token
    changed[at : at + 2] = np.uint16(token).tobytes()
    part.path.write_bytes(changed)
    with pytest.raises(DamagedPartError, match=how):
        merge_all(job, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("table", ["document_offsets", "document_bytes"])
def test_a_changed_document_is_found(tmp_path: Path, table: str) -> None:
    """The hash of a part is that of its text: it does not see where documents begin."""
    job = job_of(tmp_path / "work", corpus_of(tmp_path, [WORDS] * 4), 10**6)
    units = corpus_units(job.corpus)
    encode_all(job, units)
    (part,) = whole_parts(job.folder, units[0])
    tensors = load_file(part.path)
    tensors[table][1] += 1
    metadata = part.metadata
    save_file(tensors, part.path, metadata=dict(metadata))
    with pytest.raises(DamagedPartError, match="delete it and run again"):
        merge_all(job, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []

"""Parts of units: the same bytes however often a process was stopped between two of them, or in one."""

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.data import sources
from stages.data.encoding import encode_unit, is_last, whole_parts
from stages.data.sources import corpus_units
from stages.data.tokenizer import load_tokenizer
from tests.data.small_job import WORDS, content, corpus_of, encode_all, job_of, tokens_of

texts = st.lists(st.text(WORDS, max_size=60) | st.just(""), min_size=1, max_size=14)
relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", 150)


@relaxed
@given(texts=texts, part_text_bytes=st.integers(1, 200))
def test_parts_hold_the_documents_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], part_text_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("t")
    job = job_of(folder / "work", corpus_of(folder, texts), part_text_bytes)
    units = corpus_units(job.corpus)
    documents = [text for text in texts if text]
    assert encode_all(job, units) == sum(len(text.encode()) for text in documents)
    found = []
    for unit in units:
        parts = whole_parts(job.folder, unit)
        assert [is_last(part) for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.document_bytes[:-1].sum() < part_text_bytes for part in parts)
        assert all(part.document_bytes.sum() >= part_text_bytes for part in parts[:-1])
        for part in parts:
            found += [part.tokens[a:b].tolist() for a, b in itertools.pairwise(part.document_offsets)]
    assert found == [tokens_of(job, text).tolist() for text in documents]


@relaxed
@given(texts=texts, stops=st.lists(st.integers(0, 20), max_size=6))
def test_a_stopped_unit_goes_on_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], stops: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("t")
    corpus = corpus_of(folder, texts)
    undisturbed, stopped = (job_of(folder / name, corpus, 40) for name in ("undisturbed", "stopped"))
    units = corpus_units(corpus)
    encode_all(undisturbed, units)
    tokenizer = load_tokenizer(stopped.tokenizer)
    for unit in units:
        for documents in stops:
            before = len(whole_parts(stopped.folder, unit))
            for _ in itertools.islice(encode_unit(stopped, tokenizer, unit), documents):
                pass
            assert len(whole_parts(stopped.folder, unit)) >= before
    encode_all(stopped, units)
    assert content(stopped.folder) == content(undisturbed.folder)


def test_what_is_there_is_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "UNIT_BYTES", 10**6)
    job = job_of(tmp_path / "work", corpus_of(tmp_path, [WORDS] * 9), 3 * len(WORDS))
    (unit,) = corpus_units(job.corpus)
    encode_all(job, [unit])
    first, second, _ = (part.path for part in whole_parts(job.folder, unit))
    wanted = content(job.folder)
    second.write_bytes(second.read_bytes()[:-1])
    times = {path: path.stat().st_mtime_ns for path in (first, second)}
    assert [part.path for part in whole_parts(job.folder, unit)] == [first]
    assert encode_all(job, [unit]) == 9 * len(WORDS.encode())
    assert content(job.folder) == wanted
    assert first.stat().st_mtime_ns == times[first] and second.stat().st_mtime_ns > times[second]
    assert encode_all(job, [unit]) == 0

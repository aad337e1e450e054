"""Packed documents are a pure function of (seed, row index), cover the text, and keep documents apart."""

import itertools

import numpy as np
import pytest
import torch

from polysketch.data import DocumentRows, PreparedData, documents, prepare

END = 0
CONTEXT = 16
LENGTHS = {
    "mixed": [*np.random.default_rng(1).geometric(0.08, 150).tolist(), 70, 33, 17, 16, 1, 1, 2],
    "one long": [100],
    "one short": [5],
    "a context and one": [CONTEXT + 1] * 7,
    "two contexts and two": [2 * CONTEXT + 2] * 5,
    "pairs": [2] * 40,
    "smaller than a batch": [4, 6, 9],
    "empty ones between": [1, 3, 1, 1, 5, 1],
}


def text_of(lengths):
    """Documents of these many tokens, the end of text included; every other token is its own position."""
    ends = np.cumsum(lengths) - 1
    tokens = np.arange(1, sum(lengths) + 1)
    tokens[ends] = END
    return tokens


def packed(lengths, context=CONTEXT, seed=3):
    return DocumentRows(text_of(lengths), context, seed, END)


def epoch_of(rows, epoch=0):
    return rows.batch(epoch, rows.num_rows)


def spans(batch):
    """The ids and targets of each document of a batch, without padding."""
    bounds = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        targets = batch.targets[0, start:stop]
        assert bool((targets == -100).all()) or bool((targets != -100).all())
        if targets[0] != -100:
            yield batch.ids[0, start:stop].tolist(), targets.tolist()


@pytest.mark.parametrize("name", LENGTHS)
def test_an_epoch_predicts_each_token_but_first_ones_once_and_reads_each_but_ends_once(name):
    tokens = text_of(LENGTHS[name])
    firsts = {0, *(np.flatnonzero(tokens == END)[:-1] + 1)}
    targets = sorted(tokens[place] for place in range(len(tokens)) if place not in firsts)
    rows = packed(LENGTHS[name])
    for epoch in range(4):
        batch = epoch_of(rows, epoch)
        real = batch.targets != -100
        assert sorted(batch.targets[real].tolist()) == targets
        assert sorted(batch.ids[real].tolist()) == tokens[tokens != END].tolist()
        assert len(targets) == rows.num_tokens == batch.num_tokens


@pytest.mark.parametrize("name", LENGTHS)
def test_a_piece_is_consecutive_tokens_of_one_document_and_predicts_the_next_of_each(name):
    tokens = text_of(LENGTHS[name])
    for ids, targets in spans(epoch_of(packed(LENGTHS[name]))):
        assert len(ids) <= CONTEXT
        start = ids[0] - 1
        assert ids == tokens[start : start + len(ids)].tolist()
        assert targets == tokens[start + 1 : start + len(ids) + 1].tolist()
        assert END not in ids


@pytest.mark.parametrize("name", LENGTHS)
def test_shapes_are_fixed_and_padding_is_a_document_of_its_own(name):
    rows = packed(LENGTHS[name])
    for step in range(5):
        batch = rows.batch(step, 6)
        assert batch.ids.shape == batch.targets.shape == (1, 6 * CONTEXT)
        assert (batch.ids.dtype, batch.targets.dtype, batch.cu_seqlens.dtype) == (torch.int64, torch.int64, torch.int32)
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == 6 * CONTEXT
        assert sorted(set(bounds)) == bounds
        assert set(range(0, 6 * CONTEXT, CONTEXT)) <= set(bounds)
        assert (batch.ids[batch.targets == -100] == END).all()
        for row in batch.targets[0].view(6, CONTEXT):
            padding = (row == -100).tolist()
            assert padding == sorted(padding)  # at the end
            assert not padding[0]
        assert batch.num_tokens == int((batch.targets != -100).sum())


def test_a_long_document_is_cut_into_full_pieces_and_a_rest():
    pieces = sorted(ids for ids, _ in spans(epoch_of(packed([41]))))
    assert pieces == [list(range(1, 17)), list(range(17, 33)), list(range(33, 41))]


def test_an_end_of_text_that_would_be_a_piece_alone_is_left_out():
    batch = epoch_of(packed([CONTEXT + 1, 1, 1]))
    assert list(spans(batch)) == [(list(range(1, 17)), [*range(2, 17), END])]


def test_text_without_a_last_end_of_text_is_a_document_too():
    rows = DocumentRows(np.array([5, 6, END, 7, 8, 9]), CONTEXT, 0, END)
    assert sorted(spans(epoch_of(rows))) == [([5, 6], [6, END]), ([7, 8], [8, 9])]


@pytest.mark.parametrize("tokens", [[END], [END, END, END], [5]])
def test_a_text_in_which_nothing_can_be_predicted_is_refused(tokens):
    with pytest.raises(ValueError, match="expected a document of at least 2 tokens, found none"):
        DocumentRows(np.array(tokens), CONTEXT, 0, END)


def test_a_context_of_nothing_and_a_batch_of_nothing_are_refused():
    with pytest.raises(ValueError, match="context length of at least 1, found 0"):
        packed([5], context=0)
    for step, batch_size in ((0, 0), (-1, 2)):
        with pytest.raises(ValueError, match="batch size of at least 1 and a step of at least 0"):
            packed([5]).batch(step, batch_size)


def same(first, second):
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("ids", "targets", "cu_seqlens"))


def test_a_batch_depends_on_seed_and_step_alone():
    first, second = packed(LENGTHS["mixed"]), packed(LENGTHS["mixed"])
    second.batch(5, 16)  # nothing is consumed
    for step in (0, 3, 1000, 2, 10**12):
        assert same(first.batch(step, 4), second.batch(step, 4))
    assert not same(first.batch(0, 4), packed(LENGTHS["mixed"], seed=4).batch(0, 4))


def test_batches_of_any_size_are_the_same_rows_one_after_the_other():
    rows = packed(LENGTHS["mixed"])
    count = 4 * rows.num_rows  # four epochs
    ids = torch.cat([rows.batch(step, 1).ids for step in range(count)], dim=1)
    bounds = torch.cat([rows.batch(step, 1).cu_seqlens[1:] + step * CONTEXT for step in range(count)])
    for size in (2, 4, rows.num_rows, 2 * rows.num_rows):
        parts = [rows.batch(step, size) for step in range(count // size)]
        found = torch.cat([part.ids for part in parts], dim=1)
        assert torch.equal(found, ids[:, : found.shape[1]])
        found = torch.cat([part.cu_seqlens[1:] + step * size * CONTEXT for step, part in enumerate(parts)])
        assert torch.equal(found, bounds[: len(found)])


@pytest.mark.parametrize("rows_each", [1, 2, 3, 6])
def test_parts_of_a_batch_are_its_rows(rows_each):
    rows = packed(LENGTHS["mixed"])
    parts = rows.batch(2, 6).split(rows_each)
    assert [len(part) for part in parts] == [rows_each] * (6 // rows_each)
    expected = [rows.batch(12 // rows_each + number, rows_each) for number in range(6 // rows_each)]
    assert all(same(part, one) for part, one in zip(parts, expected, strict=True))


def test_epochs_differ_in_order_and_in_what_stands_together():
    rows = packed(np.random.default_rng(0).integers(2, 8, 300).tolist())
    neighbours = []
    for epoch in range(4):
        batch = epoch_of(rows, epoch)
        in_rows = batch.ids.view(-1, CONTEXT).tolist()
        neighbours.append({frozenset(row) - {END} for row in in_rows})
    assert not same(epoch_of(rows, 0), epoch_of(rows, 1))
    assert all(len(first & second) < len(first) / 20 for first, second in itertools.pairwise(neighbours))


def test_a_corpus_smaller_than_a_batch_repeats_in_new_orders():
    rows = packed([CONTEXT + 1] * 3)
    batch = rows.batch(0, 300)
    orders = [tuple(order) for order in batch.ids.view(100, 3, CONTEXT)[..., 0].tolist()]
    assert all(sorted(order) == [1, 18, 35] for order in orders)
    assert len(set(orders)) == 6


def test_the_order_is_the_same_in_every_version():
    # Change this only with a note in the changelog: resumed runs would see other data.
    batch = packed([3, 9, 20, 4, 4, 8], seed=0).batch(0, 3)
    assert batch.ids[0, batch.cu_seqlens[:-1].long()].tolist() == [37, 29, 33, 1, END, 13, 4, 41, END]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 9, 11, 16, 32, 40, 47, 48]


def test_parts_of_the_file_meet_without_a_seam(monkeypatch):
    """Also where a document begins, ends or goes on across several parts."""
    expected = packed(LENGTHS["mixed"]).batch(0, 50)
    for size in (1, 2, 7, 16, 17, 100):
        monkeypatch.setattr(documents, "TOKENS_AT_A_TIME", size)
        assert same(packed(LENGTHS["mixed"]).batch(0, 50), expected)


def test_the_places_of_many_pieces_lie_in_a_file(monkeypatch):
    expected = packed(LENGTHS["mixed"]).batch(0, 50)
    monkeypatch.setattr(documents, "PIECES_IN_MEMORY", 10)
    rows = packed(LENGTHS["mixed"])
    assert isinstance(rows._pieces._starts, np.memmap)
    assert same(rows.batch(0, 50), expected)


@pytest.mark.parametrize(
    ("name", "most"), [("uniform", 0.01), ("log-normal", 0.0005), ("exponential", 0.0005), ("all above half", 0.45)]
)
def test_little_is_padding_where_there_are_short_pieces(name, most):
    draw = np.random.default_rng(0)
    lengths = {
        "uniform": draw.integers(2, 1025, 4000),
        "log-normal": draw.lognormal(5, 1.2, 8000).astype(int) + 2,
        "exponential": draw.exponential(800, 4000).astype(int) + 2,
        "all above half": draw.integers(600, 800, 1000),
    }[name]
    rows = DocumentRows(text_of(lengths.tolist()), 1024, 0, END)
    real = sum(rows.batch(step, 50).num_tokens for step in range(-(-rows.num_rows // 50)))
    assert rows.padding_share == 1 - rows.num_tokens / (rows.num_rows * 1024)
    assert real >= rows.num_tokens
    assert rows.padding_share < most


def test_prepared_text_is_packed_document_by_document(corpus_folder, tmp_path, texts):
    prepare(corpus_folder, "bytes", tmp_path / "data", validation_share=0.2, test_share=0.0, progress=False)
    data = PreparedData.open(tmp_path / "data")
    split = data.split("train")
    rows = DocumentRows(split.tokens, 2048, 0, data.description.end_of_text)
    whole = [data.tokenizer.decode(ids) for ids, _ in spans(epoch_of(rows))]
    assert len(whole) == split.num_documents
    assert set(whole) < set(texts)
    assert rows.num_tokens == split.num_tokens - split.num_documents


def test_articles_of_a_real_text_leave_hardly_any_padding(outside_data, tmp_path):
    article = outside_data / "wiki" / "enwiki_articles_clean.jsonl.gz"
    prepare(article, "bytes", tmp_path / "data", validation_share=0.0, test_share=0.0, progress=False)
    split = PreparedData.open(tmp_path / "data").split("train")
    rows = DocumentRows(split.tokens, 1024, 0, 256)
    assert rows.num_tokens == split.num_tokens - split.num_documents
    assert rows.padding_share < 0.002

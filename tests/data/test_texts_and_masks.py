"""Reviews as bytes, bytes that are hidden, and pairs of papers."""

import ast
import csv
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecoformer.data import IGNORED, MASK, PAD, byte_tokens, load, mask_bytes
from ecoformer.data.samples import sample_text
from ecoformer.data.texts import decode_literal


def ids(text):
    return [byte + 1 for byte in text]


@pytest.fixture
def reviews(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        for name in ("pos", "neg", "unsup"):
            folder = tmp_path / "aclImdb" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}_9.txt").write_bytes(f"{part} {name} {i} é".encode())
            (folder / "list.html").write_bytes(b"no review")
            (folder.parent / f"urls_{name}.txt").write_bytes(b"http://no.review\n" * count)
    return tmp_path


def test_reviews(reviews):
    splits = load("imdb", reviews, length=20)
    assert splits.train.inputs.dtype == torch.int16
    assert splits.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert splits.train.inputs[3].tolist() == ids("train pos 0 é".encode()) + [PAD] * 6
    assert len(splits.test) == 4, "what has no rating is left out"
    assert (splits.kind, splits.classes, splits.vocabulary, splits.length) == ("text", 2, 257, 20)
    again = load("imdb", reviews / "aclImdb", length=20)
    assert torch.equal(again.test.inputs, splits.test.inputs)
    assert load("imdb", reviews, limit=2).train.targets.tolist() == [0, 1]


def test_reviews_are_cut_at_4000_bytes_of_4096(reviews):
    (reviews / "aclImdb/train/neg/0_9.txt").write_bytes(b"x" * 5000)
    kept = [
        int((load("imdb", reviews, **options).train.inputs[0] > 0).sum())
        for options in ({}, {"length": 1000}, {"cut": 4096}, {"length": 100, "cut": 10})
    ]
    assert kept == [4000, 1000, 4096, 10]
    assert load("imdb", reviews).train.inputs.shape == (6, 4096)
    with pytest.raises(ValueError, match="cut must be from 1 to length=100, got 101"):
        load("imdb", reviews, length=100, cut=101)


def test_masks_follow_their_shares():
    tokens = torch.randint(1, 257, (50, 2000), generator=torch.Generator().manual_seed(0))
    inputs, targets = mask_bytes(tokens, torch.Generator().manual_seed(1), rate=0.2)
    asked = targets != IGNORED
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets[asked], tokens[asked] - 1)
    assert torch.equal(inputs[~asked], tokens[~asked])
    assert abs(float(asked.float().mean()) - 0.2) < 0.005
    seen = inputs[asked]
    assert abs(float((seen == MASK).float().mean()) - 0.8) < 0.01
    assert abs(float((seen == tokens[asked]).float().mean()) - 0.1004) < 0.01
    assert inputs.min() >= 1
    assert inputs.max() == MASK == 257
    again = mask_bytes(tokens.to(torch.int16), torch.Generator().manual_seed(1), rate=0.2)
    assert torch.equal(again[0], inputs)
    assert torch.equal(again[1], targets)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 99))
def test_padding_is_not_asked_for_but_every_text_is(lengths, seed):
    tokens = byte_tokens([b"x" * n for n in lengths], 12)
    inputs, targets = mask_bytes(tokens, torch.Generator().manual_seed(seed), rate=0.01)
    asked = targets != IGNORED
    assert not asked[tokens == PAD].any()
    assert torch.equal(inputs == PAD, tokens == PAD)
    assert asked.any(dim=1).tolist() == [n > 0 for n in lengths]


def test_wrong_masks():
    with pytest.raises(ValueError, match=r"rate .*got 0"):
        mask_bytes(torch.ones(1, 2), torch.Generator(), rate=0)
    with pytest.raises(ValueError, match=r"tokens must be \(B, N\), got \(2,\)"):
        mask_bytes(torch.ones(2), torch.Generator())


def test_masked_reviews(reviews):
    splits = load("masked_bytes", reviews, length=8)
    texts = [f"train {name} {i} é".encode() for name in ("neg", "pos") for i in range(3)]
    joined = b"\n".join(texts)
    assert splits.train.inputs.flatten().tolist() == ids(joined[: len(joined) // 8 * 8])
    assert (splits.train.targets == IGNORED).all()
    assert splits.masked == 0.15
    assert (splits.kind, splits.classes, splits.vocabulary, splits.length) == ("tokens", 256, 258, 8)
    again = load("masked_bytes", reviews, length=8)
    assert torch.equal(again.test.inputs, splits.test.inputs)
    assert torch.equal(again.test.targets, splits.test.targets)
    asked = splits.test.targets != IGNORED
    assert asked.any(dim=1).all()
    clean = torch.where(asked, splits.test.targets + 1, splits.test.inputs)
    assert b"test neg" in bytes((clean - 1).to(torch.uint8).flatten().tolist())
    other = load("masked_bytes", reviews, length=8, seed=1)
    assert not torch.equal(other.test.targets, splits.test.targets)


def test_masked_bytes_of_plain_texts(tmp_path):
    for i in range(12):
        (tmp_path / f"{i:02d}.txt").write_bytes(bytes([97 + i]) * 9)
    splits = load("masked_bytes", tmp_path, length=9)
    assert not (splits.train.inputs == 98).any(), "every tenth is for testing: 00 and 10"
    assert (splits.train.inputs == 99).sum() == 9
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_bytes(b"abc")
    with pytest.raises(FileNotFoundError, match="must hold train/ and test/"):
        load("masked_bytes", tmp_path, length=9)


def test_masked_sample():
    splits = load("masked_sample")
    count = len(sample_text()) // 256
    assert len(splits.train) + len(splits.test) == count
    assert bytes((splits.train.inputs[0] - 1).to(torch.uint8).tolist()) == sample_text()[256:512]
    assert splits.masked == 0.15
    with pytest.raises(ValueError, match="length must be"):
        load("masked_sample", length=1_000_000)


@given(st.binary(max_size=60), st.integers(1, 70))
def test_literals_are_what_python_writes(data, most):
    assert decode_literal(repr(data), most) == data[:most]
    assert decode_literal(repr(data), most) == ast.literal_eval(repr(data))[:most]


def test_what_is_no_literal_is_text():
    assert decode_literal("plain \\n text", 50) == b"plain \\n text"
    assert decode_literal("é" * 9, 3) == "é".encode() + "é".encode()[:1]
    assert decode_literal("b'cut", 50) == b"b'cut"
    assert decode_literal(r"b'\101\x4'", 50).startswith(b"A")


def pairs(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(rows)


@pytest.fixture
def papers(tmp_path):
    first, second = b"it's\n\xe2\x82\xac", b'a "word"\t'
    rows = [
        ("1.0", "P1", "P2", repr(first), repr(second)),
        ("0.0", "P3", "P4", repr(b"x" * 200_000), "plain"),
    ]
    pairs(tmp_path / "new_aan_pairs.train.tsv", rows * 3)
    pairs(tmp_path / "new_aan_pairs.test.tsv", rows[::-1])
    return tmp_path


def test_papers(papers):
    before = csv.field_size_limit()
    splits = load("aan", papers)
    assert splits.train.inputs.shape == (6, 2, 4096)
    assert splits.train.inputs.dtype == torch.int16
    assert splits.train.targets.tolist() == [1, 0] * 3
    assert splits.train.inputs[0, 0, :9].tolist() == [*ids(b"it's\n\xe2\x82\xac"), PAD]
    assert splits.train.inputs[0, 1, :10].tolist() == [*ids(b'a "word"\t'), PAD]
    assert int((splits.train.inputs[1, 0] > 0).sum()) == 4000
    assert splits.train.inputs[1, 1, :6].tolist() == [*ids(b"plain"), PAD]
    assert splits.test.targets.tolist() == [0, 1]
    assert (splits.kind, splits.classes, splits.vocabulary, splits.length) == ("pairs", 2, 257, 4096)
    assert sorted(load("aan", papers, limit=3, length=4).train.targets) in ([0, 0, 1], [0, 1, 1])
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\ta\tb\tc", "line 1: it has 4 columns between tabs, not 5"),
        ("2\ta\tb\tc\td", "line 1: the class must be 0 or 1, got '2'"),
        ("label\ta\tb\tc\td", "line 1: the class must be 0 or 1, got 'label'"),
        ("", "holds no pairs"),
    ],
)
def test_damaged_papers(papers, line, message):
    (papers / "new_aan_pairs.test.tsv").write_text(line)
    with pytest.raises(ValueError, match="new_aan_pairs"):
        load("aan", papers)
    with pytest.raises(ValueError, match=message):
        load("aan", papers)


def test_papers_in_another_encoding_keep_their_bytes(papers):
    (papers / "new_aan_pairs.test.tsv").write_bytes(b"1\ta\tb\t\xe9t\xe9\td\n")
    assert load("aan", papers, length=4).test.inputs[0, 0].tolist() == [*ids(b"\xe9t\xe9"), PAD]


def test_lines_and_texts_beyond_memory_are_refused(papers):
    os.truncate(papers / "new_aan_pairs.test.tsv", 2**36)  # takes no space on the disk
    with pytest.raises(ValueError, match="a line has more than 33,554,432 characters"):
        load("aan", papers)
    for name in ("a", "b"):
        (papers / f"{name}.txt").touch()
    os.truncate(papers / "b.txt", 2**36)
    with pytest.raises(ValueError, match="68,719,476,736 bytes"):
        load("masked_bytes", papers)

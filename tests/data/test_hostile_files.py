"""Files and folders made to hang a reader, to fill the memory or to start another program."""

import io
import json
import os
import resource
import select
import subprocess
import sys
import tarfile

import pytest
import torch
from PIL import Image

from ecoformer.data import Arrays, Splits, load, store
from ecoformer.storage import CheckpointError, read, write

MEMORY = 3 * 2**30  # torch alone reserves more than one of these
READER = """
import json, sys
from ecoformer.data import load
for line in sys.stdin:
    name, root, options, decode = json.loads(line)
    try:
        splits = load(name, root, **options)
        if decode:
            splits.test[0]
        said = f"read {len(splits.train)} {len(splits.test)}"
    except Exception as error:
        said = str(error) or repr(error)
    print(json.dumps(said), flush=True)
"""


@pytest.fixture(scope="module")
def attempt():
    """What a process with little memory and time reports about a data set, in one line."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )

    def ask(name, root, options=None, decode=False):
        print(json.dumps([name, str(root), options or {}, decode]), file=process.stdin, flush=True)
        if not select.select([process.stdout], [], [], 30)[0]:
            process.kill()
            pytest.fail(f"{name} hangs")
        said = json.loads(process.stdout.readline())
        assert "\n" not in said
        return said

    with process:
        yield ask
        process.stdin.close()


def png(size=(2, 2)):
    buffer = io.BytesIO()
    Image.new("1", size).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        (tmp_path / part / "cat" / "a.png").write_bytes(png())
    return tmp_path


def test_loops_of_links_end(attempt, folder):
    for name in ("one", "two", "three"):
        (folder / "train" / "cat" / name).symlink_to(folder / "train")
    (folder / "train" / "cat" / "self").symlink_to(".")
    assert attempt("imagefolder", folder) == "read 1 1"


@pytest.mark.parametrize("kind", ["pipe", "device", "broken"])
@pytest.mark.parametrize("name", ["imagefolder", "imdb", "masked_bytes"])
def test_pipes_and_devices_are_refused(attempt, kind, name, tmp_path):
    """Each is opened where the name of a sample is expected."""
    ending = "png" if name == "imagefolder" else "txt"
    for part in ("train", "val", "test"):
        for cls in ("neg", "pos"):
            (tmp_path / part / cls).mkdir(parents=True)
            (tmp_path / part / cls / f"a.{ending}").write_bytes(png())
    bad = tmp_path / "train" / "pos" / f"b.{ending}"
    if kind == "pipe":
        os.mkfifo(bad)
    else:
        bad.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    found = attempt(name, tmp_path, {"length": 4} if ending == "txt" else {})
    assert f"{bad}' is a pipe, a device or a broken link" in found


def test_a_picture_replaced_by_a_pipe_is_refused(folder):
    test = load("imagefolder", folder).test
    (folder / "val" / "cat" / "a.png").unlink()
    os.mkfifo(folder / "val" / "cat" / "a.png")
    with pytest.raises(ValueError, match=r"a\.png.* is a pipe"):
        test[0]


def test_a_shard_that_is_a_pipe_is_refused(attempt, tmp_path):
    os.mkfifo(tmp_path / "train-0.tar")
    os.mkfifo(tmp_path / "val-0.tar")
    assert "is a pipe" in attempt("webdataset", tmp_path)


def test_postscript_is_not_handed_to_ghostscript(folder, monkeypatch):
    from PIL import EpsImagePlugin

    def run(*args, **kwargs):
        raise SystemExit("Ghostscript")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    eps = io.BytesIO()
    Image.new("RGB", (4, 4)).save(eps, "eps")
    (folder / "val" / "cat" / "a.png").write_bytes(eps.getvalue())
    with pytest.raises(ValueError, match=r"a\.png.* not a readable JPEG, PNG"):
        load("imagefolder", folder).test[0]


def test_pictures_of_too_many_pixels_or_bytes_are_refused(attempt, folder):
    picture = folder / "val" / "cat" / "a.png"
    picture.write_bytes(png((12_000, 12_000)))
    assert picture.stat().st_size < 100_000
    with (
        pytest.raises(ValueError, match="12000 x 12000 pixels"),
        pytest.warns(Image.DecompressionBombWarning),
    ):
        load("imagefolder", folder).test[0]
    os.truncate(picture, 2**34)  # takes no space on the disk
    assert "17,179,869,184 bytes" in attempt("imagefolder", folder, decode=True)


def member(name, size, **changes):
    info = tarfile.TarInfo(name)
    info.size = size
    for field, value in changes.items():
        setattr(info, field, value)
    return info


def shard(path, entries, form=tarfile.PAX_FORMAT):
    """A tar of (header, data); data that are short of the header's size are a hole in the file."""
    with open(path, "wb") as file:
        for info, data in entries:
            file.write(info.tobuf(form))
            file.write(data)
            file.seek(max(info.size, 0) - len(data) + -max(info.size, 0) % 512, 1)
        file.truncate(file.tell() + 1024)


@pytest.fixture
def shards(tmp_path):
    good = png()
    for name in ("train-0.tar", "val-0.tar"):
        shard(tmp_path / name, [(member("k.png", len(good)), good), (member("k.cls", 1), b"1")])
    return tmp_path


def test_a_huge_class_is_refused(attempt, shards):
    good = png()
    entries = [(member("k.png", len(good)), good), (member("k.cls", 9), b"100000000")]
    shard(shards / "train-0.tar", entries)
    found = attempt("webdataset", shards)
    assert "train-0.tar: 'k.cls' must hold a class number below 100,000, got b'100000000'" in found


@pytest.mark.parametrize(
    ("info", "data", "message"),
    [
        (member("k.cls", 3 * 2**30), b"1", "'k.cls' must hold a class number"),
        (member("x", 3 * 2**30, type=tarfile.XHDTYPE), b"", "a header of 3221225472 bytes"),
        (member("x", 3 * 2**30, type=tarfile.GNUTYPE_LONGNAME), b"", "a header of 3221225472 bytes"),
        (member("k.cls", 9, type=tarfile.GNUTYPE_SPARSE), b"1", "'k' lacks a label"),
        (member("k.cls", 5000), b"9" * 5000, "'k.cls' must hold a class number"),
    ],
    ids=["cls", "pax", "long name", "sparse", "digits"],
)
def test_small_shards_take_little_memory(attempt, shards, info, data, message):
    good = png()
    shard(shards / "val-0.tar", [(member("k.png", len(good)), good), (info, data)])
    found = attempt("webdataset", shards)
    assert "val-0.tar" in found
    assert message in found


def test_headers_that_lead_backwards_are_refused(attempt, shards):
    """Without the check `tarfile` of some Python versions reads the same header for ever."""
    record = b"14 size=-1536\n"  # from behind the second header back to the first one
    info = member("x", len(record), type=tarfile.XHDTYPE)
    shard(shards / "val-0.tar", [(member("k.cls", 1), b"1"), (info, record), (member("k.txt", 0), b"")])
    assert "val-0.tar" in attempt("webdataset", shards)


def test_a_huge_picture_in_a_shard_is_refused(attempt, shards):
    shard(shards / "val-0.tar", [(member("k.cls", 1), b"1"), (member("k.png", 2**33), b"")])
    found = attempt("webdataset", shards, decode=True)
    assert "val-0.tar, byte " in found
    assert "the picture has 8,589,934,592 bytes" in found


def test_lines_of_papers_are_bounded(attempt, tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_bytes(b"")
        os.truncate(tmp_path / f"new_aan_pairs.{part}.tsv", 2**32)
    assert "a line has more than 33,554,432 characters" in attempt("aan", tmp_path)


def test_texts_beyond_memory_are_refused(attempt, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "b.txt").touch()
    os.truncate(tmp_path / "b.txt", 2**36)
    assert "68,719,476,740 bytes" in attempt("masked_bytes", tmp_path)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("classes", 10**12),
        ("classes", 0),
        ("vocabulary", 10**12),
        ("length", 10**12),
        ("classes", "2"),
        ("kind", "sound"),
    ],
)
def test_stored_files_cannot_ask_for_a_huge_model(tmp_path, fact, value):
    part = Arrays(torch.ones(3, 4, dtype=torch.int16), torch.tensor([0, 1, 0]))
    store(Splits(part, part, "text", 2, 9, 4), tmp_path)
    for file in tmp_path.iterdir():
        tensors, config = read(file)
        write(file, tensors, config | {"data": config["data"] | {fact: value}})
    with pytest.raises(CheckpointError, match=str(value)):
        load("stored", tmp_path)

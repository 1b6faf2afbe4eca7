"""`ecoformer convert --fit`: on images, on texts, and on neither."""

import functools
import pathlib
import shutil

import pytest
import torch

import ecoformer
from ecoformer import hashers_of

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
PIL_Image = pytest.importorskip("PIL.Image")
from things import (  # noqa: E402
    OF_BERT,
    QUICK,
    same_state,
)


class TestFitting:
    def test_on_texts(self, convert):
        done = convert("bert_with_words", "--fit", "texts.txt", "--seed", "3", *QUICK)
        hashers = hashers_of(done.model)
        assert done.facts["fitted"] == list(hashers)
        assert [name.removesuffix(".attention.hasher") for name in hashers] == OF_BERT
        assert all(hasher.fitted for hasher in hashers.values())
        assert not any("--fit takes a folder of images" in note for note in done.facts["notes"])
        expected = transformers.BertModel.from_pretrained("bert_with_words").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained("bert_with_words")
        lines = [line for line in pathlib.Path("texts.txt").read_text().split("\n") if line]
        ecoformer.convert(expected, "eco", bits=2, support=3)
        batch = dict(tokenizer(lines, padding=True, return_tensors="pt"))
        assert batch["attention_mask"].min() == 0
        ecoformer.fit_hashers(expected, [batch], seed=3, progress=False)
        assert same_state(done.model, expected)

    def test_on_images(self, convert):
        done = convert("ours.safetensors", "--fit", "photos", *QUICK)
        hashers = hashers_of(done.model)
        assert done.facts["fitted"] == list(hashers)
        assert len(hashers) == 3
        assert all(hasher.fitted for hasher in hashers.values())
        expected = ecoformer.load("ours.safetensors")
        ecoformer.convert(expected, "eco", bits=2, support=3)
        config = timm.data.resolve_model_data_config(expected)
        assert config["input_size"] == (3, 32, 32)
        transform = timm.data.create_transform(**config)
        images = [PIL_Image.open(f"photos/{name}") for name in ("a.png", "b.PNG", "more/c.jpg")]
        ecoformer.fit_hashers(expected, [torch.stack([transform(i) for i in images])], progress=False)
        assert same_state(done.model, expected)

    def test_on_images_of_a_transformers_model(self, convert, things, tmp_path):
        shutil.copytree(things / "vit", tmp_path / "seeing")
        size = {"height": 32, "width": 32}
        transformers.ViTImageProcessor(size=size).save_pretrained(tmp_path / "seeing")
        done = convert("seeing", "--fit", "photos", *QUICK)
        assert len(done.facts["fitted"]) == 2
        expected = transformers.ViTModel.from_pretrained("seeing").eval()
        ecoformer.convert(expected, "eco", bits=2, support=3)
        images = [PIL_Image.open(f"photos/{name}") for name in ("a.png", "b.PNG", "more/c.jpg")]
        batch = transformers.ViTImageProcessor(size=size)(images, return_tensors="pt")["pixel_values"]
        ecoformer.fit_hashers(expected, [batch], progress=False)
        assert same_state(done.model, expected)

    def test_of_what_was_fitted_before(self, convert):
        convert("released.pth", "--attention", "softmax", "--layers", "stages.[01].*", out="1.safetensors")
        done = convert("1.safetensors", "--attention", "eco", *QUICK, out="2.safetensors")
        assert [bool(hasher.fitted) for hasher in hashers_of(done.model).values()] == [False, False, False]
        assert any("not fitted" in note for note in done.facts["notes"])

    def test_the_same_seed_gives_the_same_numbers(self, convert):
        def fit(seed, out):
            return convert("bert_with_words", "--fit", "texts.txt", "--seed", seed, *QUICK, out=out).model

        first = fit(1, "1.safetensors")
        torch.manual_seed(77)
        assert same_state(fit(1, "2.safetensors"), first)
        assert not same_state(fit(2, "3.safetensors"), first)

    def test_samples(self, convert, tmp_path):
        lines = (tmp_path / "texts.txt").read_text().split("\n\n")
        (tmp_path / "six.txt").write_text("\n".join(lines[:6]))
        fit = functools.partial(convert, "bert_with_words", *QUICK)
        six = fit("--fit", "six.txt", out="1.safetensors").model
        assert same_state(six, fit("--fit", "texts.txt", "--samples", 6, out="2.safetensors").model)
        assert not same_state(six, fit("--fit", "texts.txt", "--samples", 7, out="3.safetensors").model)

    @pytest.mark.parametrize(
        ("samples", "shown"),
        [("2", "2 samples"), ("64", "3 samples")],
    )
    def test_what_a_person_sees(self, cli, samples, shown):
        done = cli("convert", "ours.safetensors", "o", "--fit", "photos", "--samples", samples, *QUICK)
        assert done.status == 0
        assert f"fitted 3 hashers on {shown} of photos" in done.out.splitlines()
        assert "fit_hashers" not in done.out

    @pytest.mark.parametrize(
        ("source", "arguments", "words"),
        [
            ("ours.safetensors", ["empty"], ["--fit empty", "no image", ".png"]),
            ("ours.safetensors", ["nowhere"], ["--fit", "nowhere"]),
            ("ours.safetensors", ["texts.txt"], ["--fit texts.txt", "folder of images"]),
            ("ours.safetensors", ["photos/a.png"], ["--fit photos/a.png", "folder of images"]),
            ("ours.safetensors", ["photos", "--attention", "softmax"], ["softmax", "no hash functions"]),
            ("bert", ["texts.txt"], ["--fit texts.txt", "bert/", "tokenizer.save_pretrained"]),
            ("bert_with_words", ["photos"], ["--fit photos"]),
            ("bert_with_words", ["blank.txt"], ["--fit blank.txt"]),
            ("bert_with_words", ["texts.txt", "--samples", "1"], ["support=25", "more tokens"]),
            ("vit", ["photos"], ["--fit photos", "vit/"]),
        ],
    )
    def test_mistakes(self, refused, source, arguments, words):
        refused(source, "--fit", *arguments, words=words)

    @pytest.mark.parametrize(
        ("name", "cut"),
        [("x.png", 0), ("x.png", 200)],
    )
    def test_an_unreadable_image_is_named(self, refused, tmp_path, name, cut):
        (tmp_path / "bad").mkdir()
        content = (tmp_path / "photos" / "a.png").read_bytes()
        (tmp_path / "bad" / name).write_bytes(content[:cut] or b"no image")
        refused("ours.safetensors", "--fit", "bad", words=f"bad/{name}")

    def test_a_text_in_another_encoding_is_named(self, refused, tmp_path):
        (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1"))
        refused("bert_with_words", "--fit", "latin.txt", words="latin.txt")

    def test_texts_longer_than_the_model_takes(self, convert, tmp_path):
        (tmp_path / "long.txt").write_text("a b c d e f g h " * 20 + "\n")
        assert convert("bert_with_words", "--fit", "long.txt", *QUICK).facts["fitted"]

"""`ecoformer convert --data`: on images, on texts, and on neither."""

import json
import pathlib
import random
import re
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
        done = convert("bert_with_words", "--data", "texts.txt", "--seed", "3", *QUICK)
        hashers = hashers_of(done.model)
        assert done.facts["fitted"] == list(hashers)
        assert [name.removesuffix(".attention.hasher") for name in hashers] == OF_BERT
        assert all(hasher.fitted for hasher in hashers.values())
        assert not any("--data takes a folder of images" in note for note in done.facts["notes"])
        expected = transformers.BertModel.from_pretrained("bert_with_words").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained("bert_with_words")
        lines = [line for line in pathlib.Path("texts.txt").read_text().split("\n") if line]
        random.Random(3).shuffle(lines)
        ecoformer.convert(expected, "eco", bits=2, support=3)
        batch = dict(tokenizer(lines, padding=True, return_tensors="pt"))
        assert batch["attention_mask"].min() == 0
        ecoformer.fit_hashers(expected, [batch], seed=3, progress=False)
        assert same_state(done.model, expected)

    def test_on_images(self, convert):
        done = convert("ours.safetensors", "--data", "photos", *QUICK)
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
        random.Random(0).shuffle(images)
        ecoformer.fit_hashers(expected, [torch.stack([transform(i) for i in images])], progress=False)
        assert same_state(done.model, expected)

    def test_on_images_of_a_transformers_model(self, convert, things, tmp_path):
        shutil.copytree(things / "vit", tmp_path / "seeing")
        size = {"height": 32, "width": 32}
        transformers.ViTImageProcessor(size=size).save_pretrained(tmp_path / "seeing")
        done = convert("seeing", "--data", "photos", *QUICK)
        assert len(done.facts["fitted"]) == 2
        expected = transformers.ViTModel.from_pretrained("seeing").eval()
        ecoformer.convert(expected, "eco", bits=2, support=3)
        images = [PIL_Image.open(f"photos/{name}") for name in ("a.png", "b.PNG", "more/c.jpg")]
        random.Random(0).shuffle(images)
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
            return convert("bert_with_words", "--data", "texts.txt", "--seed", seed, *QUICK, out=out).model

        first = fit(1, "1.safetensors")
        torch.manual_seed(77)
        assert same_state(fit(1, "2.safetensors"), first)
        assert not same_state(fit(2, "3.safetensors"), first)

    def test_what_a_person_sees(self, cli):
        done = cli("convert", "ours.safetensors", "o", "--data", "photos", "--samples", "2", *QUICK)
        assert done.status == 0
        assert "fitted 3 hashers on 2 samples of photos" in done.out.splitlines()

    @pytest.mark.parametrize(
        ("source", "arguments", "words"),
        [
            ("ours.safetensors", ["empty"], ["--data empty", "no image", ".png"]),
            ("ours.safetensors", ["texts.txt"], ["--data texts.txt", "folder of images"]),
            ("ours.safetensors", ["photos", "--attention", "softmax"], ["softmax", "no hash functions"]),
            ("bert", ["texts.txt"], ["--data texts.txt", "bert/", "tokenizer.save_pretrained"]),
            ("bert_with_words", ["photos"], ["--data photos", "takes texts: pass a text file"]),
            ("bert_with_words", ["blank.txt"], ["--data blank.txt"]),
            ("vit", ["photos"], ["--data photos", "vit/"]),
            ("vit", ["texts.txt"], ["--data texts.txt", "takes images: pass a folder of images"]),
        ],
    )
    def test_mistakes(self, refused, source, arguments, words):
        refused(source, "--data", *arguments, words=words)

    def test_an_unreadable_image_is_named(self, refused, tmp_path):
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "x.png").write_bytes((tmp_path / "photos" / "a.png").read_bytes()[:200])
        refused("ours.safetensors", "--attention", "eco", "--data", "bad", words="bad/x.png is not")

    def test_a_text_in_another_encoding_is_named(self, refused, tmp_path):
        (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1"))
        refused("bert_with_words", "--data", "latin.txt", words="latin.txt")

    def test_texts_longer_than_the_model_takes(self, convert, tmp_path):
        (tmp_path / "long.txt").write_text("a b c d e f g h " * 20 + "\n")
        assert convert("bert_with_words", "--data", "long.txt", *QUICK).facts["fitted"]


class TestTeaching:
    def test_images(self, convert):
        done = convert("ours.safetensors", "--data", "photos", "--teach", "--steps", "3", "--batch", "2")
        assert done.facts["mechanism"] == "sharp_eco"
        assert list(done.facts["transfer"]) == [layer["name"] for layer in done.facts["replaced"]]
        assert len(done.facts["distillation"]) == 2
        assert done.facts["fitted"] == []
        images = torch.randn(2, 3, 32, 32)
        assert not torch.equal(done.model(images), ecoformer.load("ours.safetensors").eval()(images))

    def test_texts_and_what_a_person_sees(self, cli):
        done = cli("convert", "bert_with_words", "o", "--data", "texts.txt", "--teach", "--steps", "2")
        assert done.status == 0
        assert "transfer: 2 steps" in done.out
        assert "distillation: 2 steps" in done.out
        assert done.out.splitlines()[-1] == "wrote o"

    def test_a_model_in_16_bits_learns_in_32(self, convert):
        ecoformer.save(ecoformer.load("ours.safetensors").bfloat16(), "half.safetensors")
        done = convert("half.safetensors", "--data", "photos", "--teach", "--steps", "1")
        assert {p.dtype for p in done.model.parameters()} == {torch.bfloat16}

    def test_hash_functions_are_fitted_first(self, convert):
        done = convert("bert_with_words", "--data", "texts.txt", "--teach", "--steps", "1", *QUICK)
        assert done.facts["fitted"]
        assert done.facts["transfer"]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--teach"], "--teach needs --data"),
            (["--data", "photos"], "sharp_eco has no hash functions to fit: add --teach"),
        ],
    )
    def test_mistakes(self, refused, arguments, words):
        refused("ours.safetensors", *arguments, words=words)


class TestPlan:
    def test_a_table_and_a_verdict(self, cli):
        done = cli("plan", "pvt_v2_b0", "--resolution", "512", "--no-measure")
        assert done.status == 0
        lines = done.out.splitlines()
        assert lines[0].split() == ["layer", "is", "mJ", "after", "ratio"]
        assert [line.split()[0] for line in lines[1:3]] == [
            "stages.0.blocks.0.attn",
            "stages.0.blocks.1.attn",
        ]
        assert lines[7].startswith("the model")
        assert re.fullmatch(r"sharp_eco saves \d+% of the model's energy at this size", lines[8])

    def test_what_does_not_pay_off(self, cli):
        done = cli("plan", "pvt_v2_b0", "--resolution", "64", "--attention", "eco", "--no-measure")
        assert "does not pay off" in done.out

    def test_times(self, cli):
        done = cli("plan", "ours.safetensors", "--json")
        rows = json.loads(done.out)["rows"]
        assert rows[-1]["seconds"] > sum(row["seconds"] for row in rows[:-1]) > 0

    def test_texts(self, cli):
        done = cli("plan", "bert", "--tokens", "8", "--no-measure", "--json")
        assert [row["was"] for row in json.loads(done.out)["rows"]] == ["BertSelfAttention"] * 2 + [""]

"""`ecoformer export`: an ONNX file and what is said of it."""

import json

import numpy as np
import onnxruntime
import pytest


def test_a_converted_text_model_compared_on_texts(cli):
    options = ("--attention", "sharp_eco", "--set", "bits=4", "--data", "texts.txt", "--samples", "3")
    done = cli("export", "bert_with_words", "out.onnx", *options, "--json")
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert facts["inputs"]["attention_mask"] == ["batch", "tokens"]
    assert facts["checked"] == 6
    assert facts["relative_error"] < 1e-4
    session = onnxruntime.InferenceSession("out.onnx")
    ids = np.arange(10, dtype=np.int64).reshape(2, 5)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    assert session.run(["last_hidden_state"], inputs)[0].shape == (2, 5, 16)


def test_a_byte_level_encoder_compared_on_texts(cli):
    done = cli("export", "lra_text", "out.onnx", "--tokens", "64", "--data", "texts.txt", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["inputs"] == {"input_ids": ["batch", "tokens"]}
    assert json.loads(done.out)["checked"] > 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bert", "photos"), "is a folder"),
        (("bert", "texts.txt"), "--force"),
        (("bert", "out.onnx", "--set", "bits=4"), "--attention"),
        (("bert", "out.onnx", "--attention", "eco", "--set", "bit=4"), "bit"),
        (("bert", "out.onnx", "--data", "texts.txt"), "tokeniser"),
        (("bert", "out.onnx", "--resolution", "32"), "--tokens"),
    ],
)
def test_one_line_for_what_cannot_be(cli, arguments, words, tmp_path):
    done = cli("export", *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out.onnx").exists()

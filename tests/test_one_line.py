"""Errors of other libraries in one line."""

from ecoformer.arguments import one_line


def test_lines_are_joined():
    assert one_line(RuntimeError("sizes\n\n  differ:\t3")) == "sizes differ: 3"


def test_an_error_without_words_is_named():
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_what_is_cut_off_leaves_a_trace():
    assert one_line(ValueError("x" * 300)) == "x" * 300
    assert one_line(ValueError("x" * 301)) == "x" * 300 + " ..."
    assert one_line(ValueError("abcdef"), 4) == "abcd ..."

"""The emulated machine with soft-RoCE starts when its host has compiled, whatever its serial line dropped before."""

import pytest

from tests.rdma.host import compiled


@pytest.mark.parametrize("dropped", ["", "o\n", "\n", "\x00o\n", "g\n"])
@pytest.mark.parametrize("word", ["go", "no"])
def test_only_a_whole_word_counts(dropped: str, word: str):
    lines = (dropped + f"{word}\n" * 3).splitlines(keepends=True)
    assert compiled(lines) is (word == "go")


def test_what_comes_after_it_is_not_waited_for():
    def lines():
        yield "o\n"
        yield "go\n"
        raise AssertionError("read on")

    assert compiled(lines())


def test_a_host_that_left_without_a_word_did_not_compile():
    assert not compiled(["o\n"])

"""Tokenizers that learn nothing: characters, and runs of them."""

import pytest

from jaxrl.pool.characters import WIDTHS, CharacterTokenizer, train_characters
from jaxrl.pool.tokenizer import NO_TEXT


def test_pairs_by_hand():
    tokenizer = CharacterTokenizer("ba", 2)
    # 0 pad, 1 unknown, 2 eos, then a b aa ab ba bb
    assert tokenizer.vocab_size == 9
    assert tokenizer.encode("abb") == [6, 4]
    assert tokenizer.decode([6, 4, 2]) == "abb"
    assert tokenizer.encode("") == []
    # a shorter piece inside is legal text, but no text is ever encoded so
    assert tokenizer.decode([3, 6]) == "aab"
    assert tokenizer.encode("aab") == [5, 4]


def test_what_has_no_text_shows():
    tokenizer = CharacterTokenizer("ab", 1)
    assert tokenizer.encode("a?b") == [3, 1, 4]
    assert tokenizer.decode([3, 1, 0, 99]) == "a" + 3 * NO_TEXT


@pytest.mark.parametrize("width", WIDTHS.values())
def test_text_comes_back_as_it_went_in(width):
    texts = ["12 + 3", "=", "15\n"]
    tokenizer = train_characters(texts, width)
    for text in [*texts, "".join(texts)]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.digest == train_characters(reversed(texts), width).digest
    assert tokenizer.digest != train_characters(texts, width + 1).digest


@pytest.mark.parametrize(("alphabet", "width"), [("", 1), (["ab"], 1), ("ab", 0)])
def test_what_cannot_be_is_refused(alphabet, width):
    with pytest.raises(ValueError, match="allowed: single characters"):
        CharacterTokenizer(alphabet, width)

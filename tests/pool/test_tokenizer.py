"""Text comes back as it went in; the same text gives the same model; bad sizes say what is
allowed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pool.tokenizer import (
    EOS_ID,
    NO_TEXT,
    PAD_ID,
    UNKNOWN_ID,
    SentencePieceTokenizer,
    shared_phrases,
    train_sentencepiece,
)

TEXTS = [f"What is {a} + {b} =" for a in range(30) for b in range(7)] + [
    str(n) for n in range(-9, 37)
]
ALPHABET = sorted(set("".join(TEXTS)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_sentencepiece(TEXTS, 64, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


def test_ids_have_their_places(tokenizer):
    assert (tokenizer.pad_id, tokenizer.eos_id) == (PAD_ID, EOS_ID) == (0, 2)
    assert tokenizer.stop_ids == {2}
    assert 3 < tokenizer.vocab_size <= 64
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_digits_are_single_ids_and_fixed_wording_is_one(tokenizer):
    ids = tokenizer.encode("What is 29 + 6 =")
    assert [tokenizer.decode([token]) for token in ids] == ["What is ", "2", "9", " + ", "6", " ="]
    assert len({tokenizer.encode(str(digit))[0] for digit in range(10)}) == 10


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from(ALPHABET), max_size=40))
def test_text_of_known_characters_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not {PAD_ID, UNKNOWN_ID, EOS_ID} & set(tokenizer.encode(text))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_decoding_ids_piece_by_piece_is_decoding_them_together(tokenizer, data):
    """Case 7: what was sampled has one text, however it is cut; encoding it again may differ."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    assert tokenizer.decode(ids) == tokenizer.decode(ids[:cut]) + tokenizer.decode(ids[cut:])
    known = [token for token in ids if EOS_ID < token < tokenizer.vocab_size]
    assert tokenizer.decode(known) == tokenizer._pieces.decode(known)  # as SentencePiece has it


def test_some_sampled_ids_are_not_what_their_text_encodes_to(tokenizer):
    """Case 7: the reason why text is never encoded again."""
    spelled = [token for sign in "What is " for token in tokenizer.encode(sign)]
    assert tokenizer.decode(spelled) == "What is "
    assert tokenizer.encode("What is ") != spelled


def test_ids_without_text_cannot_complete_an_answer(tokenizer):
    """An untrained model samples padding and ids beyond the vocabulary: "1", pad, "2" is not 12."""
    one, two = tokenizer.encode("1")[0], tokenizer.encode("2")[0]
    for nothing in (PAD_ID, UNKNOWN_ID, tokenizer.vocab_size, 10**6):
        assert tokenizer.decode([one, nothing, two, EOS_ID]) == f"1{NO_TEXT}2"
    assert tokenizer.decode([one, two, EOS_ID]) == "12"


def test_characters_that_training_never_saw_are_unknown(tokenizer):
    assert UNKNOWN_ID in tokenizer.encode("Wie viel ist 3 × 4?")


def test_the_same_texts_give_the_same_bytes(tokenizer, tmp_path):
    again = train_sentencepiece(TEXTS, 64, tmp_path / "another-name.model")
    assert again.digest == tokenizer.digest
    other = train_sentencepiece([*TEXTS, "a new word"], 64, tmp_path / "other.model")
    assert other.digest != tokenizer.digest
    reopened = SentencePieceTokenizer(tmp_path / "another-name.model")
    assert reopened.digest == tokenizer.digest and reopened.vocab_size == tokenizer.vocab_size
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "another-name.model",
        "other.model",
    ]


def test_line_breaks_tabs_and_other_scripts_come_back(tmp_path):
    texts = ["row\t1\nrow\t2\r\n", "  two  spaces ", "naïve Ω 数 🙂", "a,b\"c'"]
    tokenizer = train_sentencepiece(texts * 3, 256, tmp_path / "t.model")
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_vocabulary_that_is_too_small_states_the_least(tmp_path):
    least = 3 + 1 + len(set("".join(TEXTS)) - {" "})  # special ids, the space, each other character
    with pytest.raises(ValueError, match=f"vocab_size=10 is too small .*>= {least}"):
        train_sentencepiece(TEXTS, 10, tmp_path / "t.model")
    assert train_sentencepiece(TEXTS, least, tmp_path / "t.model").vocab_size == least
    assert not (tmp_path / "t.model.tmp").exists()


def test_a_vocabulary_that_is_too_large_is_a_ceiling_or_states_the_most(tmp_path):
    tokenizer = train_sentencepiece(TEXTS, 5000, tmp_path / "t.model")
    assert tokenizer.vocab_size < 5000
    with pytest.raises(ValueError, match=f"5000 is more than .*<= {tokenizer.vocab_size}"):
        train_sentencepiece(TEXTS, 5000, tmp_path / "t.model", exact=True)
    exact = train_sentencepiece(TEXTS, tokenizer.vocab_size, tmp_path / "t.model", exact=True)
    assert exact.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_an_error(tmp_path, texts):
    with pytest.raises(ValueError, match="texts to train a tokenizer on are empty"):
        train_sentencepiece(texts, 64, tmp_path / "t.model")


def test_files_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        SentencePieceTokenizer(tmp_path / "absent.model")
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"bad\.model is not a SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "bad.model")


def test_phrases_do_not_depend_on_the_order_of_texts():
    assert shared_phrases(TEXTS) == shared_phrases(TEXTS[::-1])
    assert set(shared_phrases(TEXTS)) == {"What is ", " + ", " ="}

"""Published tokenizers: the ids of the libraries, the text that comes back, and who may write what.

The libraries are the oracle: ``tokenizers`` for a tokenizer.json, ``sentencepiece`` for a model.
"""

import json

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, processors

from jaxrl.pool.canonical import retell
from jaxrl.pool.characters import CharacterTokenizer
from jaxrl.pool.published_tokenizer import PublishedTokenizer
from jaxrl.pool.recorded import demonstrate, read
from jaxrl.pool.rollout import ACTION, PROMPT, StopReason
from jaxrl.pool.tokenizer import NO_TEXT
from tests.pool import templates
from tests.pool.checkpoints import SPECIAL, byte_level, metaspace, sentencepiece_model, write
from tests.pool.scripted import Scripted, Sums, local_pool
from tests.train.toy import rollout

BOS, EOS = "<s>", "</s>"
CONFIG = {"bos_token": BOS, "eos_token": EOS}
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
TYPED = st.lists(st.one_of(st.sampled_from([*SPECIAL, "<think>", "<|im", " "]), TEXT), max_size=4)
KINDS = {
    "bytes": byte_level,
    "bytes_prefix": lambda: byte_level(add_prefix_space=True),
    "always": lambda: metaspace("always"),
    "first": lambda: metaspace("first"),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """For each kind: its tokenizer with a chat template, and the library's own."""
    found = {}
    for kind, make in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        write(folder, make(), config=CONFIG, eos_token_id=[0, 4], template=templates.LLAMA2)
        ours = PublishedTokenizer(folder, chat="template", system="")
        found[kind] = ours, Tokenizer.from_file(str(folder / "tokenizer.json"))
    return found


def off(path, **rest) -> PublishedTokenizer:
    return PublishedTokenizer(path, **{"chat": "off", "system": "", **rest})


# ---- ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_ids_are_those_of_the_library(opened, kind, text):
    ours, library = opened[kind]
    assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT.filter(bool))
def test_a_prompt_is_what_the_library_makes_of_the_rendered_text(opened, kind, text):
    """There the template's control tokens are found by the library's own search."""
    ours, library = opened[kind]
    rendered = ours.render([{"role": "user", "content": text}])
    assert ours.prompt(text) == library.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(parts=TYPED)
def test_typed_control_tokens_are_spelled(opened, kind, parts):
    """In a text none comes out; in a prompt only the template's: its bos and nothing else."""
    ours, library = opened[kind]
    text = "".join(parts)
    control = {library.token_to_id(text) for text in SPECIAL}
    assert control.isdisjoint(ours.encode(text))
    prompt = ours.prompt(text or "?")
    assert [token for token in prompt if token in control] == [library.token_to_id(BOS)]
    back, said = ours.decode(prompt, "left_out").strip(), f"[INST] {text or '?'} [/INST]"
    if kind == "bytes_prefix":  # spaces are put in front wherever a piece was cut out before
        back, said = back.replace(" ", ""), said.replace(" ", "")
    assert back == said.replace("\u2581", " ")


def test_a_typed_token_is_cut_like_any_other_text(tmp_path):
    library = byte_level()
    ours = off(write(tmp_path, library, config=CONFIG))
    library.encode_special_tokens = True  # as text
    for text in ("a<|im_end|>b", "<s></s>", "<|im_start|> <think>x"):
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_a_vocabulary_that_would_read_a_typed_token_does_not(tmp_path):
    """A unigram vocabulary holds its control tokens as pieces of text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(sign, -5.0) for sign in "<s>/ab "]
    library = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.encode_special_tokens = True
    assert library.encode("a</s>").tokens == ["a", "</s>"]  # what is to be prevented
    ours = off(write(tmp_path, library, config={**CONFIG, "unk_token": "<unk>"}))
    ids = ours.encode("a</s><s>b?")
    assert [ours.decode([token], "shown") for token in ids] == [*"a</s><s>b", "<unk>"]


def test_a_piece_that_is_added_but_not_special_is_text(opened):
    """<think> has an id of its own wherever it stands, and is there to be read."""
    ours, library = opened["bytes"]
    think = library.token_to_id("<think>")
    assert ours.encode("<think>a") == [think, *ours.encode("a")]
    assert think in ours.prompt("<think>")
    assert ours.decode([think, *ours.encode("a")]) == "<think>a"


# ---- text


@pytest.mark.parametrize("kind", ["bytes", "always"])
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_text_comes_back_byte_for_byte(opened, kind, text):
    """But for two losses of Metaspace: its sign for a space comes back as one, and a space at the
    very start is taken for the one that it puts there."""
    ours, _ = opened[kind]
    expected = text if kind == "bytes" else text.replace("\u2581", " ").removeprefix(" ")
    assert ours.decode(ours.encode(text)) == expected


def test_a_space_in_front_stays_where_the_vocabulary_puts_one(opened):
    ours, _ = opened["bytes_prefix"]
    assert ours.decode(ours.encode("a b")) == " a b"


def test_what_is_normalised_is_lost(tmp_path):
    library = byte_level()
    library.normalizer = normalizers.NFC()
    ours = off(write(tmp_path, library, config=CONFIG))
    assert ours.decode(ours.encode("cafe\u0301")) == "caf\u00e9"


def test_half_a_character_is_marked(opened):
    ours, _ = opened["bytes"]
    ids = ours.encode("\U0001f3f3")  # not in the text it was trained on: pieces of its bytes
    assert len(ids) > 2 and ours.decode(ids) == "\U0001f3f3"
    for size in range(1, len(ids)):
        assert set(ours.decode(ids[:size])) == {NO_TEXT}
    assert ours.decode([*ids[:2], *ours.encode("a")]).endswith("a")


def test_control_tokens_are_marked_left_out_or_shown(opened):
    ours, library = opened["bytes"]
    one, two = ours.encode("1")[0], ours.encode("2")[0]
    start = library.token_to_id("<|im_start|>")
    ids = [one, start, two, ours.vocab_size, -1, ours.eos_id]
    assert ours.decode(ids) == f"1{NO_TEXT}2{NO_TEXT}{NO_TEXT}"  # never 12
    assert ours.decode(ids, "left_out") == f"12{NO_TEXT}{NO_TEXT}"
    assert ours.decode(ids, "shown") == f"1<|im_start|>2{NO_TEXT}{NO_TEXT}</s>"


# ---- special ids


@pytest.mark.parametrize(
    ("stated", "template", "eos", "stops"),
    [
        (None, None, 4, {4}),
        (2, None, 4, {2, 4}),
        ([0, 7], None, 4, {0, 4, 7}),
        ([0, 4], templates.GEMMA, 9, {0, 4, 9}),
        (None, templates.CHATML, 2, {2, 4}),
        (None, templates.LLAMA3, 7, {4, 7}),
        (None, templates.LLAMA2, 4, {4}),
    ],
)
def test_every_id_that_ends_a_response_is_known(tmp_path, stated, template, eos, stops):
    """Case 4: generation_config's list, the published eos, and the template's end of turn."""
    write(tmp_path, byte_level(), config=CONFIG, eos_token_id=stated, template=template)
    ours = off(tmp_path, chat="template" if template else "off")
    assert (ours.eos_id, ours.stop_ids) == (eos, stops)
    assert ours.decode([*ours.encode("4"), ours.eos_id]) == "4"


def test_config_json_speaks_where_generation_config_is_silent(tmp_path):
    write(tmp_path, byte_level(), config=CONFIG)
    (tmp_path / "config.json").write_text('{"eos_token_id": [2], "architectures": ["X"]}')
    assert off(tmp_path).stop_ids == {2, 4}


def test_padding_is_the_published_one_or_the_end_of_the_text(tmp_path):
    write(tmp_path / "a", byte_level(), config=CONFIG)
    write(tmp_path / "b", byte_level(), config={**CONFIG, "pad_token": {"content": SPECIAL[0]}})
    assert (off(tmp_path / "a").pad_id, off(tmp_path / "b").pad_id) == (4, 0)


def test_the_vocabulary_ends_with_its_largest_id(tmp_path):
    """Ids may have holes; a token that only the config knows counts."""
    library = byte_level()
    size = library.get_vocab_size()
    extra = {str(size): {"content": "<extra>", "special": True}}
    write(tmp_path, library, config={**CONFIG, "added_tokens_decoder": extra})
    ours = off(tmp_path)
    assert ours.vocab_size == size + 1
    assert ours.decode([size], "shown") == "<extra>" and size not in ours.encode("<extra>")
    document = json.loads(library.to_str())
    document["model"]["vocab"]["hole"] = size + 10
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    ours = off(tmp_path)
    assert ours.vocab_size == size + 11
    assert ours.decode([size + 5, size + 10]) == f"{NO_TEXT}hole"


# ---- bos


@pytest.mark.parametrize("stated", [None, True, False])
@pytest.mark.parametrize("template", [None, templates.GEMMA, templates.CHATML])
def test_a_prompt_never_begins_with_bos_twice(tmp_path, stated, template):
    """The post-processor adds it, the config may forbid it, a template writes it: once at most."""
    library = byte_level()
    library.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 3), (EOS, 4)]
    )
    config = CONFIG if stated is None else {**CONFIG, "add_bos_token": stated}
    write(tmp_path, library, config=config, template=template)
    ours = off(tmp_path, chat="template" if template else "off")
    expected = template == templates.GEMMA or (template is None and stated is not False)
    for text in ("1+1", f"{BOS}1+1"):
        prompt = ours.prompt(text)
        assert (prompt[0] == 3, prompt.count(3)) == (expected, int(expected))
        assert prompt[-1] != 4  # an eos of the post-processor would end the question's answer
        assert ours.question(prompt) == text
    assert ours.encode("1+1")[0] != 3
    assert ours.prompt("") == ours.encode("") == []


def test_what_a_file_kept_from_its_training_is_put_aside(tmp_path):
    """Truncation, padding and dropout stand in files; each would change a text in silence."""
    library = byte_level()
    document = json.loads(library.to_str())
    library.enable_truncation(4)
    library.enable_padding(length=64, pad_id=0, pad_token=SPECIAL[0])
    kept = json.loads(library.to_str())
    kept["model"]["dropout"] = 0.9
    write(tmp_path, library, config=CONFIG)
    (tmp_path / "tokenizer.json").write_text(json.dumps(kept))
    text = "What is 12 + 30?" * 3
    plain = Tokenizer.from_str(json.dumps(document)).encode(text).ids
    assert off(tmp_path).encode(text) == plain


# ---- SentencePiece models


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return write(folder, sentencepiece_model()) / "tokenizer.model"


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_a_sentencepiece_model_gives_its_own_ids_and_text(llama, text):
    """The space in front goes again; the sign for a space comes back as one."""
    ours, library = off(llama), sentencepiece.SentencePieceProcessor(model_file=str(llama))
    assert ours.encode(text) == library.encode(text)
    assert ours.decode(ours.encode(text)) == text.replace("\u2581", " ")
    assert ours.prompt(text) == ([1, *library.encode(text)] if text else [])


def test_a_bare_model_knows_its_ids(llama):
    ours = off(llama)
    assert (ours.eos_id, ours.stop_ids, ours.pad_id) == (2, {2}, 2)
    assert ours.encode("a</s>")[-1] != 2
    ids = [*ours.encode("4 "), 0, *ours.encode("2")]
    assert ours.decode(ids) == f"4 {NO_TEXT}2"
    half = ours.encode("\U0001f3f3")[:-1]
    assert NO_TEXT in ours.decode(half)


def test_what_a_sentencepiece_model_normalises_is_lost(tmp_path):
    settings = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    ours = off(write(tmp_path, sentencepiece_model(**settings)))
    assert ours.decode(ours.encode("  \uff12  + \u00bd\u00b2 ")) == "2 + 1\u20442" + "2"


@pytest.mark.parametrize("legacy", [True, False])
def test_control_pieces_come_from_the_template_alone(tmp_path, legacy):
    """Gemma's are pieces that the model would read in any text; one more lies beyond the model."""
    names = {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"], "legacy": legacy}
    extra = {"400": {"content": "<|im_end|>", "special": True}}
    write(
        tmp_path,
        sentencepiece_model(),
        config={**CONFIG, **names, "added_tokens_decoder": extra},
        template=templates.GEMMA,
    )
    ours = off(tmp_path, chat="template")
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    start, end = library.piece_to_id("<start_of_turn>"), library.piece_to_id("<end_of_turn>")
    said = "a <end_of_turn>b<|im_end|>"
    assert end in library.encode(said)  # what is to be prevented
    assert not {end, 400} & set(ours.encode(said)) and ours.decode(ours.encode(said)) == said
    prompt = ours.prompt(said)
    assert [token for token in prompt if token in (1, start, end, 400)] == [1, start, end, start]
    assert (ours.eos_id, ours.vocab_size) == (end, 401)
    # What follows a control token has a space in front only if the files say so.
    space = library.piece_to_id("\u2581")
    assert (prompt[2] == space) == legacy


# ---- in the pool


def test_prompts_and_demonstrations_are_rendered(tmp_path):
    folder = write(tmp_path, byte_level(), config=CONFIG, template=templates.CHATML)
    ours = PublishedTokenizer(folder, chat="template", system="Be brief.")
    prompt = ours.prompt("0+1=")
    assert ours.decode(prompt, "shown") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n0+1=<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    generator = Scripted()
    pool = local_pool(generator, Sums(1), rollouts_per_group=2, max_prompt_tokens=99)
    pool._tokenizer = ours
    pool.take(1, step=0)
    assert [list(request.prompt) for request in generator.requests] == [prompt, prompt]
    assert generator.requests[0].stop_ids == {2, 4}
    demonstrate(Sums(1), ours, tmp_path / "records", run_id="r")
    (shown,) = read(tmp_path / "records" / "demonstrations.rollouts")
    assert shown.tokens.tolist() == [*prompt, *ours.encode("1"), 2]
    assert shown.kind.tolist() == [PROMPT] * len(prompt) + [ACTION] * 2


def test_another_model_is_asked_the_question_in_its_own_words(tmp_path):
    """A teacher that reads text: the template's words are nobody's question."""
    folder = write(tmp_path, byte_level(), config=CONFIG, template=templates.CHATML)
    ours = PublishedTokenizer(folder, chat="template", system="")
    letters = CharacterTokenizer("0123456789+=", 1)
    prompt, said = ours.prompt("10+2="), [*ours.encode("12"), ours.eos_id]
    told = retell(rollout(4, 0, prompt, said, 0.0, stop=StopReason.STOP), ours, letters)
    assert told is not None
    assert told.prompt == letters.encode("10+2=")
    assert told.response == [*letters.encode("12"), letters.eos_id]
    asked, answer = letters.encode("10+2="), [*letters.encode("12"), letters.eos_id]
    back = retell(rollout(4, 0, asked, answer, 0.0, stop=StopReason.STOP), letters, ours)
    assert back is not None and (back.prompt, back.response) == (prompt, said)


def test_the_digest_names_what_decides_about_ids(tmp_path):
    write(tmp_path / "a", byte_level(), config=CONFIG)
    write(tmp_path / "b", byte_level(), config=CONFIG)
    write(tmp_path / "c", byte_level(), config=CONFIG, eos_token_id=0)
    write(tmp_path / "d", byte_level(), config=CONFIG, template=templates.CHATML)
    write(tmp_path / "e", byte_level(use_regex=False), config=CONFIG)
    digests = [off(tmp_path / name).digest for name in "abcde"]
    assert digests[0] == digests[1] and len(set(digests)) == 4


# ---- refusals


def spoil(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("spoiled", "match"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer is there; allowed"),
        (spoil("tokenizer.json", "{"), r"tokenizer\.json is not JSON"),
        (spoil("tokenizer.json", "[]"), r"tokenizer\.json holds a list; allowed: an object"),
        (spoil("tokenizer.json", "{}"), "it has no 'model'"),
        (spoil("tokenizer.json", '{"model": {"type": "X"}}'), "no tokenizer.json that can be read"),
        (spoil("tokenizer_config.json", "?"), r"tokenizer_config\.json is not JSON"),
        (spoil("tokenizer_config.json", "{}"), "nothing says eos_token"),
        (spoil("tokenizer_config.json", '{"eos_token": 3}'), "eos_token=3; allowed"),
        (
            spoil("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
            "added_tokens_decoder has 'x'",
        ),
        (
            spoil(
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"7": {"content": "</s>", "special": true}}}',
            ),
            "'</s>' has id 4; the files say 7",
        ),
        (
            spoil("tokenizer_config.json", '{"eos_token": "</s>", "add_bos_token": true}'),
            "add_bos_token=True without a bos_token",
        ),
        (
            spoil("tokenizer_config.json", '{"eos_token": "</s>", "chat_template": 1}'),
            "chat_template is a int",
        ),
        (
            spoil(
                "tokenizer_config.json",
                '{"eos_token": "</s>", "chat_template": [{"name": "rag", "template": ""}]}',
            ),
            r"chat_template has \['rag'\]; allowed: one called 'default'",
        ),
        (spoil("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id='x'; allowed"),
        (spoil("generation_config.json", '{"eos_token_id": [4, 5000]}'), "has 5000; allowed: <"),
    ],
)
def test_files_that_cannot_be_are_refused_by_name(tmp_path, spoiled, match):
    spoiled(write(tmp_path, byte_level(), config=CONFIG))
    with pytest.raises(ValueError, match=match) as raised:
        off(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_paths_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere: it does not exist; allowed: a directory"):
        off(tmp_path / "nowhere")
    (tmp_path / "vocabulary.pkl").write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match=r"ends with '\.pkl'; allowed"):
        off(tmp_path / "vocabulary.pkl")
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="no SentencePiece model"):
        off(tmp_path)


def test_a_chat_needs_a_template_that_works(tmp_path):
    folder = write(tmp_path, byte_level(), config=CONFIG)
    with pytest.raises(ValueError, match="chat='template', but no chat_template.jinja"):
        off(folder, chat="template")
    with pytest.raises(ValueError, match="chat='off'; allowed with messages: chat='template'"):
        off(folder).chat_ids([{"role": "user", "content": "1"}])
    write(folder, byte_level(), config={**CONFIG, "chat_template": templates.GEMMA})
    assert off(folder, chat="template").prompt("1")
    with pytest.raises(ValueError, match="System role not supported"):
        off(folder, chat="template", system="Be brief.")

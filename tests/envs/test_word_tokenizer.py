import pytest

from race_jax.chat import renderer_for
from race_jax.envs import potion_text, potions
from race_jax.envs.word_tokenizer import MARKERS, SPECIAL, word_tokenizer
from race_jax.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(potion_text.words(5))


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def renderer(saved):
    return renderer_for(saved, "qwen3")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "".join(map(chr, range(0x250))),
        "a\r\n\tb  c \x00",
        "Straße 日本語 🧪 e\u0301",
        "go goes h1h1:s1 h12 p1:h11 Look  up",
        "<|im_start|>user\n<think>\n\n</think>\n\n<tool_call>",
        "<|im_start <think",
    ],
)
def test_any_text_comes_back_from_its_ids(saved, text):
    ids = saved.encode(text, add_special_tokens=False)
    assert saved.decode(ids, clean_up_tokenization_spaces=False) == text
    assert all(0 <= i < len(saved) for i in ids)


def test_saving_and_loading_changes_no_id(tokenizer, saved):
    text = "Facts: p1:h2 h1~h2 wörld\nOrder: p3<|im_end|>"
    assert saved.encode(text) == tokenizer.encode(text)
    assert saved.get_vocab() == tokenizer.get_vocab()
    assert (saved.eos_token, saved.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_each_word_is_one_token_and_the_longest_wins():
    tokenizer = word_tokenizer(["Look up", "Look up the substitute", "é1", "."])
    for word in ("Look up", "Look up the substitute", "é1", ".", "\n\n", "\n"):
        assert len(tokenizer.encode(word)) == 1
    assert len(tokenizer.encode("Look up.é1")) == 3
    # Letters that no word covers are one token for each byte.
    assert len(tokenizer.encode("xé")) == 3


def test_ids_do_not_depend_on_repeated_words():
    once = word_tokenizer(["a word", "b"])
    assert word_tokenizer(["a word", "b", "a word"]).get_vocab() == once.get_vocab()


def test_control_tokens_are_one_id_each_and_come_last(saved):
    ids = [saved.encode(token, add_special_tokens=False) for token in (*SPECIAL, *MARKERS)]
    start = len(saved) - len(ids)
    assert ids == [[start + i] for i in range(len(ids))]


def test_the_world_has_no_text_that_falls_back_to_bytes(saved, renderer):
    byte_ids = set(range(256)) - {saved.encode("\n")[0]}
    for seed in range(20):
        tokens = renderer.encode(potions.oracle_trajectory(seed))
        assert not byte_ids & set(tokens.assemble().tokens.tolist())


def test_turns_are_short(renderer):
    tokens = renderer.encode(potions.oracle_trajectory(3))
    pieces = [renderer.codec.decode([i]) for i in tokens.turns[0].action]
    # <tool_call>, opening of the call, the argument, its end, </tool_call>, <|im_end|>
    assert len(pieces) == 6 and pieces[2] == "r4"
    assert [len(turn.reasoning) for turn in tokens.turns[:3]] == [7, 5, 7]
    assert all(len(turn.skip) == 2 for turn in tokens.turns)
    assert len(tokens.prompt) <= 60
    lengths = [
        len(renderer.encode(potions.oracle_trajectory(seed)).assemble().tokens)
        for seed in range(20)
    ]
    assert max(lengths) <= 330


def test_rendering_and_reading_back_give_the_trajectory(renderer):
    trajectory = potions.oracle_trajectory(5)
    tokens = renderer.encode(trajectory)
    messages = renderer.decode(tokens, tools=trajectory.tools)
    thoughts = [m.get("reasoning_content") for m in trajectory.messages]
    assert [m.get("reasoning_content") for m in messages] == thoughts
    assert [m["content"] for m in messages] == [m["content"] for m in trajectory.messages]


@pytest.mark.parametrize(
    ("word", "message"), [("", "is empty"), ("a<think>b", "holds the control token <think>")]
)
def test_words_that_cannot_be_tokens_are_refused(word, message):
    with pytest.raises(ValueError, match=message):
        word_tokenizer([word])

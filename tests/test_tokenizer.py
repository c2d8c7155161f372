import json
import random
import shutil
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from race_jax.envs.word_tokenizer import word_tokenizer
from race_jax.tokenizer import (
    CALL,
    END_THINK,
    IM_END,
    IM_START,
    RESPONSE,
    TAGS,
    THINK,
    Codec,
    check_text,
    load_tokenizer,
    mark_tags,
    spell,
)

TEXTS = [
    "Hello, world.",
    "  two spaces \t tab\n\n\nthree lines\n \n",
    "def f(x):\n    return x ** 2  # 3.14159, 1000000\n",
    "naïve café 東京 🙂 Ünïcode ﬁ",
    "It's we'll I'M don't",
    "e\u0301 decomposed, \u212b",
    "",
    "\n",
    "\r\n\r\n x",
]


@pytest.fixture(scope="module")
def word():
    return word_tokenizer(["p4:h1", "go", " ", "think"])


def closed_vocabulary(normalizer=None, **options):
    """A word-level tokenizer whose own vocabulary holds the control tokens, too."""
    words = ["\n\n", "\n", " ", "go", "p4:h1", "<|unk|>", "extra"]
    vocabulary = {text: i for i, text in enumerate([*words, *TAGS.values()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    split = pre_tokenizers.Split(" ", "isolated")
    newlines = pre_tokenizers.Split("\n", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, newlines])
    tokenizer.decoder = decoders.Fuse()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken(tag, **options) for tag in TAGS.values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_text_gets_the_ids_that_the_tokenizer_gives(word, qwen_tokenizer):
    for tokenizer in (word, qwen_tokenizer):
        codec = Codec(tokenizer)
        for text in TEXTS:
            assert list(codec.encode(text)) == tokenizer.encode(text, add_special_tokens=False)


def test_marked_strings_get_the_ids_of_the_spelt_out_string(qwen_tokenizer):
    codec, rng = Codec(qwen_tokenizer), random.Random(0)
    composed = [unicodedata.normalize("NFC", text) for text in TEXTS]
    for _ in range(50):
        marked = "".join(rng.choice([*TAGS, *composed]) for _ in range(8))
        ids = qwen_tokenizer.encode(spell(marked), add_special_tokens=False)
        assert list(codec.encode(marked)) == ids
        # Composing characters (NFC) is the one thing that encoding changes.
        assert codec.decode(ids) == marked


def test_a_converted_checkpoint_keeps_its_own_splitting_rules(smollm_dir):
    # Its config says qwen2, whose rules would give other ids: SmolLM2 has "\n\n" only alone.
    tokenizer = load_tokenizer(smollm_dir)
    backend = Tokenizer.from_file(str(smollm_dir / "tokenizer.json"))
    text = "\n\nA 12 \n\n"
    expected = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert list(Codec(tokenizer).encode(text)) == expected


def test_known_ids_of_qwen(qwen_tokenizer):
    codec = Codec(qwen_tokenizer)
    marked = f"{IM_START}\n\n\n{THINK}\n{END_THINK}\n\n{IM_END}search"
    assert codec.encode(marked) == (151644, 1406, 151667, 198, 151668, 271, 151645, 1836)
    assert codec.id_of(IM_END) == 151645


@pytest.mark.parametrize("name", ["word", "qwen", "smollm"])
def test_no_text_becomes_a_control_token(name, word, request):
    if name == "word":
        tokenizer = word
    elif name == "qwen":
        tokenizer = request.getfixturevalue("qwen_tokenizer")
    else:
        tokenizer = load_tokenizer(request.getfixturevalue("smollm_dir"))
    codec = Codec(tokenizer)
    added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
    assert set(added.values()) <= codec.control_ids
    for content in added:  # special or not
        for text in (content, f"a{content}b", f" {content}\n", content * 3, f"<{content}>"):
            ids = codec.encode(text)
            assert not codec.control_ids & set(ids)
            assert codec.decode(ids) == text
    everything = " ".join(added)
    assert codec.decode(codec.encode(everything)) == everything


def test_control_tokens_in_the_models_own_vocabulary_are_neutralised():
    codec = Codec(closed_vocabulary())
    assert codec.encode(f"{THINK}\n p4:h1") == (codec.id_of(THINK), 1, 2, 4)
    ids = codec.encode("go <think> </think>\n<tool_call>")
    assert not {codec.id_of(mark) for mark in TAGS} & set(ids)
    assert set(ids) <= {1, 2, 3, 5}  # cut pieces that the vocabulary lacks are unknown words


@pytest.mark.parametrize("options", [{"normalized": True}, {"lstrip": True, "rstrip": True}])
def test_neutralised_whatever_the_added_token_matches(options):
    # NFKC turns full-width signs into ASCII, which a normalized added token would then match.
    codec = Codec(closed_vocabulary(normalizers.NFKC(), **options))
    for text in ("＜think＞", "go ＜/think＞ go", " <think> ", "\n<|im_end|>\n"):
        assert not {codec.id_of(mark) for mark in TAGS} & set(codec.encode(text))


def test_an_unknown_word_token_is_no_injection():
    tokenizer = closed_vocabulary()
    tokenizer.add_special_tokens({"unk_token": "<|unk|>"})
    assert Codec(tokenizer).encode("go nowhere") == (3, 2, 5)


def test_a_text_without_tokens_is_an_error():
    tokenizer = Tokenizer(models.WordLevel({tag: i for i, tag in enumerate(TAGS.values())}, "?"))
    codec = Codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    with pytest.raises(ValueError, match="no token for 'go'"):
        codec.encode("go")


def test_a_tag_without_a_token_of_its_own_is_spelt_in_pieces():
    # As the tokenizer of Qwen2.5, which lacks <tool_response>.
    vocabulary = {c: i for i, c in enumerate("<>/_abcdefghijklmnopqrstuvwxyz|\n ")}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tags = [TAGS[mark] for mark in (IM_START, IM_END, THINK, END_THINK, CALL)]
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    tokenizer.decoder = decoders.Fuse()
    codec = Codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    ids = codec.encode(f"{IM_START}user\n{RESPONSE}ok")
    assert codec.control_ids & set(ids) == {codec.id_of(IM_START)}
    assert codec.decode(ids) == f"{IM_START}user\n{RESPONSE}ok"
    with pytest.raises(ValueError, match="no single token for <tool_response>"):
        codec.id_of(RESPONSE)


def test_marks_and_spelling():
    text = "a<|im_end|>b</think>c"
    assert mark_tags(text) == f"a{IM_END}b{END_THINK}c"
    assert spell(mark_tags(text)) == text
    assert mark_tags(f"x{IM_END}y") == "x\ufffdy"  # a forged mark in text does not survive


def test_lone_surrogates_are_refused():
    assert check_text("ok 🙂") == "ok 🙂"
    with pytest.raises(ValueError, match=r"lone surrogate \(\\ud83d at character 2\)"):
        check_text("ok\ud83d")


def test_load_gives_the_saved_tokenizer_quietly(tmp_path, word, capfd, recwarn):
    word.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "go p4:h1<think>\n</think>\n\n"
    assert loaded.encode(text) == word.encode(text)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_load_errors(tmp_path, word):
    with pytest.raises(ValueError, match="missing: no such directory; give the folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no tokenizer.json in it; write one with"):
        load_tokenizer(tmp_path)
    word.save_pretrained(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path, broken, ignore=shutil.ignore_patterns("broken"))
    (broken / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ValueError, match=r"broken: cannot be read"):
        load_tokenizer(broken)


@pytest.mark.parametrize("tag", ["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
def test_load_names_the_control_token_that_is_missing(tmp_path, word, tag):
    word.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != tag]
    path.write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message and f"{tag} is " in message and "add_tokens" in message

"""Tokenizers: loading them, and text to ids so that no text can spell a control token.

Rendered chats are held as *marked* strings: text in which each control token that the renderer
itself puts there is one character of its own (a mark), drawn from the surrogate code points. Text
that is valid Unicode never holds a surrogate, so whatever messages quote, `<|im_end|>` say, it
stays text: `Codec.encode` turns marks, and only marks, into control ids.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IM_START, IM_END = "\ud800", "\ud801"
THINK, END_THINK = "\ud802", "\ud803"
CALL, END_CALL = "\ud804", "\ud805"
RESPONSE, END_RESPONSE = "\ud806", "\ud807"

TAGS = {
    IM_START: "<|im_start|>",
    IM_END: "<|im_end|>",
    THINK: "<think>",
    END_THINK: "</think>",
    CALL: "<tool_call>",
    END_CALL: "</tool_call>",
    RESPONSE: "<tool_response>",
    END_RESPONSE: "</tool_response>",
}
"""Each mark and the text of its token."""

REQUIRED = (IM_START, IM_END, THINK, END_THINK)
"""Marks that have to be one token; the others may be spelt in pieces (Qwen2.5 does)."""

_MARKS = re.compile("([\ud800-\ud807])")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CACHED_PIECES = 1 << 16


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a local Hugging Face directory; never asks the hub.

    `tokenizer.json` is taken as it stands. (`AutoTokenizer` would put the splitting rules of the
    config's `model_type` in their place, and so change the ids of models that were converted.)

    Args:
        path: Directory that holds `tokenizer.json`.

    Returns:
        The tokenizer.

    Raises:
        ValueError: The directory or its `tokenizer.json` is missing or broken, or a control token
            that chats are built from is not one token.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(
            f"tokenizer directory {directory}: no such directory; give the folder of a "
            "Hugging Face checkpoint, downloaded before"
        )
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(
            f"tokenizer directory {directory}: no tokenizer.json in it; write one with "
            "transformers' tokenizer.save_pretrained(directory)"
        )
    # Imported here: it takes seconds, which commands that load no tokenizer need not wait for.
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the Rust loader raises bare Exception on a malformed file
        raise ValueError(f"tokenizer directory {directory}: cannot be read: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    check_tokenizer(tokenizer, str(directory))
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Raise ValueError unless each control token that chats are built from is one token.

    Args:
        tokenizer: The tokenizer.
        name: What to call it in the message, its directory for instance.
    """
    for mark in REQUIRED:
        tag = TAGS[mark]
        ids = tokenizer.encode(tag, add_special_tokens=False)
        if len(ids) != 1 or tokenizer.convert_ids_to_tokens(ids) != [tag]:
            raise ValueError(
                f"tokenizer {name}: {tag} is {len(ids)} tokens, not one; add it with "
                f"tokenizer.add_tokens([{tag!r}]), save the tokenizer, and give the model's "
                "embedding a row for it"
            )


def check_text(text: str) -> str:
    """Return `text`; raise ValueError if it holds a lone surrogate, which no UTF-8 text has."""
    found = _SURROGATE.search(text)
    if found:
        raise ValueError(
            f"the text holds a lone surrogate (\\u{ord(found[0]):04x} at character "
            f"{found.start()}), which is not valid Unicode; replace it, for instance by U+FFFD"
        )
    return text


def spell(marked: str) -> str:
    """The text of a marked string, each mark spelt out."""
    return _MARKS.sub(lambda found: TAGS[found[0]], marked)


def mark_tags(text: str, marks: Iterable[str] = tuple(TAGS)) -> str:
    """Read text that a sampler returned: every tag in it becomes its mark."""
    text = _SURROGATE.sub("\ufffd", text)
    for mark in marks:
        text = text.replace(TAGS[mark], mark)
    return text


class Codec:
    """Marked strings to token ids and back.

    Args:
        tokenizer: A tokenizer with a `tokenizers` backend, as `load_tokenizer` returns.

    Raises:
        ValueError: A control token that chats are built from is not one token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        check_tokenizer(tokenizer, tokenizer.name_or_path or "given")
        backend = tokenizer.backend_tokenizer
        self._backend: Any = backend
        self._normalizer: Any = backend.normalizer
        self._splitter: Any = backend.pre_tokenizer
        self._model: Any = backend.model
        added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._ids: dict[str, int] = {}
        for mark, tag in TAGS.items():
            ids = tokenizer.encode(tag, add_special_tokens=False)
            if len(ids) == 1 and (ids[0] in added or mark in REQUIRED):
                self._ids[mark] = ids[0]
        self._mark_of = {i: mark for mark, i in self._ids.items()}
        self._absent = tuple(mark for mark in TAGS if mark not in self._ids)
        self._control = added | {i: TAGS[mark] for mark, i in self._ids.items()}
        self._piece = functools.lru_cache(maxsize=_CACHED_PIECES)(self._tokenize)

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that no text may become: the added tokens, special or not, and the tags."""
        return frozenset(self._control)

    @property
    def fingerprint(self) -> str:
        """A short name for the tokenizer: its vocabulary, merges, rules and added tokens."""
        return hashlib.sha256(self._backend.to_str().encode("utf-8")).hexdigest()[:16]

    def id_of(self, mark: str) -> int:
        """The id of a mark's token; ValueError if the tokenizer spells it in pieces."""
        if mark not in self._ids:
            raise ValueError(f"the tokenizer has no single token for {TAGS[mark]}")
        return self._ids[mark]

    def find(self, token: str) -> tuple[int, ...]:
        """The id of an added token, as a tuple of one; empty if there is no such token."""
        return tuple(i for i, content in self._control.items() if content == token)[:1]

    def encode(self, marked: str) -> tuple[int, ...]:
        """Ids of a marked string; its marks become control ids, and nothing else does.

        Where the text quotes no added token, these are the ids that the tokenizer itself gives to
        the spelt-out string.

        Raises:
            ValueError: The tokenizer has no token for a piece of the text.
        """
        for mark in self._absent:
            marked = marked.replace(mark, TAGS[mark])
        ids: list[int] = []
        for part in _MARKS.split(marked):
            if part in self._ids:
                ids.append(self._ids[part])
            elif part:
                ids.extend(self._encode_text(part))
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The marked string of `ids`: control ids that have a mark become it."""
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            mark = self._mark_of.get(int(i))
            if mark is None:
                run.append(int(i))
                continue
            parts += [self._decode_text(run), mark]
            run = []
        parts.append(self._decode_text(run))
        return "".join(parts)

    def _encode_text(self, text: str) -> Iterable[int]:
        # The stages of the tokenizer without its first, which would match added tokens.
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        if self._splitter is None:
            return self._piece(text)
        pieces = self._splitter.pre_tokenize_str(text)
        return [i for piece, _ in pieces for i in self._piece(piece)]

    def _decode_text(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text = self._backend.decode(ids, skip_special_tokens=False)
        # A tag that this tokenizer spells in pieces can only be read back from its text.
        return mark_tags(text, self._absent)

    def _tokenize(self, piece: str) -> tuple[int, ...]:
        """Ids of one piece, none of them a control id.

        The model's own vocabulary may hold control tokens too (a word-level one does); a piece
        that would become one is cut in two. An unknown-word token that stands for other text is
        not what the text quotes, and passes.
        """
        try:
            ids = tuple(token.id for token in self._model.tokenize(piece))
        except Exception as error:  # the Rust model raises bare Exception
            raise ValueError(f"the tokenizer has no token for {piece!r}: {error}") from error
        if not ids and piece:
            raise ValueError(f"the tokenizer has no token for {piece!r}")
        if any(i in self._control and self._control[i] in piece for i in ids):
            if len(piece) == 1:
                raise ValueError(f"the tokenizer has no token for {piece!r} but an added one")
            half = len(piece) // 2
            return self._tokenize(piece[:half]) + self._tokenize(piece[half:])
        return ids

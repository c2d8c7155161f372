r"""A word-level tokenizer in Qwen's format, for small worlds with a closed vocabulary.

Byte-level BPE without a single merge: a known word is one token, all other text falls back to its
bytes, so decoding gives the text back whatever it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens that Qwen's tokenizers mark as special."""
MARKERS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
"""Control tokens that Qwen's tokenizers add without marking them as special."""

TEMPLATE = (
    *("\n", "\n\n", "system\n", "user\n", "assistant\n"),
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n",
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments ",
    *("within ", " XML tags:\n"),
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
)
"""What the Qwen3 template says around the messages, in pieces between control tokens."""


def tool_words(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pieces of the tools' schemas and of calls with string arguments."""
    words = ['"}}\n', '", "']
    for tool in tools:
        function = tool["function"]
        words.append("\n" + json.dumps(tool))
        first, *others = function["parameters"]["properties"]
        words.append(f'\n{{"name": "{function["name"]}", "arguments": {{"{first}": "')
        words += [f'", "{other}": "' for other in others]
    return words


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    r"""Make a tokenizer that gives each of `words` one id.

    Where several words match, the longest wins. Ids: the 256 bytes, the words in order, the control
    tokens last, as Qwen's tokenizers lay them out.

    Args:
        words: Non-empty strings. Those of `TEMPLATE` are added.

    Returns:
        A tokenizer that `save_pretrained` writes and `AutoTokenizer` reads.

    Raises:
        ValueError: A word is empty, or holds a control token.
    """
    from transformers import PreTrainedTokenizerFast

    unique = list(dict.fromkeys([*TEMPLATE, *words]))
    for word in unique:
        control = [token for token in (*SPECIAL, *MARKERS) if token in word]
        if not word or control:
            raise ValueError(
                f"word {word!r} {f'holds the control token {control[0]}' if word else 'is empty'}; "
                "give the text between control tokens"
            )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    for word in unique:
        pieces += [piece for piece, _ in byte_level.pre_tokenize_str(word)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    longest_first = sorted(unique, key=len, reverse=True)
    split = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )

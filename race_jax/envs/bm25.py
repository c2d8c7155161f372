"""Ranking texts by BM25, as Lucene does with the settings that the field uses."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import numpy as np
import Stemmer


class BM25Index:
    """BM25 over texts (k1 0.9, b 0.4, Lucene's formula, English stop words, Porter stems).

    Args:
        texts: At least one; of equal scores the earlier text comes first.
    """

    def __init__(self, texts: Sequence[str]):
        self._index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        self._index.index(_words(list(texts)), show_progress=False)

    def best(self, query: str, most: int) -> list[tuple[int, float]]:
        """Texts that share a word with `query`, at most `most`, best first: index and score."""
        words = _words([query])[0]
        if not words:
            return []
        scores = np.asarray(self._index.get_scores(words))
        found = np.flatnonzero(scores > 0)
        if len(found) > most:
            # All that tie with the last one stay in, so that the order among them is settled below.
            least = np.partition(scores[found], -most)[-most]
            found = found[scores[found] >= least]
        best = found[np.argsort(-scores[found], kind="stable")][:most]
        return [(int(i), float(scores[i])) for i in best]


def _words(texts: list[str]) -> list[list[str]]:
    # A stemmer is not to be shared between threads.
    words = bm25s.tokenize(
        texts,
        token_pattern=r"(?u)\b\w+\b",
        stopwords="en",
        stemmer=Stemmer.Stemmer("porter").stemWords,
        return_ids=False,
        show_progress=False,
    )
    return [[str(word) for word in text] for text in words]

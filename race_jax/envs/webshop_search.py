"""WebShop's search engine: BM25 over titles, descriptions, first features and options."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import numpy as np
import Stemmer

from race_jax.envs.webshop_catalogue import Product

TOP = 50
"""The most products that a search finds."""


class ProductIndex:
    """BM25 with the settings of WebShop's Lucene index: k1 0.9, b 0.4, Porter stems, stop words.

    Lucene rounds document lengths and splits words a little differently, so neighbours in a result
    list can be swapped.

    Args:
        products: The shop; of equal scores the earlier product comes first.
    """

    def __init__(self, products: Sequence[Product]):
        self._products = tuple(products)
        self._stem = Stemmer.Stemmer("porter").stemWords
        self._index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        self._index.index(self._words([_document(p) for p in products]), show_progress=False)

    def search(self, text: str) -> tuple[Product, ...]:
        """The products that share a word with `text`, best first, at most 50."""
        words = self._words([text])[0]
        if not words:
            return ()
        scores = np.asarray(self._index.get_scores(words))
        found = np.flatnonzero(scores > 0)
        if len(found) > TOP:
            # All that tie with the last one stay in, so that the order among them is settled below.
            least = np.partition(scores[found], -TOP)[-TOP]
            found = found[scores[found] >= least]
        best = found[np.argsort(-scores[found], kind="stable")][:TOP]
        return tuple(self._products[i] for i in best)

    def _words(self, texts: list[str]) -> list[list[str]]:
        words = bm25s.tokenize(
            texts,
            token_pattern=r"(?u)\b\w+\b",
            stopwords="en",
            stemmer=self._stem,
            return_ids=False,
            show_progress=False,
        )
        return [[str(word) for word in text] for text in words]


def _document(product: Product) -> str:
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product.options.items()
    )
    return " ".join([product.title, product.description, *product.bullets[:1], options]).lower()

"""WebShop's search engine: BM25 over titles, descriptions, first features and options."""

from __future__ import annotations

from collections.abc import Sequence

from race_jax.envs.bm25 import BM25Index
from race_jax.envs.webshop_catalogue import Product

TOP = 50
"""The most products that a search finds."""


class ProductIndex:
    """BM25 with the settings of WebShop's Lucene index.

    Lucene rounds document lengths and splits words a little differently, so neighbours in a result
    list can be swapped.

    Args:
        products: The shop; of equal scores the earlier product comes first.
    """

    def __init__(self, products: Sequence[Product]):
        self._products = tuple(products)
        self._index = BM25Index([_document(product) for product in products])

    def search(self, text: str) -> tuple[Product, ...]:
        """The products that share a word with `text`, best first, at most 50."""
        return tuple(self._products[i] for i, _ in self._index.best(text, TOP))


def _document(product: Product) -> str:
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product.options.items()
    )
    return " ".join([product.title, product.description, *product.bullets[:1], options]).lower()

"""`race-jax search-server`: documents behind Search-R1's retrieval route."""

from __future__ import annotations

import contextlib

from race_jax.envs.search_index import SAMPLE, SearchIndex, load_corpus
from race_jax.envs.search_server import SearchServer


def search_server(
    corpus: str = SAMPLE, port: int = 8000, host: str = "127.0.0.1", topk: int = 3
) -> int:
    r"""Serve a corpus of documents for searching, until interrupted.

    Args:
        corpus: JSONL, one document a line: `{"id": ..., "contents": "\"Title\"\nText"}`, or `title`
            and `text` instead of `contents`. By default 30 documents on an invented country.
        port: Where to listen; 0 for any free port, which is printed.
        host: The address to listen on. Whoever reaches it can search.
        topk: Documents per query where a request does not say, from 1 to 100.

    Returns:
        Exit code 0.

    Raises:
        ValueError: The corpus is faulty, or the port is not free.
    """
    documents = load_corpus(corpus)
    with SearchServer(SearchIndex(documents), port, host, topk) as server:
        print(f"{len(documents)} documents at {server.address}/retrieve", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0

"""A corpus of documents and its search index by BM25."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from race_jax import jsonl
from race_jax.envs.bm25 import BM25Index

SAMPLE = str(resources.files("race_jax.envs").joinpath("search_corpus.jsonl"))
"""A corpus of 30 documents on an invented country, for tests and first steps."""


class Document(NamedTuple):
    """One document; the first line of `contents` is its title, in quotes."""

    id: str
    contents: str


class Hit(NamedTuple):
    """A document that was found, and its score, above 0."""

    document: Document
    score: float


def read_rows(path: str | Path, what: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; blank lines are passed over.

    Raises:
        ValueError: The file is not there or holds none, or a line is no object.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file; name a JSONL file of {what}")
    rows = []
    for number, line in jsonl.lines(path):
        if line is None:
            raise ValueError(f"{path}, line {number}: longer than {jsonl.MAX_LINE_BYTES} bytes")
        if not line.strip():
            continue
        try:
            value = jsonl.loads(line).value
        except jsonl.JsonError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object, which each line must be")
        rows.append((number, value))
    if not rows:
        raise ValueError(f"{path} holds no line; it must hold {what}")
    return rows


def load_corpus(path: str | Path) -> list[Document]:
    r"""Read a corpus.

    Args:
        path: JSONL, one document a line: `{"id": ..., "contents": "\"Title\"\nText"}`, or `title`
            and `text` instead of `contents`. A line without `id` gets its place, from 0.

    Raises:
        ValueError: The file cannot be read, or a line has no text.
    """
    documents = []
    for number, row in read_rows(path, "documents"):
        contents = row.get("contents")
        if contents is None and isinstance(row.get("text"), str):
            contents = f'"{row.get("title", "")}"\n{row["text"]}' if row["text"].strip() else ""
        if not isinstance(contents, str) or not contents.strip():
            raise ValueError(
                f"{path}, line {number}: the document has no text; give it `contents`, or `title` "
                "and `text`, or delete the line"
            )
        documents.append(Document(str(row.get("id", len(documents))), contents))
    return documents


class SearchIndex:
    """A corpus and its ranking.

    Args:
        documents: The corpus, at least one; of equal scores the earlier document comes first.
    """

    def __init__(self, documents: Sequence[Document]):
        self.documents = tuple(documents)
        self._index = BM25Index([document.contents for document in self.documents])

    def search(self, query: str, topk: int) -> list[Hit]:
        """The documents that share a word with `query`, best first, at most `topk`."""
        return [Hit(self.documents[i], score) for i, score in self._index.best(query, topk)]

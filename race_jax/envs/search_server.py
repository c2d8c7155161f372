"""A retrieval server with Search-R1's route over a corpus of our own, by BM25."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from race_jax.envs.search_index import SearchIndex

MAX_BYTES = 1 << 24
"""The longest request that is read, in bytes."""

MAX_TOPK = 100
"""The most documents for one query."""


class SearchServer(ThreadingHTTPServer):
    """`POST /retrieve` finds documents; `GET /` says how many there are.

    A request is `{"queries": [text, ...], "topk": number or null, "return_scores": bool}`. The
    reply is `{"result": [[item, ...], ...]}` with one list per query, best first. With scores an
    item is `{"document": {"id", "contents"}, "score"}`, without it is the document alone.

    Args:
        index: What is searched.
        port: Where to listen; 0 for any free port.
        host: The address to listen on.
        topk: Documents per query where a request does not say, from 1 to 100.

    Raises:
        ValueError: The port is not free, or a number is out of range.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, index: SearchIndex, port: int = 8000, host: str = "127.0.0.1", topk: int = 3
    ):
        if not 1 <= topk <= MAX_TOPK:
            raise ValueError(f"topk is {topk}; it can be 1 to {MAX_TOPK}")
        if not 0 <= port <= 65535:
            raise ValueError(f"port is {port}; it can be 1 to 65535, or 0 for any that is free")
        self.index, self.topk = index, topk
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}, port {port} ({error.strerror}); name another port or "
                "address, or end what holds it"
            ) from None
        self.address = f"http://{host}:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line for a failed request; a client that goes away is none."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"request of {client_address}: {error!r}", file=sys.stderr, flush=True)

    def retrieve(self, request: Any) -> dict[str, Any]:
        """The reply to one request; ValueError says what is wrong with it."""
        if not isinstance(request, Mapping):
            raise ValueError("the request is no JSON object")
        queries, topk = request.get("queries"), request.get("topk")
        scored = request.get("return_scores", False)
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            raise ValueError("`queries` must be a list of texts")
        topk = self.topk if topk is None else topk
        if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
            raise ValueError(f"`topk` is {topk!r:.80}; it can be 1 to {MAX_TOPK}, or null")
        if not isinstance(scored, bool):
            raise ValueError("`return_scores` must be true or false")
        result = []
        for query in queries:
            hits = self.index.search(query, topk)
            result.append(
                [
                    {"document": hit.document._asdict(), "score": hit.score}
                    if scored
                    else hit.document._asdict()
                    for hit in hits
                ]
            )
        return {"result": result}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body of a reply leave together, at once.
    wbufsize = -1
    disable_nagle_algorithm = True
    # A thread waits so many seconds for its client's next request.
    timeout = 300

    @property
    def _search(self) -> SearchServer:
        return cast(SearchServer, self.server)

    def do_GET(self) -> None:
        if self.path == "/":
            self._reply(200, {"documents": len(self._search.index.documents)})
        else:
            self._reply(404, {"error": f"there is no GET {self.path:.80}"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BYTES:
            self.close_connection = True  # for the body is not read
            self._reply(413, {"error": f"the request must say its length, at most {MAX_BYTES}"})
            return
        body = self.rfile.read(int(length))
        if self.path != "/retrieve":
            self._reply(404, {"error": f"there is no POST {self.path:.80}"})
            return
        try:
            reply = self._search.retrieve(json.loads(body))
        except (ValueError, RecursionError) as error:
            self._reply(400, {"error": str(error)})
        else:
            self._reply(200, reply)

    def _reply(self, status: int, value: Mapping[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: there are many, and they hold what an agent asks."""

"""Real HTTP servers on loopback that answer as environment servers do, or fail on demand."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit


class StubServer(ThreadingHTTPServer):
    """Answers by `answer(method, route, body)`; `faults[route]` is a list of what fails first.

    A fault is a function of the handler. `seen` holds (method, route, body) of every request.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.faults = {}
        self.seen = []
        self.address = f"http://127.0.0.1:{self.server_port}"

    def routes(self):
        return [route for _, route, _ in self.seen]

    def handle_error(self, request, client_address):
        """Connections that break are part of the tests."""


@contextlib.contextmanager
def serving(answer, port=0):
    server = StubServer(answer, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StubServer

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        parts = urlsplit(self.path)
        self._serve("GET", parts.path, dict(parse_qsl(parts.query)))

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        self._serve("POST", self.path, json.loads(self.rfile.read(length) or b"{}"))

    def _serve(self, method, route, body):
        self.server.seen.append((method, route, body))
        faults = self.server.faults.get(route)
        if faults:
            faults.pop(0)(self)
            return
        try:
            found = self.server.answer(method, route, body)
        except NoRoute:
            self.reply(404, b'{"detail":"Not Found"}')
        except Exception:
            self.reply(500, b"Internal Server Error", "text/plain")
        else:
            self.reply(200, json.dumps(found).encode())

    def reply(self, status, data, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class NoRoute(Exception):
    """The server has no such route."""


def slow(handler):
    time.sleep(1.5)
    handler.reply(200, b"{}")


def trickle(handler):
    """A byte now and then, without end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(30):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def broken(handler):
    handler.reply(500, b"Internal Server Error", "text/plain")


def html(handler):
    handler.reply(200, b"<html><body>Please log in</body></html>", "text/html")


def gateway(handler):
    handler.reply(502, b"<html>502 Bad Gateway</html>", "text/html")


def dropped(handler):
    """The connection is closed without a word."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut(handler):
    """The reply ends in the middle."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"observation": "half')
    handler.close_connection = True


def saying(value):
    return lambda handler: handler.reply(200, json.dumps(value).encode())

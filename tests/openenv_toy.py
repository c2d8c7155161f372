"""A guessing game on a server that talks as openenv-core's does, and fails on demand.

`python openenv_toy.py FORM` prints its port. FORM is `schema` or `tools`, `full` (room for one
session), or what is wrong: `html`, `no-schema`, `no-object`, `far` (a reference to elsewhere) or
`twice` (two tools of one name). Guesses from 101 on bring the faults.
"""

import json
import os
import random
import socket
import sys
import time
from http import HTTPStatus

from websockets.sync.server import serve

FORM = sys.argv[1]
GUESS = {"$defs": {"Guess": {"type": "object", "properties": {"number": {"type": "integer"}}}}}
FIXED = {"type": {"const": "guess", "default": "guess"}, "metadata": {"type": "object"}}
ACTION = {
    **GUESS,
    "title": "GuessAction",
    "type": "object",
    "properties": {**FIXED, "guess": {"$ref": "#/$defs/Guess"}},
    "required": ["guess"],
}
CALL = {
    "type": "object",
    "properties": {
        "type": {"const": "call_tool", "default": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
}
FAR = {**ACTION, "properties": {"guess": {"$ref": "http://127.0.0.1:9/guess.json"}}}
ACTIONS = {
    "schema": ACTION,
    "full": ACTION,
    "no-object": {"type": "string"},
    "far": FAR,
    "no-schema": None,
}
TOOL = {"name": "guess", "description": "Guess.", "input_schema": GUESS["$defs"]["Guess"]}
ROOM = 1 if FORM == "full" else 8
sessions = []


def over_http(connection, request):
    if request.path == "/ws":
        return None
    if FORM == "html":
        reply = connection.respond(HTTPStatus.OK, "<html>Please log in</html>")
    else:
        reply = connection.respond(HTTPStatus.OK, json.dumps({"action": ACTIONS.get(FORM, CALL)}))
    del reply.headers["Content-Type"]
    reply.headers["Content-Type"] = "application/json"
    return reply


def error(code, message="it went wrong", **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def seen(observation, reward=None, done=False):
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


class Game:
    def reset(self, options):
        if options.get("level") == "none":
            where = {"loc": ["level"], "msg": "there is no such level"}
            return error("VALIDATION_ERROR", "Invalid message", errors=[where])
        if options.get("level") == "over":
            return seen({"text": "over"}, 0.0, True)
        self.secret, self.left = random.Random(options.get("seed")).randint(1, 9), 3
        return seen({} if FORM == "tools" else {"text": "Guess.", "left": 3, "note": None})

    def guess(self, number, connection):
        if not isinstance(number, int):
            where = {"loc": ["guess", "number"], "msg": "no integer"}
            return error("VALIDATION_ERROR", "Invalid message", errors=[where])
        if number > 100:
            return FAULTS[number](connection)
        self.left -= 1
        right = number == self.secret
        said = "right" if right else "too low" if number < self.secret else "too high"
        return seen(
            {"text": said, "left": self.left}, 1.0 if right else 0.0, right or not self.left
        )

    def step(self, data, connection):
        if FORM in ("schema", "full"):
            return self.guess(data["guess"]["number"], connection)
        if data["type"] == "list_tools":
            return seen({"tools": [TOOL, TOOL] if FORM == "twice" else [TOOL]})
        number = data["arguments"]["number"]
        if number in ERRORS:
            problem = {"error_type": ERRORS[number], "message": "it went wrong"}
            return seen({"tool_name": "guess", "result": None, "error": problem})
        reply = self.guess(number, connection)
        text = reply["data"]["observation"]["text"]
        result = {"content": [{"type": "text", "text": text}, {"type": "image"}], "is_error": False}
        reply["data"]["observation"] = {"tool_name": "guess", "result": result, "error": None}
        return reply


def slow(connection):
    time.sleep(1.0)
    return seen({"text": "late"})


def dropped(connection):
    connection.socket.shutdown(socket.SHUT_RDWR)
    return None


FAULTS = {
    101: slow,
    102: dropped,
    103: lambda _: error("EXECUTION_ERROR"),
    104: lambda connection: connection.send("<html>") or None,
    105: lambda _: {"type": "state", "data": {}},
    106: lambda _: seen("text alone"),
    107: lambda _: seen({"text": "x"}, 0.0, "yes"),
    108: lambda _: seen({"text": "x"}, "1"),
    109: lambda _: seen({"text": "x"}, 7.0),
    110: lambda _: os._exit(1),
    111: lambda _: seen({"text": "x" * 1_000_000}, 0.0),
}
ERRORS = {121: "execution_error", 122: "transport_error"}


def talk(connection):
    if len(sessions) >= ROOM:
        connection.send(json.dumps(error("CAPACITY_REACHED", "1 of 1 sessions", max_sessions=1)))
        return
    sessions.append(connection)
    game = Game()
    try:
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                reply = game.reset(message["data"])
            else:
                reply = game.step(message["data"], connection)
            if reply is not None:
                connection.send(json.dumps(reply))
    finally:
        time.sleep(0.05)  # A server needs a moment to take an environment down.
        sessions.remove(connection)


if __name__ == "__main__":
    with serve(talk, "127.0.0.1", 0, process_request=over_http) as server:
        print(server.socket.getsockname()[1], flush=True)
        server.serve_forever()

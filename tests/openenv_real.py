"""A game on openenv-core's own server; its own Python runs `python openenv_real.py PORT KIND`."""

import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, Field


class Guess(BaseModel):
    number: int = Field(description="From 1 to 9.")


class GuessAction(Action):
    guess: Guess


class GuessObservation(Observation):
    text: str = ""
    tries_left: int = 3


class Game:
    def begin(self, seed):
        self.secret, self.left = random.Random(seed).randint(1, 9), 3

    def hear(self, number):
        self.left -= 1
        if number == self.secret:
            return "right", 1.0, True
        return ("too low" if number < self.secret else "too high"), 0.0, self.left == 0


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.game = Game()

    def reset(self, seed=None, episode_id=None):
        self.game.begin(seed)
        return GuessObservation(text="Guess a number from 1 to 9.")

    def step(self, action, timeout_s=None):
        text, reward, done = self.game.hear(action.guess.number)
        return GuessObservation(text=text, tries_left=self.game.left, reward=reward, done=done)

    @property
    def state(self):
        return State()


class GuessMcp(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("guess")
        self.game, self.last = Game(), ("", 0.0, False)

        @server.tool
        def guess(number: int) -> str:
            """Guess a number from 1 to 9."""
            self.last = self.game.hear(number)
            return self.last[0]

        super().__init__(server)

    def reset(self, seed=None, episode_id=None):
        self.game.begin(seed)
        return Observation(metadata={"text": "hidden by the server"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools")

    def step(self, action, timeout_s=None, **kwargs):
        return self._with(super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._with(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _with(self, seen):
        if isinstance(seen, CallToolObservation):
            seen.reward, seen.done = self.last[1:]
        return seen

    @property
    def state(self):
        return State()


port, kind = int(sys.argv[1]), sys.argv[2]
if kind == "tools":
    app = create_fastapi_app(GuessMcp, CallToolAction, CallToolObservation, max_concurrent_envs=1)
else:
    app = create_fastapi_app(GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")

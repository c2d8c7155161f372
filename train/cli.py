"""The command line: `race-jax COMMAND`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_type_hints

from race_jax.train.interrupt import interrupt, on_interrupt


class Command(NamedTuple):
    """Where a command's function lives; it is imported only when it runs."""

    module: str
    function: str
    help: str


COMMANDS = {
    ("quickstart",): Command(
        "race_jax.train.quickstart",
        "quickstart",
        "the whole way in minutes: a tiny model from scratch, LoGiC, cover SFT, RL, a report",
    ),
    ("reproduce",): Command(
        "race_jax.train.reproduce",
        "reproduce",
        "all arms of the paper in the embedded world, over several seeds, in one table",
    ),
    ("logic",): Command(
        "race_jax.train.logic_cli",
        "logic",
        "find the turns of finished trajectories that can go without their reasoning",
    ),
    ("sft",): Command(
        "race_jax.train.sft_cli",
        "sft",
        "fine-tune a model on trajectories, with full reasoning or with covers",
    ),
    ("rl",): Command(
        "race_jax.train.rl_cli",
        "rl",
        "train a model on its own episodes: GRPO, with LoGiC's covers masking and closing",
    ),
    ("carl",): Command(
        "race_jax.train.carl_cli",
        "carl",
        "train a model on trees of its own episodes, forked where it is uncertain",
    ),
    ("carl-criticality",): Command(
        "race_jax.train.criticality_cli",
        "carl_criticality",
        "resample the actions of states: how much hangs on them, and how uncertain the model is",
    ),
    ("export",): Command(
        "race_jax.train.export_cli", "export", "write a run's weights as a Hugging Face directory"
    ),
    ("plan",): Command(
        "race_jax.train.plan_cli",
        "run_plan",
        "say what a run needs of each chip of a TPU slice, on a machine that has none",
    ),
    ("evaluate",): Command(
        "race_jax.train.evaluate_cli",
        "evaluate",
        "play an environment's tasks with a model, and measure success and reasoning",
    ),
    ("compare",): Command(
        "race_jax.train.evaluate_cli", "compare", "put several evaluations into one table and plot"
    ),
    ("search-server",): Command(
        "race_jax.train.search_cli",
        "search_server",
        "serve a corpus of documents for searching, with Search-R1's route",
    ),
    ("report",): Command(
        "race_jax.train.report_cli", "report", "show LoGiC's output or rollouts on one page"
    ),
    ("trajectories", "check"): Command(
        "race_jax.train.trajectories_cli", "check", "name every faulty line of a trajectory file"
    ),
    ("trajectories", "convert"): Command(
        "race_jax.train.trajectories_cli", "convert", "rewrite a trajectory file as chat messages"
    ),
}
"""Every command, by the words that call it."""

POSITIONAL = {"report", "check", "convert", "export", "compare"}
"""Functions whose required parameters are given without a flag."""


def usage(group: str = "") -> str:
    """What `race-jax --help` prints, or the help of one group of commands."""
    width = max(len(" ".join(words)) for words in COMMANDS)
    lines = [
        f"  {' '.join(words):{width}}  {c.help}"
        for words, c in COMMANDS.items()
        if group in ("", words[0])
    ]
    return "\n".join(
        [
            "usage: race-jax COMMAND [options]",
            "",
            "Find the turns of agents' trajectories that need no reasoning.",
            "",
            *lines,
            "",
            "race-jax COMMAND --help tells a command's options.",
        ]
    )


def find(arguments: Sequence[str]) -> tuple[Command, list[str], str] | None:
    """The command that the first words name, its arguments, and its words."""
    for words, command in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            return command, list(arguments[len(words) :]), " ".join(words)
    return None


def call(function: Callable[..., int], arguments: Sequence[str], words: str) -> int:
    """Parse `arguments` by the function's signature and docstring, and call it."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(
        prog=f"race-jax {words}", description=first_line(function), exit_on_error=False
    )
    settings = settings_of(function)
    if settings is None:
        # The parser would take a list of words for one word that holds a list.
        lists = [name for name, hint in get_type_hints(function).items() if hint == list[str]]
        for name in lists:
            parser.add_argument(name, nargs="+", type=str, metavar="FILE", help="one or more")
        positional = function.__name__ in POSITIONAL
        parser.add_function_arguments(function, as_positional=positional, skip=set(lists))
    else:
        parser.add_argument("--config", action="config", help="a YAML file of settings")
        parser.add_class_arguments(settings, as_group=False)
    for action in parser._actions:
        # Flags read --max-trajectories; the underscored spelling keeps working.
        dashed = [flag.replace("_", "-") for flag in action.option_strings]
        action.option_strings = dashed
        parser._option_string_actions.update(dict.fromkeys(dashed, action))
        if isinstance(action.default, bool):
            action.nargs, action.const = "?", True
    try:
        given = parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise ValueError(explain(error, arguments, words)) from None
    if settings is None:
        return function(**vars(given))
    given.pop("config")
    return function(settings(**vars(parser.instantiate(given))))


def explain(error: Exception, arguments: Sequence[str], words: str) -> str:
    """What the parser says of `arguments`, on one line, with where settings come from."""
    pairs = itertools.pairwise([*arguments, ""])
    files = [
        after if flag == "--config" else flag.removeprefix("--config=")
        for flag, after in pairs
        if flag.split("=")[0] == "--config"
    ]
    said = " ".join(str(error).split())
    if any(files):
        # The parser reads a file's text, and forgets where it was.
        said = said.replace("<unicode string>", files[-1])
        said += f" (settings are lines of `name: value` in {' and '.join(files)}, or flags)"
    return f"{said}; race-jax {words} --help tells what there is"


def settings_of(function: Callable[..., int]) -> type | None:
    """The dataclass of settings that is a function's one argument, if that is what it takes."""
    hints = get_type_hints(function)
    hints.pop("return", None)
    kinds = list(hints.values())
    one = kinds[0] if len(kinds) == 1 else None
    return one if isinstance(one, type) and dataclasses.is_dataclass(one) else None


def first_line(function: Callable[..., int]) -> str:
    """A docstring's first line."""
    return (function.__doc__ or "").strip().splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0: done. 1: done, but some of the input was bad. 2: nothing done, the call is at fault. 130:
    interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Only its tokenizers are used, so its advice to install torch misleads.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"race-jax {importlib.metadata.version('race-jax')}")
        return 0
    if arguments[0] in {words[0] for words in COMMANDS if len(words) > 1} and (
        len(arguments) == 1 or arguments[1] in ("-h", "--help")
    ):
        print(usage(arguments[0]))
        return 0 if len(arguments) > 1 else 2
    found = find(arguments)
    if found is None:
        print(usage(), file=sys.stderr)
        print(f"\nrace-jax: no command {' '.join(arguments[:2])!r}", file=sys.stderr)
        return 2
    command, rest, words = found
    interrupted = (
        f"race-jax {words}: interrupted; what was finished is kept, and the same command goes on "
        "from there"
    )

    def leave(*_: object) -> None:
        os.write(2, f"\n{interrupted}\n".encode())
        os._exit(130)

    try:
        # Importing takes seconds, in which a user may give up too, and modules that are stopped
        # midway raise whatever they like.
        with on_interrupt(leave):
            function = getattr(importlib.import_module(command.module), command.function)
        with on_interrupt(interrupt):
            return call(function, rest, words)
    except SystemExit as stop:  # The parser has said what is wrong, or printed its help.
        return int(stop.code or 0)
    except (ValueError, OSError, FloatingPointError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            reason = f"{error.filename}: {error.strerror}"
        print(f"race-jax {words}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

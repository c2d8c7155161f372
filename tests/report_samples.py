"""LoGiC records by hand and by a simulation, and a reader of the pages made from them."""

import json
import random
from html.parser import HTMLParser

from race_jax.report import write_report

VOID = {"meta", "br", "input", "img", "link", "hr", "path", "circle", "polyline"}


def make_turn(number_, decision, tokens=10, **other):
    return {
        "turn": number_,
        "decision": decision,
        "tested": False,
        "max_decrease": None,
        "worst_turn": None,
        "uncertain": False,
        "reasoning_tokens": tokens,
        "action_tokens": 5,
    } | other


def make_record(**other):
    """Three turns: kept as the first, removed, kept because of its own action."""
    messages = [{"role": "user", "content": "Open the door."}]
    for t, reasoning in enumerate(["Plan the way.", "", "Almost there."], 1):
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": reasoning,
                "tool_calls": [
                    {"function": {"name": "go", "arguments": json.dumps({"to": f"room {t}"})}}
                ],
            },
            {"role": "tool", "name": "go", "content": f"You are in room {t}."},
        ]
    return {
        "id": "door/1",
        "model": "tiny",
        "epsilon": 0.001,
        "dtype": "float32",
        "skip_form": "close",
        "noise_floor": 2e-5,
        "turns": [
            make_turn(1, "THINK", 30),
            make_turn(2, "SKIP", 20, tested=True, max_decrease=0.0004, worst_turn=3),
            make_turn(3, "THINK", 10, tested=True, max_decrease=0.41, worst_turn=3),
        ],
        "loglik_full": [-0.5, -0.25, -0.125],
        "loglik_final": [-0.5, -0.2501, -0.1254],
        "decreases": {"2": [-0.002, 0.0004], "3": [0.41]},
        "tokens_forwarded": 330,
        "tokens_minimum": 300,
        "tokens_naive": 900,
        "messages": messages,
        "original_reasoning": ["Plan the way.", "Go on.", "Almost there."],
        "success": True,
        "reward": 1.0,
    } | other


def simulate(trajectory, epsilons, seed=0):
    """Records as LoGiC would write them, with made-up decreases that obey its early exit."""
    rng = random.Random(f"{seed}/{trajectory['id']}")
    acts = [m for m in trajectory["messages"] if m["role"] == "assistant"]
    count = len(acts)
    table = [
        [rng.lognormvariate(-5.3 if j == t else -7.5, 2.2) for j in range(t, count)]
        for t in range(count)
    ]
    records = []
    for epsilon in epsilons:
        turns, decreases, removed = [], {}, set()
        for t, act in enumerate(acts):
            tokens = len(act["reasoning_content"]) // 4 + 2
            turn = make_turn(t + 1, "THINK", tokens)
            if t:
                stop = next((i for i, d in enumerate(table[t]) if d > epsilon), None)
                row = table[t] if stop is None else table[t][: stop + 1]
                turn |= {"tested": True, "max_decrease": max(row)}
                turn["worst_turn"] = t + 1 + row.index(max(row))
                turn["uncertain"] = abs(max(row) - epsilon) < epsilon / 20
                decreases[str(t + 1)] = row + [None] * (count - t - len(row))
                if stop is None:
                    turn["decision"] = "SKIP"
                    removed.add(t)
            turns.append(turn)
        messages, t = [], -1
        for message in trajectory["messages"]:
            t += message["role"] == "assistant"
            cut = message["role"] == "assistant" and t in removed
            messages.append(message | ({"reasoning_content": ""} if cut else {}))
        records.append(
            make_record(
                id=trajectory["id"],
                epsilon=epsilon,
                turns=turns,
                decreases=decreases,
                messages=messages,
                loglik_full=[-0.5] * count,
                loglik_final=[-0.5] * count,
                original_reasoning=[act["reasoning_content"] for act in acts],
            )
        )
    return records


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Page(HTMLParser):
    """The page as elements with their text; what a browser without scripts would show."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements, self._open = [], []
        self.feed(self.source)
        assert self._open == [], "unbalanced markup"

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attrs": dict(attrs), "text": "", "in": list(self._open)}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "attrs": dict(attrs), "text": "", "in": list(self._open)})

    def handle_endtag(self, tag):
        assert self._open and self._open[-1]["tag"] == tag, (tag, self.getpos())
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def find(self, tag=None, **attrs):
        wanted = {key.rstrip("_"): value for key, value in attrs.items()}
        return [
            e
            for e in self.elements
            if (tag is None or e["tag"] == tag)
            and all(
                set(value.split()) <= set((e["attrs"].get(key) or "").split())
                for key, value in wanted.items()
            )
        ]

    def texts(self, tag, element):
        """The texts of all `tag` inside an element."""
        inside = [e for e in self.find(tag) if any(parent is element for parent in e["in"])]
        return [e["text"].strip() for e in inside]


def make_page(tmp_path, records, **options):
    out = tmp_path / "page.html"
    write_report(records, out, **options)
    return Page(out)

"""One small record of each form that a trajectory file may have."""

CALL = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": {"to": "hall"}}}
BASE = {
    "id": "a",
    "messages": [
        {"role": "system", "content": "Act."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "go", "content": "You went."},
        {"role": "assistant", "content": "Done.", "reasoning_content": ""},
    ],
}
TURN = {"reasoning": [3, 4], "skip": [4], "action": [5, 6], "observation": [7]}
TOKENS = {"id": "t", "tokens": {"prompt": [1, 2], "turns": [TURN, {"action": [8]}]}}
SPANS = {
    "id": "s",
    "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    "spans": [
        {"kind": "prompt", "start": 0, "end": 2},
        {"kind": "reasoning", "start": 2, "end": 4},
        {"kind": "action", "start": 4, "end": 6},
        {"kind": "observation", "start": 6, "end": 7},
        {"kind": "action", "start": 7, "end": 8},
    ],
}
TALK = {
    "item_id": "webshop_3",
    "conversations": [
        {"from": "human", "loss": None, "value": "You shop."},
        {"from": "gpt", "loss": False, "value": "OK."},
        {"from": "human", "loss": None, "value": "Find a lamp."},
        {"from": "gpt", "loss": True, "value": "Thought:\nLook.\n\nAction:\nsearch[lamp]"},
        {"from": "human", "loss": None, "value": "Results"},
        {"from": "gpt", "loss": True, "value": "Action: click[b0]\n"},
    ],
}

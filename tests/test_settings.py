from race_jax.settings import differing_settings, flatten_settings


def test_settings_flatten_to_dotted_names():
    assert flatten_settings({"a": {"b": {"c": 1}}, "d": (1, 2)}) == {"a.b.c": 1, "d": [1, 2]}


def test_fields_that_differ_are_named_with_both_values():
    old = {"seed": 0, "env": {"name": "potions", "size": [1, 2]}, "gone": None}
    new = {"seed": 1, "env": {"name": "potions", "size": (1, 2)}, "come": "x"}
    assert differing_settings(old, new) == [
        "seed was 0 and is now 1",
        "gone was None and is now '<not set>'",
        "come was '<not set>' and is now 'x'",
    ]
    assert differing_settings(old, new, free=("seed", "gone", "come")) == []

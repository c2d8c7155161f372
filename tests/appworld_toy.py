"""Make an AppWorld root with one invented task; run by the Python that has AppWorld.

APPWORLD_PYTHON tests/appworld_toy.py ROOT
"""

import json
import sys
from pathlib import Path

TASK = "aaaaaaa_1"
INSTRUCTION = "Complete this task with the answer 4."
EVALUATION = """
def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    task = models.end.supervisor.Task.find_one(id=1)
    with test("assert that the answer is 4."):
        test.case(float(task.answer), "==", 4.0)
    with test("assert that the task is completed."):
        test.case(task.status, "==", "success")
"""


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value, default=dict))


def main(root):
    from appworld import update_root
    from appworld.apps import get_all_apps
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.collections.models import ModelCollection

    data = Path(root) / "data"
    apps = get_all_apps(skip_admin=True)
    for app, docs in ApiDocCollection.build(tuple(apps)).items():
        marked = {name: {**doc, "canary_string": ""} for name, doc in docs.items()}
        write(data / "api_docs" / "standard" / f"{app}.json", marked)
    update_root(root)
    load = {"from_db_home_path": None, "load_apps": [*apps, "admin"], "create_db": True}
    models = ModelCollection.load(to_db_home_path=":memory:toy", **load)
    person = {"first_name": "Ann", "last_name": "Lee", "email": "ann@example.com"}
    person["phone_number"] = "5551234567"
    models.admin.MainUser(birthday="1990-01-01", sex="female", **person).save()
    models.supervisor.Supervisor(birthday="1990-01-01", sex="female", **person).save()
    models.supervisor.Task(
        supervisor_id=1, instruction=INSTRUCTION, status=None, answer="null"
    ).save()
    models.supervisor.AccountPassword(
        supervisor_id=1, account_name="spotify", password="it's \"Ann's\""
    ).save()
    task = data / "tasks" / TASK
    write(
        task / "specs.json",
        {
            "instruction": INSTRUCTION,
            "supervisor": person,
            "datetime": "2023-05-18T12:00:00",
            "db_version": "0.1.0",
        },
    )
    for folder in (data / "base_dbs", task / "dbs"):
        models.save(db_home_path=str(folder), app_names=[*apps, "admin"])
    truth = task / "ground_truth"
    counts = {"num_apps": 1, "num_apis": 1, "num_api_calls": 1, "num_solution_code_lines": 1}
    write(truth / "metadata.json", {"difficulty": 1, "mode": "minimal", **counts})
    for name, value in (("public_data", {}), ("private_data", {}), ("answer", 4)):
        write(truth / f"{name}.json", value)
    write(
        truth / "test_data.json",
        [
            {"requirement": "assert that the answer is 4.", "label": "no_op_fail"},
            {"requirement": "assert that the task is completed.", "label": "no_op_fail"},
        ],
    )
    write(truth / "evaluation.py", EVALUATION)
    for name in ("train", "dev", "test_normal", "test_challenge"):
        write(data / "datasets" / f"{name}.txt", f"{TASK}\n")


if __name__ == "__main__":
    main(sys.argv[1])

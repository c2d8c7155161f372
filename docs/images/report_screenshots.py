"""Take the report's pictures: PYTHONPATH=tests python docs/images/report_screenshots.py KIND ...

    main PAGE THRESHOLD TRAJECTORY TURN
    rollouts PAGE TRAJECTORY TURN
    tree PAGE TREE STATE

Trajectories, trees and states count from 0, turns from 1.
"""

import sys
import tempfile
from pathlib import Path

from chromium import Browser

HERE = Path(__file__).parent


def main(page: str, epsilon: str, trajectory: str, turn: str) -> None:
    """Write report-overview, report-transcript, report-dark and report-phone .png beside this."""
    path = Path(page).resolve()
    select = (
        "[...document.querySelectorAll('.pick label')]"
        f".find((label) => label.textContent.trim() === '{epsilon}').click()"
    )
    views = {
        "overview": ({"width": 1200, "height": 1000}, ""),
        "transcript": ({"width": 1200, "height": 1250}, f"r{trajectory}"),
        "dark": ({"width": 1200, "height": 1000, "dark": True}, f"r{trajectory}-{turn}"),
        "phone": ({"width": 375, "height": 812, "scale": 2}, f"r{trajectory}-{turn}"),
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        for name, (options, anchor) in views.items():
            browser.open(path, **options)
            browser.run(select)
            browser.run(f"location.hash = '{anchor}'")
            browser.settle()
            browser.screenshot(HERE / f"report-{name}.png")
        browser.close()


def rollouts(page: str, trajectory: str, turn: str, folder: Path = HERE, **view) -> None:
    """Write report-rollouts.png, with the colours on."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        browser.open(Path(page).resolve(), **{"width": 1200, "height": 1000, **view})
        browser.run(f"location.hash = 'r{trajectory}-{turn}'")
        browser.run("document.getElementById('lp').click()")
        browser.settle()
        browser.screenshot(folder / "report-rollouts.png")
        browser.close()


def tree(page: str, number: str, state: str, folder: Path = HERE) -> None:
    """Write report-tree.png, a tree with the turn of one state."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        browser.open(Path(page).resolve(), width=1200, height=760)
        browser.run(
            f"const item = document.querySelectorAll('#tree-list details')[{number}];"
            "item.open = true; item.scrollIntoView(); 1"
        )
        browser.settle()
        browser.run(f"document.getElementById('t{number}-{state}').focus()")
        browser.settle()
        browser.screenshot(folder / "report-tree.png")
        browser.close()


if __name__ == "__main__":
    {"main": main, "rollouts": rollouts, "tree": tree}[sys.argv[1]](*sys.argv[2:])

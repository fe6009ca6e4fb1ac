"""What the README promises: its example runs, and the files that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.strip().splitlines()) <= 15
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["paths"].shape == (512, 2, 4, 4)
    assert capsys.readouterr().out.startswith("good: trust gamma ± ")


def test_every_file_that_it_links_to_is_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 6
    assert all((ROOT / link).exists() for link in links), links


def test_it_is_one_screen():
    assert len(README.splitlines()) <= 50

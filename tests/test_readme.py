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
    assert "gamma against truth" in capsys.readouterr().out


def test_every_file_that_it_names_is_there():
    for path in re.findall(r"`((?:sdeinfer|models)/[\w./]*)`", README) + re.findall(r"\]\((notebooks/[^)]+)\)", README):
        assert (ROOT / path).exists(), path

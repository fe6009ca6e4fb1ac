"""Which tests run by default: what each takes, and what would be lost without it.

    uv run --with coverage python tests/selection.py            # an hour on two cores; writes selection.tsv
    uv run --with coverage python tests/selection.py --times    # seconds and lines alone; mutations as they are there

Default and long tests run once, each under a coverage context of its own; then every mutation of `mutations` is tried
with the default tests beside it, all of them. The table has a row for each test (its cases together) that takes more
than `SHOWN` seconds or is the only default guard of something: seconds of its default and of its long cases, lines of
the package that no other test runs, and mutations that it catches, those first that no other default test catches.
Lines are counted where they run first: what a compiled program or a fixture shares is of the test that came first.
"""

import argparse
import collections
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("selection.tsv")
SHOWN = 1.0
"""Seconds below which a test without a guard of its own is left out of the table."""

MEASURED = "SDEINFER_MEASURED"
"""Names the folder to which processes write what they measure."""


class Measured:
    """A plugin of pytest that measures each test, in every process that runs some."""

    def __init__(self, folder: Path):
        import coverage

        os.environ["COVERAGE_CORE"] = "ctrace"  # the one that has contexts
        self.coverage = coverage.Coverage(
            data_file=str(folder / "coverage"),
            data_suffix=True,
            config_file=False,
            include=[str(ROOT / "sdeinfer" / "*"), str(ROOT / "models" / "*")],
        )
        self.coverage.start()
        self.folder, self.rows = folder, {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Measure one test with its fixtures."""
        self.coverage.switch_context(item.nodeid)
        start = time.monotonic()
        result = yield
        kind = "long" if item.get_closest_marker("long") else "default"
        self.rows[item.nodeid] = (kind, time.monotonic() - start)
        return result

    def pytest_sessionfinish(self):
        """Write what was measured."""
        self.coverage.stop()
        self.coverage.save()
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(self.rows), "utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Register the plugin where pytest is given `-p selection`, before anything imports the package."""
    config.pluginmanager.register(Measured(Path(os.environ[MEASURED])))


def measured() -> tuple[dict[str, tuple[str, float]], dict[str, list[str]], float]:
    """Kind and seconds of each case; the lines that one test alone runs; the percentage that default tests run."""
    import coverage

    with tempfile.TemporaryDirectory(prefix="sdeinfer-measured-") as name:
        folder, kinds = Path(name), "not slow and not docs and not torch and not benchmark"
        paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {MEASURED: name, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "selection", "-m", kinds]
        if (code := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode) > 1:
            raise SystemExit(f"pytest ended with {code}")  # tests that fail are measured too
        rows = {}
        for file in folder.glob("*.json"):
            rows |= json.loads(file.read_text("utf-8"))
        everything = coverage.Coverage(data_file=str(folder / "coverage"), config_file=False)
        everything.combine([name])
        data, alone, by_default, lines = everything.get_data(), collections.defaultdict(list), 0, 0
        for file in (file for file in data.measured_files() if file.endswith(".py")):
            of_lines, (_, statements, *_) = data.contexts_by_lineno(file), everything.analysis2(file)
            lines += len(statements)
            for line in statements:
                contexts = of_lines.get(line, [])
                at_import = "" in contexts
                tests = {test_of(context) for context in contexts if context}
                by_default += at_import or any(rows[c][0] == "default" for c in contexts if c)
                if len(tests) == 1 and not at_import:
                    alone[tests.pop()].append(f"{Path(file).relative_to(ROOT)}:{line}")
    return rows, alone, 100 * by_default / lines


def test_of(case: str) -> str:
    """The test of a case, as the table names it."""
    return case.removeprefix("tests/").partition("[")[0]


def caught() -> dict[str, list[str]]:
    """The default tests beside each mutation that it fails."""
    import mutations

    processes = len(os.sched_getaffinity(0))
    return {
        mutation.name: sorted({test_of(test) for test in failed})
        for mutation, _, failed in mutations.attempts(mutations.MUTATIONS, processes=processes)
    }


def guards_in(table: Path) -> dict[str, list[str]]:
    """The tests that catch each mutation, as the table has them."""
    guards = collections.defaultdict(list)
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader((line for line in file if line[0] != "#"), delimiter="\t"):
            for name in filter(None, f"{row['catches alone']}; {row['catches']}".split("; ")):
                guards[name].append(row["test"])
    return guards


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description="Measure what each test takes and guards.")
    parser.add_argument("--times", action="store_true", help="keep the mutations of the table")
    options = parser.parse_args()
    rows, alone, share = measured()
    guards = guards_in(TABLE) if options.times else caught()
    catches = collections.defaultdict(lambda: ([], []))
    for name, tests in guards.items():
        for test in tests:
            catches[test][len(tests) > 1].append(name)
    seconds = collections.defaultdict(collections.Counter)
    for case, (kind, taken) in rows.items():
        seconds[test_of(case)][kind] += taken
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {commit}, {time.strftime('%Y-%m-%d')}: default tests run {share:.1f} % of the lines\n")
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(["test", "default s", "long s", "lines alone", "catches alone", "catches"])
        for test in sorted(seconds, key=lambda test: -seconds[test].total()):
            taken, (own, shared) = seconds[test], catches[test]
            if taken.total() >= SHOWN or own or shared:
                cells = [f"{taken['default']:.1f}", f"{taken['long']:.1f}", len(alone[test])]
                table.writerow([test, *cells, "; ".join(own), "; ".join(shared)])
    missing = [name for name, tests in guards.items() if not tests]
    print(f"{share:.1f} % of the lines by default; mutations without a guard: {'; '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())

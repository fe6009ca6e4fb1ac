"""Every mutation is of a text that its file has once, and names tests that there are."""

import pytest
from mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_and_its_tests_are_there(mutation):
    assert (ROOT / "sdeinfer" / mutation.file).read_text("utf-8").count(mutation.old) == 1
    for test in mutation.tests.split():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text("utf-8")

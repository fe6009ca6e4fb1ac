"""Audits of PyTorch's and Hugging Face's models: what they see, and what the command says of models.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch, transformers and the dependencies of this package; its default
is the one that runs the tests.
"""

import json

import numpy as np
import pytest
import torch_interpreter
from budget import assert_estimate

pytestmark = pytest.mark.torch

LAYERS = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """The results that the script writes."""
    folder = tmp_path_factory.mktemp("audits")
    torch_interpreter.run("torch_audits.py", folder, JAX_ENABLE_X64="1")
    return json.loads((folder / "written.json").read_text())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "encoder"])
def test_correct_models_pass(name, written):
    found = written["models"][name]
    assert found["passed"], found["verdict"]
    stream = np.array(found["stream"])
    assert len(stream) == LAYERS + 1
    np.testing.assert_allclose(stream, found["own"], rtol=1e-5, atol=1e-6 * stream.max())


def test_copies_of_one_layer_are_seen(written):
    found = written["models"]["encoder of copies"]
    assert "attention branches of layers 0, 1, 2, 3 have the same weights; mlp branches of" in found["verdict"]


def test_factors_outside_of_branches_are_part_of_strengths(written):
    found = written["factors"]
    np.testing.assert_allclose(found["strengths"], np.multiply(found["of modules"], [0.3, 0.5] * LAYERS), rtol=1e-5)
    for kind, factor in (("attention", 0.3), ("mlp", 0.5)):
        ratio, error = found["ratios"][f"{kind}.strength"]
        assert_estimate(ratio, factor, error)
    assert found["passed"] == [False, True], found["verdict"]


def test_growth_of_gradients(written):
    found = written["gradients"]
    by_audit, by_states = np.transpose(found["growths"])
    np.testing.assert_allclose(by_audit, by_states, rtol=1e-5)
    assert len(by_audit) == 4
    assert found["quantities"] == ["attention.strength", "growth of gradients", "growth of the stream", "mlp.strength"]


def test_a_model_in_training_is_left_as_it_was(written):
    assert written["untouched"]["changed"] == {"monitor": [], "gradients": []}
    assert written["untouched"]["verdict"] == "at initialisation up to step 0"


def test_compiled_models_and_inputs_that_are_no_tensors_have_the_same_audit(written):
    assert len(written["compiled"]) == 7
    assert set(written["compiled"]) == {written["compiled"][0]}
    assert written["compiled"][0].startswith("attention.strength")


def test_a_monitor_sees_training(written):
    assert written["monitor"]["passed"] == [True, False, False]
    assert written["monitor"]["verdict"].startswith("not at initialisation from step 10 on, in transformer.h.")


COMMANDS = {
    "config": (0, "passed: GPT2Model: attention.strength "),
    "other recipe": (1, "failed: GPT2Model: "),
    "trained": (1, "failed: GPT2LMHeadModel: "),
    "perturbed": (1, "failed: GPT2Model: "),
    "quantised": (2, "sdeinfer: model: h.0.mlp.c_fc.weight is torch.int8: quantised weights are not those of a recipe"),
    "no branch": (2, "sdeinfer: branches: no residual branch found in Sequential: "),
    "no match": (2, "sdeinfer: branches: attention: 'h.*.attention' matches no module of GPT2Model"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command(name, written):
    (code, lines), (expected, start) = written["commands"][name], COMMANDS[name]
    assert code == expected, lines
    assert lines[-1].startswith(start)
    if code == 2:
        assert len(lines) == 1

"""Models of Hugging Face and PyTorch that are tuned and initialised: audits, and promises against initialisations.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch, transformers and the dependencies of this package.
"""

import json

import numpy as np
import pytest
import torch_interpreter
from budget import assert_estimate

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """The results that the script writes."""
    folder = tmp_path_factory.mktemp("initialised")
    torch_interpreter.run("torch_initialised.py", folder, JAX_ENABLE_X64="1")
    return json.loads((folder / "initialised.json").read_text())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "phi3", "bert", "vit", "encoder"])
def test_tuned_models_pass_and_keep_promises(name, written, record):
    """The audit of one initialisation passes; 200 have the promised mean log norm and mean correlation."""
    found = written[name]
    print(f"\n{name}: strength {found['strength']:.3f}; {found['verdict']}")
    assert found["passed"], found["verdict"]
    # A model that cannot run keeps its weights.
    assert found["refused"]
    assert found["unchanged"]
    cells = [f"{found['strength']:.3f}"]
    for place, what in enumerate(("log norm", "correlation")):
        promised, measured = found["promised"][place], found["measured"][place]
        error = np.hypot(found["promised_error"][place], found["measured_error"][place])
        sds = f"sds {found['promised_sd'][place]:.4f} and {found['measured_sd'][place]:.4f}"
        z = (measured - promised) / (error or 1)
        print(f"  {what}: promised {promised:.4f}, 200 initialisations {measured:.4f}, {sds}, z = {z:.1f}")
        cells.append(f"{promised:.3f}, {measured:.3f} ({error:.3f})")
        if name == "bert" and what == "log norm":
            # A norm follows every sum.
            assert abs(measured - promised) < 1e-3
        else:
            assert_estimate(measured, promised, error)
    record("promises_of_blocks", {name: cells})

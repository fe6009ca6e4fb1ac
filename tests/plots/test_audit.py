"""The figure of an audit: the marks of all matrices, apart from each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot

import sdeinfer as si
from sdeinfer.plots import plot_audit


def audit_of(layers: int, *, factor: float = 1.0):
    """An audit of a network of seven matrices a layer; the factor is that of the attention's output."""
    normal = np.random.default_rng(0).standard_normal
    shapes = {**dict.fromkeys("qkvo", (16, 16)), "gate": (16, 32), "up": (16, 32), "down": (32, 16)}
    parameters = {name: jnp.asarray(0.1 * normal((layers, *shape))) for name, shape in shapes.items()}
    parameters["o"] = factor * parameters["o"]

    def network(parameters, x):
        for layer in range(layers):
            W = {name: value[layer] for name, value in parameters.items()}
            weights = jax.nn.softmax((x @ W["q"]) @ (x @ W["k"]).T / 4)
            x = x + weights @ (x @ W["v"]) @ W["o"]
            x = x + (jax.nn.silu(x @ W["gate"]) * (x @ W["up"])) @ W["down"]
        return x

    return si.audit((network, parameters), normal((4, 16)))


@pytest.fixture(scope="module")
def shallow():
    return audit_of(2)


@pytest.fixture(scope="module")
def deep():
    return audit_of(10, factor=4.0)


def marks(panel):
    return [bars.lines[0] for bars in panel.containers]


def test_roles_differ_in_colour_and_in_marker(shallow):
    (panel,) = plot_audit(shallow)
    points = marks(panel)
    assert len(points) == 7
    assert len({line.get_color() for line in points}) == len({line.get_marker() for line in points}) == 7
    assert len(panel.figure.legends[0].get_texts()) == 7
    assert panel.get_ylabel() == "σ"


def test_marks_stand_apart(shallow, deep):
    """As far as their size, on one panel of half the width of a page."""
    for audit in (shallow, deep):
        panel = pyplot.figure(figsize=(5, 3)).subplots()
        plot_audit(audit, axes=panel)
        panel.figure.canvas.draw()
        places = np.sort(np.concatenate([line.get_xdata() for line in marks(panel)]))
        pixels = panel.transData.transform(np.stack([places, np.ones_like(places)], axis=1))[:, 0]
        size = marks(panel)[0].get_markersize() * panel.figure.dpi / 72
        assert np.diff(pixels).min() >= size


def test_many_matrices_have_a_panel_for_each_role(deep):
    panels = plot_audit(deep)
    sigma = {row.matrix.role: [] for row in deep.rows}
    for row in deep.rows:
        sigma[row.matrix.role].append(row.law.sd)
    assert [panel.get_title() for panel in panels] == list(sigma)
    for panel in panels:
        (line,) = marks(panel)
        np.testing.assert_array_equal(line.get_xdata(), np.arange(10))
        np.testing.assert_allclose(line.get_ydata(), sigma[panel.get_title()])
    assert len({panel.get_ylim() for panel in panels}) == 1
    assert {panel.get_yscale() for panel in panels} == {"log"}

"""Tables of verdicts, tuned layers and layers in notebooks: their numbers, with texts escaped."""

import dataclasses
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp

import sdeinfer as si
from sdeinfer.diagnostics import Check, Verdict

LAYER = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=1.0, c_minus=-3.0, heads=4, pattern=si.CAUSAL)


def shown(thing) -> ET.Element:
    return ET.fromstring(thing._repr_html_())


def text(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def tables(element: ET.Element) -> list[list[list[str]]]:
    return [[[text(cell) for cell in row] for row in table.iter("tr")] for table in element.iter("table")]


def test_verdicts_are_tables_under_their_questions():
    fit = Check(
        (
            Verdict("converged", "R-hat", 1.01, 1.05, passed=True, advice="draw more"),
            Verdict("identified", "tau0 contraction", 0.3, 0.5, passed=False, advice="the data say little"),
            Verdict("calibrated", "misfit", 2.0, 0.2, passed=False, advice="<b>not</b> & the law"),
        ),
        skipped=("ranks: one chain",),
        notes=("these data do not exclude attention",),
    )
    page = shown(fit)
    assert text(page.find("p")) == "Do not trust yet: misfit: <b>not</b> & the law."
    questions = {text(each.find("summary")): each for each in page.iter("details")}
    rows = {question: tables(each)[0][1:] for question, each in questions.items()}
    assert rows == {
        "Did the sampler converge? Yes.": [["R-hat", "1.01", "1.05", "passed"]],
        "Do the data identify the parameters? No.": [["tau0 contraction", "0.3", "0.5", "the data say little"]],
        "Do the layers follow the fitted law? No.": [["misfit", "2", "0.2", "<b>not</b> & the law"]],
    }
    assert [each.get("open") for each in questions.values()] == [None, "open", "open"]  # what passed is folded
    states = [row.get("class") for row in page.iter("tr") if row.get("class")]
    assert states == ["row-pass", "row-unsure", "row-fail"]
    assert [text(note) for note in page.iter("li")] == ["These data do not exclude attention.", "Ranks: one chain."]


def test_a_tuned_layer_has_its_parameters_and_constraints(tuned):
    page = shown(tuned)
    parameters, constraints, *_ = tables(page)
    assert [row[0] for row in parameters[1:]] == ["gamma", "c_gap", "c_plus", "c_minus"]
    assert parameters[1][1] == f"{tuned.values['gamma']:.4g}"
    assert [row[0] for row in constraints[1:]] == list(map(str, tuned.problem.constraints))
    assert text(page.find("p")) == f"{tuned.verdict}."
    assert tuned.missed == 0
    slack = [-1.0, *tuned.criteria["slack"][1:]]
    missed = dataclasses.replace(tuned, criteria=tuned.criteria.assign(slack=slack, error=0.01))
    assert missed.missed == 1
    classes = [row.get("class") for row in shown(missed).iter("tr") if row.get("class")]
    assert classes == ["row-fail", *["row-pass"] * 4]
    assert "misses its bound" in missed.verdict


def test_a_layer_has_the_values_of_its_parameters_and_its_settings():
    page = shown(LAYER)
    assert (
        text(page.find("p"))
        == "ShapedTransformer, heads 4, output projection False, expansion 1, pattern a causal mask"
    )
    (table,) = tables(page)
    assert table[1] == ["γ", "gamma", "0.6", "in (0, 1]", "strength of the residual branch"]
    assert [row[2] for row in table[1:]] == ["0.6", "1", "1", "-3"]


def test_parameters_over_depth_of_many_networks_and_traced():
    def values(layer):
        (table,) = tables(shown(layer))
        return [row[2] for row in table[1:]]

    assert values(si.OverDepth(LAYER, gamma=lambda t: 0.5 + t)) == ["over depth", "1", "1", "-3"]
    assert values(si.ShapedMLP(c_plus=jnp.array([0.0, 2.0]), c_minus=-1.0)) == ["0 … 2, 2 values", "-1"]
    pages = []
    jax.eval_shape(lambda tau0: pages.append(values(si.ShapedAttention(0.5, tau0))), 1.0)
    assert pages == [["traced", "traced"]]  # under jit, constants too

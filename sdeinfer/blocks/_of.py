"""A model as a stack of blocks, read from one pass. Tests: `tests/blocks/test_of.py`."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks._attention import SelfAttention
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._mlp import MLP
from sdeinfer.blocks._values import activations_of_values, base_of_rotations, is_softmax, norms_of_values
from sdeinfer.covariance import CAUSAL, Pattern
from sdeinfer.layers import Stack
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._attention import attended, attention_of, logits_of
from sdeinfer.passes._models import made
from sdeinfer.passes._passes import Passes
from sdeinfer.passes._record import Node
from sdeinfer.passes._stream import Link
from sdeinfer.passes._taps import Branch, Taps, branches_of, in_rows, states_of, stream_of

OF_ATTENTION = ("query", "key", "value", "attention output")
OF_MLP = ("gate", "up", "mlp output")

type Variance = Callable[[Matrix], float]
"""The variance of a matrix's entries."""


def of(model: Any, inputs: Any = None, *, recipe: Any = None, stream: str | None = None, seed: int = 0) -> Stack:
    """A model as the blocks of one of its layers, read from one forward pass and its weights.

    Strengths, gains and temperatures are those of the weights as they are, pooled over layers; by a recipe those that
    it declares. A factor of a branch, a gain of a norm and a LayerScale count as factors of the weights.

    Arguments:
        model: a module of PyTorch, Flax or Equinox, or a function that makes one, as `si.audit` takes it.
        inputs: the model's input, see `si.audit`; None for tokens, images or vectors that fit.
        recipe: a recipe of `si.audit`, or its name, for the standard deviations that are declared.
        stream: a glob of parameter names that finds the stream in a model with several, as "decoder.*".
        seed: seed of the weights, if `model` is a function.

    Returns:
        The `Stack`, for `si.tune`, `si.fit(si.models.branches, …)` and `si.sample_branches`.

    Raises:
        InputError: for what no block has, with layer and module.
    """
    return network_of(model, inputs, recipe=recipe, stream=stream, seed=seed).stack


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkOfBlocks:
    """A model as blocks.

    Attributes:
        stack: the blocks of one layer.
        depth: number of layers.
        width: n.
        V0: covariances of the tokens before the first layer, shape (prompts, m, m).
    """

    stack: Stack
    depth: int
    width: int
    V0: np.ndarray


def network_of(
    model: Any, inputs: Any = None, *, recipe: Any = None, stream: str | None = None, seed: int = 0
) -> NetworkOfBlocks:
    """A model as blocks, with its sizes and the tokens before its first layer; see `of`."""
    network = made(model, seed)
    reader: StackReader | None = None

    def plan(account: Account) -> Taps:
        nonlocal reader
        reader = StackReader(account, stream_of(account, stream))
        reader.tap()
        return reader.taps

    account = Passes(inputs).show(network, plan)
    assert reader is not None
    stack, X = reader.stack(variance_of(account, network, recipe)), reader.start
    assert X is not None
    prompts = X.reshape(-1, *X.shape[-2:])[: None if inputs is not None else 1]
    return NetworkOfBlocks(stack, reader.chain[-1].layer + 1, reader.width, prompts @ prompts.mT / reader.width)


def variance_of(account: Account, network: Any = None, recipe: Any = None) -> Variance:
    """The mean square of a matrix's entries, or the variance that a recipe declares."""
    rule = None
    if recipe is not None:
        from sdeinfer.auditing._audit import recipe_of

        rule = recipe_of(recipe, network)

    def variance(matrix: Matrix) -> float:
        if rule is not None:
            named = rule.named(matrix.array)
            sd = rule.sd(matrix) if named is None else math.hypot(named.mean, named.sd)
            if sd is not None:
                return sd**2
        return float(np.square(account.parameters[matrix.name].entries()).mean())

    return variance


@dataclasses.dataclass(eq=False)
class _BranchFacts:
    """What one branch is, apart from numbers: facts that all layers have in common."""

    branch: Branch
    position: str | None
    norms: set[str] = dataclasses.field(default_factory=lambda: {"layer", "rms"})
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    factors: dict[str, float] = dataclasses.field(default_factory=dict)
    activations: dict[str, float] = dataclasses.field(default_factory=dict)
    pattern: Pattern = dataclasses.field(default_factory=Pattern)

    @property
    def common(self) -> dict[str, Any]:
        return {"place of the norm": self.position, "mask": self.pattern, **self.shape}


class StackReader:
    """Reads the blocks of a stream: first the graph, then values of a second pass, then numbers."""

    def __init__(self, account: Account, chain: list[Link]):
        self.account, self.graph, self.chain = account, account.graph, chain
        self.branches = branches_of(account, chain)
        self.width = chain[0].sum.shape[-1]
        self.facts = [self._of_graph(branch) for branch in self.branches]
        self.faults: list[str] = []
        self.taps = Taps()
        self.start: np.ndarray | None = None

    def tap(self) -> None:
        """Ask for the values that show norms, activations, masks and rotations, and for the first tokens."""
        placed = in_rows(self.account, self.chain)

        def keep(values: dict[str, Any]) -> None:
            self.start = _numbers(placed(values["X"]))

        self.taps.see("the tokens before its first layer", {"X": states_of(self.branches)[0]}, keep)
        for facts in self.facts:
            if facts.position is not None:
                self._tap_norm(facts)
            (self._tap_attention if facts.branch.link.kind == "attention" else self._tap_mlp)(facts)

    def stack(self, variance: Variance) -> Stack:
        """The blocks of one layer, with the numbers of all layers together."""
        self.taps.require_seen()
        if self.faults:
            raise InputError(f"model: {self.faults[0]}")
        layers: dict[int, list[_BranchFacts]] = {}
        for facts in self.facts:
            layers.setdefault(facts.branch.link.layer, []).append(facts)
        first = layers[0]
        for number, own in layers.items():
            kinds, others = ([each.branch.link.kind for each in part] for part in (own, first))
            if kinds != others:
                raise InputError(f"model: layer {number} is {' and '.join(kinds)}, layer 0 {' and '.join(others)}")
            for facts, other in zip(own, first, strict=True):
                for name, value in facts.common.items():
                    if value != other.common[name]:
                        raise InputError(
                            f"model: {facts.branch.where}: {name} {value}, where layer 0 has {other.common[name]}"
                        )
        columns = zip(*layers.values(), strict=True)
        return Stack(tuple(self._block(column, variance) for column in columns))

    def _of_graph(self, branch: Branch) -> _BranchFacts:
        """What the graph shows, or one line of what no block has."""
        link, roles = branch.link, {*branch.matrices}
        if link.kind not in ("attention", "mlp"):
            raise InputError(f"model: {branch.where}: blocks have attention and MLPs, no {link.kind}")
        branch.require_one_reading()
        known = OF_ATTENTION if link.kind == "attention" else OF_MLP
        if left := sorted(roles - {*known}):
            name = branch.matrices[left[0]][0][0].name
            raise InputError(f"model: {branch.where}: {name} ({left[0]}) is no matrix of a block")
        for role in roles:
            if len(branch.matrices[role]) > 1:
                names = ", ".join(matrix.name for matrix, _ in branch.matrices[role][:2])
                raise InputError(f"model: {branch.where}: has several matrices of {role} ({names})")
            matrix, node = branch.matrices[role][0]
            if matrix.roles or node.kind != "product":
                raise InputError(f"model: {branch.where}: the layout of {matrix.name} is not that of one matrix")
        needed = OF_ATTENTION if link.kind == "attention" else OF_MLP[1:]
        if missing := [role for role in needed if role not in roles]:
            raise InputError(f"model: {branch.where}: has no matrix of {missing[0]}")
        if len(link.writers) != 1:
            raise InputError(f"model: {branch.where}: adds the sum of {len(link.writers)} matrices")
        writer = link.writers[0]
        if branch.norms.of_branch or writer.normed:
            raise InputError(f"model: {branch.where}: has a norm of what it adds")
        if writer.gated:
            raise InputError(f"model: {branch.where}: has a gate of what it adds")
        if branch.norms.back > 0:
            raise InputError(f"model: {branch.where}: reads the stream before the branch beside it")
        return _BranchFacts(branch, self._place_of_norm(branch))

    def _place_of_norm(self, branch: Branch) -> str | None:
        """Before the branch ("pre"), after the sum ("post"), or None without a norm."""
        before = bool(branch.norms.before)
        last = branch.place + 1 == len(self.chain)  # before a norm of the whole network
        after = branch.norms.after_sum and not (last and len(self.chain) > 1 and not self.chain[-1].normed)
        if before and branch.link.normed:
            raise InputError(f"model: {branch.where}: has norms before the branch and after the sum")
        if after and before and not last:
            raise InputError(f"model: {branch.where}: has norms before the branch and after the sum")
        return "pre" if before else "post" if after else None

    def _tap_norm(self, facts: _BranchFacts) -> None:
        branch = facts.branch
        if facts.position == "pre":
            norm = branch.readings[0].origin
        else:
            following = (node for node in self.graph.record.nodes[branch.link.sum.number :] if node.kind == "norm")
            norm = next(each for each in following if self.graph.term(each.inputs[0]).origin is branch.link.sum)

        def take(values: dict[str, Any]) -> None:
            facts.norms = norms_of_values(*(_numbers(values[name]) for name in ("x", "y")))
            if not facts.norms:
                self.faults.append(f"{branch.where}: its norm is neither a LayerNorm nor an RMSNorm of its tokens")

        self.taps.see(f"{branch.where}: its norm", {"x": norm.inputs[0], "y": norm}, take)

    def _tap_mlp(self, facts: _BranchFacts) -> None:
        branch = facts.branch
        gated = "gate" in branch.matrices
        matrix, up = branch.matrices["gate" if gated else "up"][0]
        other, right = branch.matrices["up"][0]
        (last, down), units = branch.matrices["mlp output"][0], branch.matrices["mlp output"][0][0].fan_in
        facts.shape = {"gated": gated, "expansion": units / self.width}

        def take(values: dict[str, Any]) -> None:
            h = _numbers(values["h"]).reshape(-1, units)
            z = self._columns(values["z"], matrix)
            if gated:
                linear = self._columns(values["right"], other)
                seen = np.abs(linear) > 0.1 * np.abs(linear).mean()
                h, z = h[seen] / linear[seen], z[seen]
            if h.shape != z.shape:
                self.faults.append(f"{branch.where}: {last.name} reads other units than {matrix.name} makes")
                return
            facts.activations = activations_of_values(z, h)
            if not facts.activations:
                self.faults.append(f"{branch.where}: its activation is none of si.blocks.ACTIVATIONS")

        nodes = {"z": self._with_bias(up), "right": self._with_bias(right), "h": down.inputs[0]}
        self.taps.see(f"{branch.where}: its activation", nodes, take)

    def _tap_attention(self, facts: _BranchFacts) -> None:
        branch, graph = facts.branch, self.graph
        softmaxes = [x for x in branch.nodes if x.kind == "softmax" and logits_of(graph, x) is not None]
        if len(softmaxes) != 1:
            raise InputError(f"model: {branch.where}: has {len(softmaxes)} softmaxes of queries and keys")
        (softmax,) = softmaxes
        pair = logits_of(graph, softmax)
        assert pair is not None
        logits, _ = attention_of(graph, softmax, pair, branch.link.layer, branch.nodes)
        if logits.normed:
            raise InputError(f"model: {branch.where}: has norms of queries or keys")
        if logits.over != "keys":
            raise InputError(f"model: {branch.where}: its probabilities are not those of keys alone")
        weighted = graph.term(branch.matrices["attention output"][0][1].inputs[0]).origin
        if weighted.kind != "contraction" or softmax not in [graph.term(x).origin for x in weighted.inputs]:
            raise InputError(f"model: {branch.where}: its last matrix does not read the weighted values alone")
        size = logits.head_size
        (query, product), (key, _), (value, _) = (branch.matrices[role][0] for role in OF_ATTENTION[:3])
        heads, groups = query.fan_out // size, key.fan_out // size
        if value.fan_out != groups * size:
            raise InputError(
                f"model: {branch.where}: values have {value.fan_out // groups} features a head, keys {size}"
            )
        facts.shape = {"heads": heads, "key_value_heads": groups, "head_size": size}
        facts.factors = {"logits": logits.factor * math.sqrt(size)}

        def take(values: dict[str, Any]) -> None:
            P, Y = (_numbers(values[name]) for name in ("probabilities", "logits"))
            mask = attended(P)
            if mask is None or not is_softmax(P, Y, mask):
                self.faults.append(f"{branch.where}: its logits are not qkᵀ times a factor under a mask")
                return
            causal = np.array_equal(mask, np.tri(len(mask), dtype=bool))
            facts.pattern = CAUSAL if causal else Pattern.of_mask(mask)
            after = _numbers(values.get("turned"))
            bases = (base_of_rotations(_numbers(values[str(x.number)]), after, len(mask)) for x in before)
            facts.shape["rope"] = next((base for base in bases if base is not None), None)
            if turned is not None and facts.shape["rope"] is None:
                self.faults.append(f"{branch.where}: queries are changed in another way than by rotations")

        turned, before = self._rotation(pair[0].inputs[0], self._with_bias(product))
        nodes = {"probabilities": softmax, "logits": pair[0]} | {str(x.number): x for x in before}
        nodes |= {} if turned is None else {"turned": turned}
        self.taps.see(f"{branch.where}: its logits", nodes, take)

    def _rotation(self, node: Node, product: Node) -> tuple[Node | None, list[Node]]:
        """The node of queries that are more than moved and scaled, and those of its shape before; or None."""
        while node is not product and (node.kind == "view" or node.about.get("uniform")) and node.inputs:
            node = node.inputs[0]
        if node is product:
            return None, []
        found, stack = set(), [*node.inputs]
        while stack:
            each = stack.pop()
            if each.number not in found and each.number > product.number:
                found.add(each.number)
                stack += each.inputs
        before = [self.graph.record.nodes[number] for number in sorted(found)]
        return node, [each for each in before if each.shape == node.shape and not each.fixed]

    def _with_bias(self, product: Node) -> Node:
        """A product with the bias that is added to it."""
        nodes = self.graph.record.nodes[product.number + 1 :]
        own = (node for node in nodes if node.kind == "sum" and len(node.inputs) == 1 and node.parameters)
        return next((node for node in own if self.graph.term(node.inputs[0]).origin is product), product)

    def _columns(self, values: Any, matrix: Matrix) -> np.ndarray:
        """The outputs of a matrix, of the product in which it is used; shape (tokens, outputs)."""
        found = _numbers(values)
        if matrix.places is not None:
            return found.reshape(-1, matrix.places.outputs)[:, matrix.places.columns]
        return found.reshape(-1, matrix.fan_out)

    def _block(self, column: Iterable[_BranchFacts], variance: Variance) -> Block:
        """A block, with mean squares over layers."""
        layers = [*column]
        first, branches = layers[0], [each.branch for each in layers]
        *roles, last = [role for role in (*OF_ATTENTION, *OF_MLP) if role in first.branch.matrices]
        read = _mean(_gain_of_norm(branch) ** 2 for branch in branches)
        gains = {role: self.width * read * _mean(variance(x.matrices[role][0][0]) for x in branches) for role in roles}
        biases = {_mean(self._bias(branch, role, variance) for branch in branches) for role in roles}
        if max(biases) - min(biases) > 0.05 * max(biases):
            raise InputError(f"model: {first.branch.where}: biases of its first matrices have several variances")
        added = [(branch, branch.link.writers[0].factor ** 2) for branch in branches]
        square = _mean(variance(x.matrices[last][0][0]) * x.matrices[last][0][0].fan_in * factor for x, factor in added)
        if first.branch.link.kind == "attention":
            gain, of_linear = math.sqrt(gains["query"] * gains["key"]), gains["value"]
            temperature = 1 / _mean(each.factors["logits"] for each in layers)
            sizes = _without_defaults(first.shape, self.width)
            branch: Any = SelfAttention(temperature, gain, pattern=first.pattern, bias=_mean(biases), **sizes)
        else:
            gain, of_linear = gains.get("gate", gains["up"]), gains["up"]
            branch = MLP(gain, self._activation(layers), bias=_mean(biases), **first.shape)
        norms = set.intersection(*(each.norms for each in layers))
        if not norms:
            raise InputError(f"model: {first.branch.where}: layers have several norms")
        return Block(
            branch,
            math.sqrt(square * of_linear / gain),
            norm=None if first.position is None else "layer" if "layer" in norms else "rms",
            position=first.position or "pre",
            skip=_skip(layers),
            bias=_mean(self._bias(x, last, variance) * factor for x, factor in added),
        )

    def _activation(self, layers: list[_BranchFacts]) -> str:
        """The activation of all layers, the nearest if their inputs are too small to tell several apart."""
        common = set.intersection(*({*each.activations} for each in layers))
        if not common:
            raise InputError(f"model: {layers[0].branch.where}: layers have several activations")
        return min(sorted(common), key=lambda name: sum(each.activations[name] for each in layers))

    def _bias(self, branch: Branch, role: str, variance: Variance) -> float:
        """The mean square of the biases after a matrix."""
        matrix, product = branch.matrices[role][0]
        names = {*self._with_bias(product).parameters} - {matrix.array}
        found = [each for each in self.account.matrices.values() if each.array in names and each.of in (role, "")]
        return _mean(variance(each) for each in found) if found else 0.0


def _numbers(values: Any) -> np.ndarray:
    """A tensor or array in double precision."""
    if hasattr(values, "cpu"):
        values = values.cpu().double() if values.is_floating_point() else values.cpu()
    found = np.asarray(values)
    return (found.view(found.real.dtype) if np.iscomplexobj(found) else found).astype(np.float64)


def _gain_of_norm(branch: Branch) -> float:
    factor = branch.readings[0].factor
    return factor if math.isfinite(factor) and branch.norms.before else 1.0


def _skip(layers: list[_BranchFacts]) -> float:
    # The first sum of a stream may also have the factor of an embedding.
    own = [each.branch for each in layers if each.branch.place] or [each.branch for each in layers]
    found = {round(branch.link.skip.factor, 6) for branch in own}
    if len(found) > 1:
        raise InputError(f"model: {layers[0].branch.where}: factors of the stream differ between layers")
    return found.pop()


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def _without_defaults(shape: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Sizes of attention as a user would write them."""
    own = dict(shape)
    if own["key_value_heads"] == own["heads"]:
        del own["key_value_heads"]
    if own["head_size"] * own["heads"] == width:
        del own["head_size"]
    return own

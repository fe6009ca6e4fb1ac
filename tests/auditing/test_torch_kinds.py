"""Kinds of mistakes in models of PyTorch: each is found and named, and the model without it passes."""

import math

import pytest
from helpers import structural_models as own
from helpers.torch_models import TORCH, hf, nn, sizes, torch

import sdeinfer as si

pytestmark = TORCH

RULES = si.audit.recipes
TOKENS = torch.arange(16).reshape(2, 8) + 5
NORMAL, PRE = {"recipe": "normal"}, {"recipe": "normal", "norm": "pre"}
KINDS = {
    "a norm is the identity": ({"bug": "norm1"}, {}, PRE, "without a norm"),
    "both norms are": ({"bug": "both norms"}, {}, PRE, "without a norm"),
    "the last norm is": ({"bug": "final norm"}, {}, PRE, "head.weight reads the stream without a norm"),
    "norms are not called": ({"bug": "norms not called"}, {}, PRE, "no output follows from layers.0.norm1.weight"),
    "norms of queries are not called": ({"qk": True, "bug": "qk not called"}, {"qk": True}, PRE, "no output follows from"),
    "norms of queries are missing": ({}, {"qk": True}, {"norm": "pre+qk"}, "queries and keys are not normalised"),
    "norms of queries are over heads": ({"qk": True, "bug": "over heads"}, {"qk": True}, {"norm": "pre+qk"}, "norms of queries or keys are not over the features of a head"),
    "a buffer became 0": ({"scale": 0.5, "bug": "scale lost"}, {"scale": 0.5}, {}, "is multiplied by 0"),
    "a factor of a branch became 0": ({"branch": 0.2, "bug": "branch lost"}, {"branch": 0.2}, {}, "is multiplied by 0"),
    "a buffer is another": ({"scale": 0.5}, {"scale": 1.0}, NORMAL, "reads is 0.5 times a unit norm, declared 1"),
    "2 norm(x)": ({"bug": "factor"}, {}, NORMAL, "reads is 2 times a unit norm"),
    "ε = 1": ({"bug": "epsilon"}, {}, NORMAL, "times a unit norm"),
    "a norm over tokens": ({"bug": "axis"}, {}, NORMAL, "is not over the features of a token"),
    "softmax over queries": ({"bug": "queries"}, {}, NORMAL, "softmax runs over queries"),
    "with a mask": ({"bug": "queries", "mask": "fill"}, {"mask": "fill"}, {"causal": True}, "softmax runs over queries"),
    "the mask is a buffer": ({}, {"mask": "buffer"}, NORMAL | {"causal": True}, "the causal mask is not there"),
    "the second sum of a Post-LN layer": ({"post": True, "bug": "second sum"}, {"post": True}, NORMAL, "added to the input of the sum before"),
    "of a Pre-LN layer": ({"bug": "second sum"}, {}, NORMAL, "added to the input of the sum before"),
    "one sum is missing": ({"bug": "no sum", "layers": [1]}, {}, NORMAL, "layers.1.attention.wo.weight returns is not added"),
    "those of attention are": ({"bug": "no sum"}, {}, NORMAL, "added to the stream"),
    "those of the MLP are": ({"bug": "no second sum"}, {}, NORMAL, "added to the stream"),
    "no residual at all": ({"bug": "no residual"}, {}, NORMAL, "no residual stream"),
    "a branch is added to itself": ({"bug": "itself"}, {}, NORMAL, "a tensor is added to itself"),
    "a branch is subtracted": ({"bug": "subtracted"}, {}, NORMAL, "is subtracted"),
    "1/√n for 1/√d_k": ({"bug": "√n"}, {}, NORMAL, "1/√n is taken for 1/√d_k"),
    "heads are split without a transpose": ({"bug": "split"}, {}, NORMAL, "heads are split across tokens"),
    "heads are joined without a transpose": ({"bug": "join"}, {}, NORMAL, "heads are joined across tokens"),
    "the mask is off by one": ({"bug": "one too many", "mask": "fill"}, {"mask": "fill"}, {"causal": True}, "the causal mask is not there, or off by one"),
    "the mask follows softmax": ({"bug": "late mask"}, {"mask": "fill"}, {"causal": True}, "the causal mask is not there, or is applied after softmax"),
    "keys are not rotated": ({"rope": "halves", "bug": "keys not turned"}, {"rope": "halves"}, NORMAL, "queries alone are rotated by positions"),
    "by complex numbers": ({"rope": "complex", "bug": "keys not turned"}, {"rope": "complex"}, NORMAL, "queries alone are rotated by positions"),
    "attention over the batch": ({"bug": "first axis"}, {}, NORMAL, "positions are added along the second axis, and tokens see each other along the first one"),
    "of bounded logits": ({"bug": "√n", "bound": True}, {"bound": True}, NORMAL, "1/√n is taken for 1/√d_k"),
}  # fmt: skip


def net(make=own.Net, seed=0, **options):
    torch.manual_seed(seed)
    return make(**options)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_named_and_its_fix_passes(name):
    broken, fixed, arguments, says = KINDS[name]
    before, after = (str(si.audit(net(**options), TOKENS, **arguments)) for options in (broken, fixed))
    assert before.startswith("failed"), before
    assert says in before, before
    assert after.startswith("passed" if arguments else "nothing declared"), after


def test_nested_inputs_reach_all_matrices():
    model = net(own.Nested)
    assert si.audit(model, {"batch": {"text": {"tokens": TOKENS}}}, recipe="normal").passed
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.up.weight.mul_(10)
    assert "σ of up" in str(si.audit(model, {"text": {"tokens": TOKENS}}, recipe="normal"))
    image = torch.randn(2, 8, own.N)
    found = si.audit(net(own.Modal), {"image": image}, recipe="normal")
    assert str(found).startswith("not tested: 27 of 28 matrices are not reached by these inputs")


def test_a_rule_by_name_is_tested_whatever_the_role():
    model, rule = net(), {"positions": 0.02}
    assert si.audit(model, TOKENS, recipe=rule).passed
    torch.nn.init.normal_(model.positions)
    assert "σ of position positions is 52" in str(si.audit(model, TOKENS, recipe=rule))
    assert si.audit(net(scale=0.2), TOKENS, recipe={"*.norm1.weight": (1.0, "constant")}).passed
    wrong = si.audit(net(), TOKENS, recipe={"*.norm1.weight": (0.5, "constant")})
    assert "layers.0.norm1.weight is 1, declared 0.5" in str(wrong)


def test_the_first_rule_of_a_parameter_decides_be_it_a_role_or_a_name():
    found = si.audit(net(), TOKENS, recipe={"position": 0.02, "*.attention.*": 0.02, "*": 0.5, "norm": 3.0})
    assert "position" not in found.verdict
    assert "σ of up" in found.verdict
    assert si.audit(net(), TOKENS, recipe={"norm": (1.0, "constant")}).passed
    assert "norm layers.0.norm1.weight is 1, declared 0.5" in str(
        si.audit(net(), TOKENS, recipe={"norm": (0.5, "constant"), "*.norm1.weight": (1.0, "constant")})
    )


def test_tensors_that_train_are_parameters():
    found = si.audit(net(own.Listed), TOKENS, recipe="normal")
    assert "tensors that train are no parameters of the model, as of modules in a list (6 of them" in found.verdict


def test_zeros_that_multiply_zeros_have_no_gradient():
    x = torch.randn(2, 8, own.N)
    assert "no gradient passes" in si.audit(net(own.Conditioned, one=0.0), x).verdict
    correct = si.audit(net(own.Conditioned), x, recipe={"ups.*": 3**-0.5 / 8, "downs.*": 3**-0.5 / 8}, causal=False)
    assert correct.untested == ("causal=False: no token changes another one, as where branches are 0",)


def test_what_is_added_to_a_time_step_is_no_bias():
    assert si.audit(net(own.Steps), TOKENS, recipe="normal").passed


def test_values_of_the_first_layer_go_on():
    assert si.audit(net(own.LateralValues), TOKENS, recipe="normal", causal=False).passed


def test_layers_that_share_a_module_are_layers():
    model = net()
    model.layers = nn.ModuleList([model.layers[0]] * own.LAYERS)
    found = si.audit(model, TOKENS, recipe="normal")
    assert found.layers == own.LAYERS
    assert "layers.0.attention.wq.weight and layers.1.attention.wq.weight, " in found.verdict
    assert "are one parameter" in found.verdict
    assert si.audit(model, TOKENS, recipe="normal", allow=["copies"]).passed


def test_a_loop_over_one_module_is_meant():
    model = net()
    model.layers = own.Repeated(model.layers[0])
    found = si.audit(model, TOKENS, recipe="normal")
    assert found.layers == own.LAYERS
    assert found.passed


def test_slopes_over_distances_are_no_positions_of_the_stream():
    found = si.audit(net(own.TokensFirst), torch.randn(8, 2, own.N), recipe="normal")
    assert found.passed
    assert "tokens see each other along the first axis" in str(found)


def test_tokens_along_the_first_axis_are_a_note():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, norm_first=True), 2, enable_nested_tensor=False)
    assert "tokens see each other along the first axis" in str(
        si.audit(encoder, torch.randn(2, 8, 64), allow=["copies"])
    )


def test_rules_say_nothing_of_logits_that_a_model_does_not_have():
    perceptron = nn.Sequential(nn.Linear(64, 64, bias=False))
    torch.manual_seed(0)
    nn.init.normal_(perceptron[0].weight, std=0.1)
    assert si.audit(perceptron, torch.randn(4, 64), recipe={"*": 0.1}).passed


AUTO = {
    "positions": (hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=199), "wpe.weight", 0.0),
    "dt_bias": (hf.Mamba2Config(hidden_size=64, num_hidden_layers=3, vocab_size=199, num_heads=8, head_dim=16, state_size=16, n_groups=1), "layers.1.mixer.dt_bias", 1.0),
    "A_log": (hf.MambaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=199), "layers.2.mixer.A_log", 3.0),
    "class tokens": (hf.ViTConfig(**sizes(64, 3), image_size=16, patch_size=8), "embeddings.cls_token", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", AUTO)
def test_auto_declares_every_parameter(name):
    config, path, value = AUTO[name]
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config)
    assert si.audit(model, recipe="auto").passed
    parameter = dict(model.named_parameters())[path]
    with torch.no_grad():
        parameter.mul_(value) if value == 3.0 else parameter.fill_(value)
    found = si.audit(model, recipe="auto")
    assert found.passed is False
    assert any(path in each for test in found.failed for each in (*test.names, test.says)), found


class Renamed(own.Net):
    """The same with other names of parameters."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = self.layers
        del self.layers

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_models_of_other_names_are_compared_by_role():
    rotated = net(rope="halves", sd=0.08)
    assert si.audit(rotated, TOKENS, like=net(Renamed, seed=1, rope="halves", sd=0.08)).passed
    assert "returns other values" in str(si.audit(rotated, TOKENS, like=net(Renamed, seed=1, sd=0.08)))
    packed = si.audit(net(packed=True), TOKENS, like=net(Renamed, seed=1))
    assert str(packed).startswith("not tested: outputs with the same weights")


class Injected(own.Net):
    """The embedding is added before each layer, times a scalar that learns."""

    def __init__(self, scalar=0.2, **options):
        super().__init__(**options)
        self.scalars = nn.Parameter(torch.full((own.LAYERS,), scalar))

    def forward(self, tokens):
        x = start = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for scalar, layer in zip(self.scalars, self.layers, strict=True):
            x = layer(x + scalar * start)
        return self.head(self.norm(x))


def test_scalars_that_were_lost_are_named():
    """By a rule, and beside another model; an earlier state of the stream that is added is no branch."""
    lost, rule = net(Injected, scalar=0.0), {"scalars": (0.2, "constant")}
    assert si.audit(net(Injected), TOKENS, like=net(Injected, seed=1)).passed
    assert si.audit(net(Injected), TOKENS, recipe=rule).passed
    for found in (si.audit(lost, TOKENS, like=net(Injected, seed=1)), si.audit(lost, TOKENS, recipe=rule)):
        assert "scalars is 0, declared 0.2" in str(found)


@pytest.mark.parametrize("seed", range(5))
def test_a_second_draw_of_the_same_model_passes(seed):
    """250 pairs in `tests/benchmarks/audit_false_alarms.py`."""
    assert si.audit(net(seed=2 * seed, n=32), TOKENS, like=net(seed=2 * seed + 1, n=32)).passed


def truncated(model, edge):
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02, a=-0.02 * edge, b=0.02 * edge)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_weights_truncated_far_out_are_normal(seed):
    model = truncated(net(seed=seed, n=128), 3.0)
    assert si.audit(model, TOKENS, recipe="normal").passed
    assert si.audit(model, TOKENS, recipe={"*.attention.*": (0.02, "truncated")}).passed
    assert si.audit(truncated(net(seed=seed), 2.0), TOKENS, recipe="normal").passed is False


class Convolutions(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 4, 4)
        self.up, self.down = (
            nn.ModuleList([nn.Conv2d(n, m, 3, padding=1, bias=False) for _ in range(3)])
            for n, m in ((32, 64), (64, 32))
        )
        for kernel in (*self.up, *self.down):
            fill(kernel.weight)

    def forward(self, x):
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


def test_fans_of_convolutions_are_those_of_pytorch():
    image = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    for fill, recipe in (
        (nn.init.xavier_normal_, "xavier"),
        (nn.init.kaiming_normal_, "kaiming"),
        (lambda kernel: nn.init.kaiming_normal_(kernel, mode="fan_out"), RULES.kaiming("fan_out")),
    ):
        assert si.audit(Convolutions(fill), image, recipe=recipe).passed
    without = Convolutions(lambda kernel: nn.init.normal_(kernel, std=math.sqrt(2 / sum(kernel.shape[:2]))))
    assert "the area of the kernel is not in the fans" in str(si.audit(without, image, recipe="xavier"))


def test_xavier_of_one_array_is_not_that_of_three_matrices():
    def each(weight):
        for part in weight.chunk(3, 0) if len(weight) == 3 * own.N else [weight]:
            nn.init.xavier_normal_(part)

    for fill, says in ((nn.init.xavier_normal_, "the fan_out of all matrices in one array"), (each, "passed")):
        model = net(packed=True)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                fill(module.weight)
        assert says in str(si.audit(model, TOKENS, recipe="xavier"))


@pytest.mark.parametrize("recipe", ["xavier", "kaiming", "lecun", "gpt2", "pytorch", {"*": (0.05, "truncated")}])
@pytest.mark.parametrize("packed", [True, False])
def test_a_model_that_is_initialised_passes_its_own_audit(recipe, packed):
    assert si.audit.initialise(net(packed=packed), recipe, TOKENS).audit.passed


def test_wrappers_are_unwrapped():
    for wrapped in (nn.DataParallel(net()), torch.compile(net())):
        assert si.audit(wrapped, TOKENS, recipe="normal").passed
    model = net()
    model.layers[0] = torch.compile(model.layers[0])
    assert si.audit(model, TOKENS, recipe={"layers.0.attention.wq.weight": 0.02}).passed


def test_functions_and_classes_make_models():
    assert si.audit(lambda: net(), TOKENS, recipe="normal").passed
    assert si.audit(own.Net, TOKENS, recipe="normal").passed


class LoRA(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear, self.A = linear, nn.Linear(linear.in_features, 8, bias=False)
        self.B = nn.Linear(8, linear.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.linear(x) + self.B(self.A(x))


def test_zeros_that_learn_are_a_note():
    adapted, without_queries = net(), net()
    for layer in adapted.layers:
        layer.attention.wq, layer.mlp.up = LoRA(layer.attention.wq), LoRA(layer.mlp.up)
    for layer in without_queries.layers:
        nn.init.zeros_(layer.attention.wq.weight)
        nn.init.zeros_(layer.mlp.up.weight)
    for model in (adapted, without_queries):
        found = si.audit(model, TOKENS)
        assert found.passed is None
        assert "start from 0" in str(found)

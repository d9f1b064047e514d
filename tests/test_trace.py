"""Tracing: graphs equal eager on other weights and data, nodes know their owners, errors say where and what."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from joint_eager import Call, assert_equals_eager, check_against_eager, run_joint, tangents_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import InputError, TraceError
from autopar.graph import InputKind, OutputKind
from autopar.normalise import normalise
from autopar.trace import find_batch_dims, flatten_inputs, trace

F64 = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def tokens(*shape: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# ---- models ----


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(x)))


class TinyLM(nn.Module):
    """Tied embedding, two blocks, a loss that ignores some targets."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3), "logits": logits}


class Scale(torch.autograd.Function):
    """Doubles, but says that its gradient is three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad + 0 * x


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(self.inner(x)).tanh()


class Shared(nn.Module):
    """One module under two names, and called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Running(nn.Module):
    """Buffers that change: in place, by assignment, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("calls", torch.tensor(0))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale + self.mean
        self.total.add_(y.detach().sum(0))
        self.mean = 0.9 * self.mean + 0.1 * y.mean(0).detach()
        self.calls += 1
        return y


class Outputs(nn.Module):
    """Returns what `pick` makes of two tensors."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.pick = pick

    def forward(self, x: Tensor) -> Any:
        return self.pick(self.linear(x), self.frozen(x))


def lm_call(seed: int) -> Call:
    return (tokens(2, 5, high=11, seed=seed),), {"labels": tokens(2, 5, high=11, seed=seed + 10)}


def row_call(seed: int) -> Call:
    return (random(6, 4, seed=seed),), {}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Call]]] = {
    "mlp": (mlp, row_call),
    "tied_lm": (TinyLM, lm_call),
    "batch_norm": (batch_norm, row_call),
    "checkpoint": (lambda: TinyLM(reentrant=False), lm_call),
    "reentrant_checkpoint": (lambda: TinyLM(reentrant=True), lm_call),
    "autograd_function": (WithFunction, row_call),
    "shared_module": (Shared, row_call),
    "buffers": (Running, row_call),
    "dict_of_outputs": (lambda: Outputs(lambda a, b: {"loss": a.square().mean(), "aux": {"b": b, "a": a}}), row_call),
    "tuple_of_outputs": (lambda: Outputs(lambda a, b: (a, [b, a.sum(0)], None, 3)), row_call),
    "aliased_outputs": (lambda: Outputs(lambda a, b: (a, a, a[:2], a.t(), b)), row_call),
    "two_losses": (lambda: Outputs(lambda a, b: (a.sum(), (a * b).mean(), a)), row_call),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_eager_on_other_weights_and_data(name: str) -> None:
    build, call = MODELS[name]
    torch.manual_seed(0)
    joint = check_against_eager(build().double(), call(0), call(1))
    assert joint.trains
    for node in joint.module.graph.nodes:
        assert isinstance(node.meta["module"], str)
        assert isinstance(node.meta["backward"], bool)
        assert "val" in node.meta or node.op == "output"


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 17, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


@pytest.mark.parametrize("build", [gpt2, llama])
def test_hugging_face_model_equals_eager(build: Callable[[], nn.Module]) -> None:
    """With the default config, whose cache is an object that cannot be flattened."""
    torch.manual_seed(0)
    # Hugging Face computes the loss in float32, so nothing after it is more exact than that.
    joint = check_against_eager(build().train().double(), hf_call(0), hf_call(1), tolerance=1e-6)
    assert joint.output_tree.paths == ("loss", "logits")
    assert len(joint.output_tree.dropped) == 1
    assert [spec.path for spec in joint.inputs if spec.kind is InputKind.TANGENT] == ["loss"]
    rebuilt = joint.output_tree.rebuild([torch.zeros(()), torch.ones(2)])
    assert torch.equal(rebuilt.loss, torch.zeros(()))


def hf_call(seed: int) -> Call:
    ids = tokens(2, 6, high=17, seed=seed)
    labels = ids.clone()
    labels[0, :3] = -100
    return (), {"input_ids": ids, "labels": labels}


# ---- what goes in and out ----


def test_inputs_and_outputs_are_named_by_the_user_s_names() -> None:
    joint = trace(TinyLM(), *lm_call(0))
    params = [spec.path for spec in joint.inputs if spec.kind is InputKind.PARAM]
    assert params == [name for name, _ in TinyLM().named_parameters()]
    assert [spec.path for spec in joint.inputs if spec.kind is InputKind.INPUT] == ["0", "labels"]
    assert joint.tied == {"head.weight": "embed.weight"}
    assert [spec.path for spec in joint.outputs if spec.kind is OutputKind.OUTPUT] == ["loss", "logits"]
    assert [spec.path for spec in joint.outputs if spec.kind is OutputKind.GRADIENT] == params
    assert joint.placeholders[0].name == "param_embed_weight"


def test_only_the_loss_gets_a_tangent_where_there_is_one() -> None:
    with_loss = trace(Outputs(lambda a, b: {"loss": a.mean(), "a": a, "b": b}), (torch.ones(2, 4),), {})
    without = trace(Outputs(lambda a, b: {"a": a, "b": b}), (torch.ones(2, 4),), {})
    assert [spec.path for spec in with_loss.inputs if spec.kind is InputKind.TANGENT] == ["loss"]
    assert [spec.path for spec in without.inputs if spec.kind is InputKind.TANGENT] == ["a"]


def test_gradients_that_do_not_exist_are_none() -> None:
    joint = trace(Outputs(lambda a, b: a + b), (torch.ones(2, 4),), {})
    values = dict(zip(joint.outputs, joint.output_values, strict=True))
    gradients = {spec.path: node for spec, node in values.items() if spec.kind is OutputKind.GRADIENT}
    assert sorted(gradients) == ["linear.bias", "linear.weight", "unused"]
    assert gradients["unused"] is None
    assert gradients["linear.weight"] is not None


def test_output_tree_rebuilds_what_the_module_returns() -> None:
    joint = trace(Outputs(lambda a, b: (a, {"x": [b, "text"], "n": 3}, None)), (torch.ones(2, 4),), {})
    assert joint.output_tree.paths == ("0", "1.x.0")
    first, second = torch.zeros(1), torch.ones(1)
    assert joint.output_tree.rebuild([first, second]) == (first, {"x": [second, "text"], "n": 3}, None)
    with pytest.raises(InputError, match="returns 2 tensors, 1 were given"):
        joint.output_tree.rebuild([first])


def test_a_bare_tensor_has_the_empty_path() -> None:
    joint = trace(mlp(), (torch.ones(2, 4),), {})
    assert joint.output_tree.paths == ("",)
    tensor = torch.ones(1)
    assert joint.output_tree.rebuild([tensor]) is tensor


class Opaque:
    """An object that PyTorch cannot look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_an_opaque_output_is_dropped() -> None:
    joint = trace(Outputs(lambda a, b: {"loss": a.sum(), "cache": Opaque(b)}), (torch.ones(2, 4),), {})
    assert joint.output_tree.dropped == ("cache",)
    assert joint.output_tree.rebuild([torch.ones(())])["cache"] is None


def test_a_module_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(InputError, match=r"returns no tensor \(the return value is an object that PyTorch cannot look"):
        trace(Outputs(lambda a, _b: Opaque(a)), (torch.ones(2, 4),), {})
    with pytest.raises(InputError, match=r"returns no tensor$"):
        trace(Outputs(lambda _a, _b: None), (torch.ones(2, 4),), {})


def test_forward_only_graphs() -> None:
    frozen = mlp().requires_grad_(False)
    for joint in (trace(mlp(), *call_f32(), train=False), trace(frozen, *call_f32())):
        assert not joint.trains
        assert {spec.kind for spec in joint.inputs} == {InputKind.PARAM, InputKind.INPUT}
        assert [spec.kind for spec in joint.outputs] == [OutputKind.OUTPUT]
        assert not any(node.meta["backward"] for node in joint.module.graph.nodes)


def call_f32() -> Call:
    return (torch.ones(2, 4),), {}


def test_eval_mode_is_respected() -> None:
    model = batch_norm().double().eval()
    joint = trace(model, *row_call(0), train=False)
    assert not [spec for spec in joint.outputs if spec.kind is OutputKind.MUTATION]
    assert_equals_eager(joint, model, row_call(1))
    trained = trace(model.train(), *row_call(0), train=False)
    mutated = {spec.path for spec in trained.outputs if spec.kind is OutputKind.MUTATION}
    assert mutated == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_constants_are_baked_in_and_change_the_key() -> None:
    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=F64))

        def forward(self, x: Tensor, power: int, *, negate: bool) -> Tensor:
            y = (x * self.weight) ** power
            return -y if negate else y

    x = random(2, 4)
    joint = trace(Power(), (x, 3), {"negate": True})
    (output, *_) = run_joint(joint, Power(), ((x, 3), {"negate": True}), tangents_of(joint)).values()
    assert torch.equal(output, -(x**3))
    keys = {
        flatten_inputs(args, kwargs)[1]
        for args, kwargs in [
            ((x, 3), {"negate": True}),
            ((x.sum(), 3), {"negate": True}),  # the same: shapes do not count
            ((x, 2), {"negate": True}),
            ((x, 3.0), {"negate": True}),
            ((x, 3), {"negate": False}),
            ((x, x), {"negate": True}),
            (([x], 3), {"negate": True}),
        ]
    }
    assert len(keys) == 6


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.ones(2, 3),),
            {"scal": 2.0},
            r"Scaled\.forward\(x.*, scale.* 1 positional argument, 'scal': got an un",
        ),
        ((), {"scale": torch.ones(2, 3)}, r"Scaled\.forward.* 0 positional arguments, 'scale': missing .* 'x'"),
        ((torch.ones(2, 3), 1.0, 2.0), {}, r"Scaled\.forward.* 3 positional arguments: too many"),
    ],
)
def test_a_call_that_does_not_fit_the_module_is_refused(args: Any, kwargs: Any, message: str) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return scale * x

    with pytest.raises(InputError, match=message):
        trace(Scaled(), args, kwargs)


def test_an_array_of_numpy_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"input ids\.1 is an array of numpy: pass a tensor, torch\.from_numpy\(ids\.1\)"
    ):
        trace(nn.Linear(3, 3), (), {"ids": [torch.ones(2, 3), np.ones((2, 3))]})


def test_a_call_that_a_hook_makes_fit_is_traced() -> None:
    model = nn.Linear(3, 3)
    model.register_forward_pre_hook(lambda _, args, kwargs: ((kwargs["features"],), {}), with_kwargs=True)
    assert trace(model, (), {"features": torch.ones(2, 3)}).batch_dims == {"features": 0}


def test_flatten_inputs_follows_the_graph() -> None:
    batch = {"ids": torch.zeros(2), "extra": [torch.ones(3), 7]}
    flat, _ = flatten_inputs((batch,), {"mask": torch.ones(2)})
    assert [path for path, _ in flat] == ["0.ids", "0.extra.0", "mask"]
    assert flat[2][1] is not None


def test_two_inputs_of_one_path_are_refused() -> None:
    with pytest.raises(InputError, match=r"both called 0\.a\.b: rename"):
        flatten_inputs(({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},), {})


def test_an_input_that_hides_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="input 1 is a Opaque that holds tensors"):
        trace(mlp(), (torch.ones(2, 4), Opaque(torch.ones(1))), {})


def test_an_input_that_requires_grad_is_refused() -> None:
    with pytest.raises(InputError, match="input 0 requires grad, but only parameters get gradients"):
        trace(mlp(), (torch.ones(2, 4, requires_grad=True),), {})


def test_the_same_tensor_may_be_passed_twice() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * self.weight - b

    x = random(2, 4)
    joint = trace(Two().double(), (x, x), {})
    assert [spec.path for spec in joint.inputs if spec.kind is InputKind.INPUT] == ["0", "1"]
    assert_equals_eager(joint, Two().double(), ((random(2, 4, seed=1), random(2, 4, seed=2)), {}))


# ---- batch ----


def test_batch_dims_by_default() -> None:
    args = (torch.ones(()), torch.ones(4, 3))
    kwargs = {"mask": torch.ones(4), "positions": torch.ones(3, 4), "scale": 2.0}
    assert find_batch_dims(args, kwargs) == {"1": 0, "mask": 0}
    assert find_batch_dims(args, kwargs, {"positions": -1, "mask": None}) == {"1": 0, "positions": 1}
    assert find_batch_dims((), {}) == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"x": 0}, r"batch_dims names 'x', which is no input tensor; the inputs are 0 \[4, 3\], mask \[4\]"),
        ({"mask": 1}, r"batch_dims\['mask'\] is 1, but mask has shape \[4\]: give a dim of it, or None"),
        ({"mask": "first"}, r"batch_dims\['mask'\] is 'first'"),
        ({"mask": True}, r"batch_dims\['mask'\] is True"),
    ],
)
def test_wrong_batch_dims(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_batch_dims((torch.ones(4, 3),), {"mask": torch.ones(4)}, overrides)


@pytest.mark.parametrize("overrides", [3, "input", [0], [("x", 0)]])
def test_batch_dims_are_a_mapping(overrides: Any) -> None:
    with pytest.raises(InputError, match="batch_dims must be a dict of input path -> dim or None"):
        find_batch_dims((random(2, 3),), {}, overrides)


def test_the_graph_is_for_the_batch_of_all_ranks() -> None:
    joint = trace(TinyLM(), *lm_call(0), num_ranks=3)
    assert joint.batch_dims == {"0": 0, "labels": 0}
    shapes = {spec.path: node.meta["val"].shape for spec, node in zip(joint.inputs, joint.placeholders, strict=True)}
    assert tuple(shapes["0"]) == (6, 5)
    logits = joint.output_values[1]
    assert logits is not None
    assert tuple(logits.meta["val"].shape) == (6, 5, 11)
    replicated = trace(mlp(), (torch.ones(2, 4),), {}, num_ranks=3, batch_dims={"0": None})
    assert tuple(replicated.output_values[0].meta["val"].shape) == (2, 3)  # type: ignore[union-attr]


def test_the_global_graph_equals_eager_on_the_global_batch() -> None:
    model = TinyLM().double()
    joint = normalise(trace(model, *lm_call(0), num_ranks=2))
    whole = ((tokens(4, 5, high=11, seed=5),), {"labels": tokens(4, 5, high=11, seed=6)})
    assert_equals_eager(joint, model, whole)


def test_meta_parameters_trace_to_the_same_graph() -> None:
    with torch.device("meta"):
        meta = TinyLM()
    args = (torch.zeros(2, 5, dtype=torch.long, device="meta"),)
    joint = trace(meta, args, {"labels": args[0]}, device="cpu")
    assert joint.fingerprint() == trace(TinyLM(), *lm_call(0), device="cpu").fingerprint()
    assert all(p.is_meta for p in meta.parameters())


# ---- owners ----


def test_nodes_belong_to_the_module_that_they_come_from() -> None:
    graph = normalise(trace(TinyLM(), *lm_call(0))).module.graph
    owners = {node.meta["module"] for node in graph.nodes}
    assert {"embed", "head", "blocks.0.qkv", "blocks.1.down", "blocks.1"} <= owners
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default):
        weight = node.all_input_nodes[0].name  # the bias, which the module owns
        assert weight == f"param_{node.meta['module'].replace('.', '_')}_bias"
        assert not node.meta["backward"]


def test_backward_nodes_belong_to_the_layer_of_their_forward() -> None:
    joint = trace(TinyLM(), *lm_call(0))
    values = {
        spec.path: v
        for spec, v in zip(joint.outputs, joint.output_values, strict=True)
        if spec.kind.value == "gradient"
    }
    for path, node in values.items():
        assert node is not None
        assert node.meta["backward"]
        if path != "embed.weight":
            assert node.meta["module"] == path.rpartition(".")[0]
    # The sum of the two gradients of the tied weight is the weight's.
    assert values["embed.weight"].target is torch.ops.aten.add.Tensor  # type: ignore[union-attr]
    assert values["embed.weight"].meta["module"] == "embed"  # type: ignore[union-attr]
    # Inside block 1, from its first backward node to its last, nothing belongs to block 0; residual sums included.
    backward = [node for node in joint.module.graph.nodes if node.meta["backward"] and node.op == "call_function"]
    layers = [node.meta["module"].split(".")[1] for node in backward if node.meta["module"].startswith("blocks.")]
    assert layers == sorted(layers, reverse=True)
    sums = [n for n in backward if n.target is torch.ops.aten.add.Tensor and tuple(n.meta["val"].shape) == (2, 5, 8)]
    assert sorted(node.meta["module"] for node in sums) == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]


def test_backward_is_what_depends_on_a_tangent() -> None:
    joint = trace(TinyLM(), *lm_call(0))
    tangents = {n for n, s in zip(joint.placeholders, joint.inputs, strict=True) if s.kind is InputKind.TANGENT}
    for node in joint.module.graph.nodes:
        if node in tangents or any(source.meta["backward"] for source in node.all_input_nodes):
            assert node.meta["backward"] or node.op == "output"
    forward = [v for s, v in zip(joint.outputs, joint.output_values, strict=True) if s.kind is OutputKind.OUTPUT]
    assert not any(node.meta["backward"] for node in forward if node is not None)


# ---- the model is left alone ----


class Fails(nn.Module):
    """Reads a value, in a submodule, after leaving traces of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), ReadsValue())
        self.register_buffer("seen", torch.zeros(1))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        self.last = x
        self.seen = self.seen + 1
        return self.inner(x)


class ReadsValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 0:  # here
            return x
        return -x


class Leaves(Fails):
    """The same without the failure."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))


@pytest.mark.parametrize("model_class", [Fails, Leaves])
def test_the_model_is_as_it_was(model_class: type[nn.Module]) -> None:
    model = model_class()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = {path: dict(vars(module)) for path, module in model.named_modules()}
    if model_class is Fails:
        with pytest.raises(TraceError):
            trace(model, (torch.ones(2, 4),), {})
    else:
        trace(model, (torch.ones(2, 4),), {})
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name]
    for path, module in model.named_modules():
        assert vars(module) == modules[path]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert model.calls == []
    assert torch.fx.traceback.current_meta == {}
    assert type(torch.ones(1) + 1) is Tensor  # no fake mode is left active


class Recovers(nn.Module):
    """Catches a submodule's exception and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = Wrong()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.fails(x)
        except RuntimeError:
            return self.linear(x).exp()


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x  # wrong


def test_owners_survive_an_exception_that_the_model_catches() -> None:
    graph = trace(Recovers(), (torch.ones(2, 4),), {}).module.graph
    owners = {str(node.target): node.meta["module"] for node in graph.nodes if not node.meta["backward"]}
    assert owners["aten.addmm.default"] == "linear"
    assert owners["aten.exp.default"] == ""


# ---- errors ----


def line_of(marker: str) -> int:
    with open(__file__) as source:
        return next(i for i, text in enumerate(source, 1) if text.rstrip().endswith(f"# {marker}"))


def test_value_dependent_control_flow_names_module_and_line() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Fails(), (torch.ones(2, 4),), {})
    message = str(caught.value)
    assert "module inner.1, " in message
    assert f"test_trace.py:{line_of('here')} (`if x.max() > 0:" in message
    assert "depends on the values of a tensor" in message
    assert "torch.where" in message
    assert caught.value.__cause__ is not None


def exits_early(linear: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        x = linear(x)
        if x.norm() > 10:  # exit
            break
    return x


def loops_as_told(linear: nn.Module, x: Tensor) -> Tensor:
    for _ in range((x > 0).sum()):  # loop
        x = linear(x)
    return x


def parts_by_length(linear: nn.Module, x: Tensor) -> Tensor:
    parts = torch.split(linear(x), (x[:, 0] > 0).long().bincount(minlength=2).tolist())  # parts
    return torch.cat([part * i for i, part in enumerate(parts)])


def selects_rows(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    return y.index_add(0, torch.where(x[:, 0] > 0)[0], y[x[:, 0] > 0])  # rows


def leaves_for_numpy(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * float(x.detach().numpy().mean())  # numpy


def talks(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    print(f"{y.mean():.3f}")  # talk
    return y


def counts_classes(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x).sum() * nn.functional.one_hot((x > 0).long())  # classes


def splits(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.tensor_split(linear(x), x[0].long())[0]  # split


def fills(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * torch.full((4,), x.detach().sum())  # type: ignore[arg-type]  # fill


class Reader(nn.Module):
    def __init__(self, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear, x)


@pytest.mark.parametrize(
    ("read", "marker", "reason", "way_out"),
    [
        (exits_early, "exit", "an `if`, `while` or `assert` asks for one", "torch.where(condition, a, b)"),
        (loops_as_told, "loop", "a Python number is made of one", "loop to a fixed bound and mask"),
        (parts_by_length, "parts", "a Python number is made of one, as .item(), .tolist()", "passed in"),
        (selects_rows, "rows", "how many elements aten.nonzero gives", "the weight 0"),
        (leaves_for_numpy, "numpy", "numpy reads them", "the function of torch"),
        (talks, "talk", "they are written out", "if not torch.compiler.is_compiling():"),
        (counts_classes, "classes", ": torch.nn.functional.one_hot reads them itself", "one_hot its num_classes"),
        (splits, "split", ": torch.tensor_split reads them itself", "a function that takes a tensor"),
        (fills, "fill", ": torch.full reads them itself", "a function that takes a tensor"),
    ],
)
def test_each_way_of_reading_values_is_told_what_to_do(
    read: Callable[[nn.Module, Tensor], Tensor], marker: str, reason: str, way_out: str
) -> None:
    with pytest.raises(TraceError) as caught:
        trace(nn.Sequential(nn.Linear(4, 4), Reader(read)), (torch.ones(2, 4),), {})
    message = str(caught.value)
    assert f"module 1, {__file__}:{line_of(marker)} (`" in message
    assert "depends on the values of a tensor" in message
    assert reason in message
    assert way_out in message
    for word in ("unhinted", "GuardOnData", "u0", "FunctionalTensor"):  # PyTorch's own words are in the cause
        assert word not in message


def test_a_read_in_a_library_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_library.py").write_text("def check(x):\n    assert x.max() < 3\n    return x\n")
    monkeypatch.syspath_prepend(str(folder))
    library = importlib.import_module("some_library")
    with pytest.raises(
        TraceError, match=r"some_library\.py:2 .*The line is a library's: look for an option.*compute both cases"
    ):
        trace(Reader(lambda linear, x: linear(library.check(x))), (torch.ones(2, 4),), {})


def test_what_tracing_does_not_need_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The way out that the errors name: a check, or what is printed, where nothing is being traced."""

    def checks(linear: nn.Module, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            assert torch.isfinite(x).all()
            print(f"{x.mean():.1f}")
        return linear(x)

    trace(Reader(checks), (torch.ones(2, 4),), {})
    assert capsys.readouterr().out == ""
    Reader(checks)(torch.ones(2, 4))
    assert capsys.readouterr().out == "1.0\n"


class Item(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x))


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y * y.max().item(),  # item
        lambda y: y[y > 0],  # mask
        lambda y: y[: int(y.sum())],  # slice
    ],
    ids=["item", "mask", "slice"],
)
def test_values_used_as_numbers_name_module_and_line(use: Callable[[Tensor], Tensor], request: Any) -> None:
    kind = request.node.callspec.id
    with pytest.raises(TraceError, match=rf"the root module, .*test_trace\.py:{line_of(kind)} .*values of a tensor"):
        trace(Item(use), (torch.ones(2, 4),), {})


def test_a_number_that_nothing_depends_on_is_harmless() -> None:
    def log(y: Tensor) -> Tensor:
        y.sum().item()
        return y

    model = Item(log).double()
    joint = trace(model, *row_call(0))
    assert_equals_eager(joint, model, row_call(1))


def test_changing_an_input_in_place_is_refused() -> None:
    def change(x: Tensor) -> Tensor:
        return x.add_(1)

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.linear(change(batch["x"]))

    with pytest.raises(
        TraceError, match=r"changes its input 0\.x in place, in the root .*`return x\.add_\(1\)`\): let it"
    ):
        trace(Changes(), ({"x": torch.ones(2, 4)},), {})


def test_changing_a_parameter_is_refused() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    class Replaces(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight * 2)
            return super().forward(x)

    with pytest.raises(
        TraceError, match=r"weight in place, in the root module, .*`self\.weight\.clamp_.*the optimizer"
    ):
        trace(Clamps(4, 4), (torch.ones(2, 4),), {})
    inner = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 4))  # which PyTorch's own code does
    with pytest.raises(TraceError, match=r"parameter 0\.weight in place, in module 0:"):
        trace(inner, (torch.ones(2, dtype=torch.long),), {})
    with pytest.raises(TraceError, match="replaces parameter weight by another tensor"):
        trace(Replaces(4, 4), (torch.ones(2, 4),), {})


def test_a_buffer_that_keeps_a_gradient_is_refused() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(self.linear(x))
            return x

    with pytest.raises(TraceError, match=r"gives buffer total a value that requires grad: detach\(\) the value first"):
        trace(Keeps(), (torch.ones(2, 4),), {})


def test_a_buffer_that_changes_shape_is_refused() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, x.sum().view(1)])
            return x

    with pytest.raises(
        TraceError, match=r"replaces buffer seen of shape \[1\] and torch.float32 by one of shape \[2\]"
    ):
        trace(Grows(), (torch.ones(2, 4),), {})


def test_any_other_failure_names_module_and_line() -> None:
    message = rf"module 0, .*test_trace\.py:{line_of('wrong')} \(`return x @ x  # wrong`\) raised RuntimeError: "
    with pytest.raises(TraceError, match=message) as caught:
        trace(nn.Sequential(Wrong()), (torch.ones(2, 4),), {})
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(TraceError, match=r"The rows of all ranks are traced together: 0 \[8, 3\], 1 \[4, 3\]\. "):
        trace(Adds(), (torch.ones(2, 3), torch.ones(4, 3)), {}, num_ranks=4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_lazy_and_scripted_modules_are_refused() -> None:
    with pytest.raises(TraceError, match=re.escape("0.weight has no shape yet (a lazy module): run the model once")):
        trace(nn.Sequential(nn.LazyLinear(3)), (torch.ones(2, 4),), {})
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TraceError, match="module 0 is TorchScript"):
        trace(nn.Sequential(scripted), (torch.ones(2, 4),), {})


class Adds(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Alters(nn.Module):
    """Calls a function of its weight before it multiplies by it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.eye(4, dtype=F64)), function

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.function(self.weight)


class Leaves(nn.Module):
    """Does something to itself in each call."""

    def __init__(self, action: Callable[[Any, Tensor], object], norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.layer, self.norm, self.action = nn.Linear(4, 4), norm(*[4] * (norm is not nn.Identity)), action
        self.calls, self.seen, self.kept, self.rows = 0, {"calls": 0}, [], None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        self.action(self, y)
        return y.mean()


def count(module: Any, _: Tensor) -> None:
    module.calls += 1


def count_in_a_dict(module: Any, _: Tensor) -> None:
    module.seen["calls"] += 1


def keep_an_output(module: Any, y: Tensor) -> None:
    module.kept.append(y.square().mean())


def keep_a_size(module: Any, y: Tensor) -> None:
    module.rows, module.last = len(y), y.detach()


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d], ids=["written", "captured"])
@pytest.mark.parametrize(("action", "name"), [(count, "calls"), (count_in_a_dict, "seen['calls']")])
def test_a_number_that_changes_at_each_call_is_refused(
    action: Callable[[Any, Tensor], object], name: str, norm: type[nn.Module]
) -> None:
    model = nn.Sequential(Leaves(action, norm))
    with pytest.raises(TraceError, match=rf"forward changes 0\.{re.escape(name)} \(1, then 2\) at each call.*buffer"):
        trace(model, (torch.randn(2, 4),), {})
    assert model[0].calls == 0
    assert model[0].seen == {"calls": 0}


def test_a_tensor_that_is_kept_for_others_to_differentiate_is_told() -> None:
    model = nn.Sequential(Leaves(keep_an_output))
    with pytest.warns(UserWarning, match=r"forward keeps 0\.kept\[0\], which autograd follows.*return it from forward"):
        trace(model, (torch.randn(2, 4),), {})
    assert model[0].kept == []


@pytest.mark.filterwarnings("error:.*forward keeps:UserWarning")
def test_what_is_the_same_after_each_call_is_left_alone() -> None:
    call = ((random(2, 4),), {})
    check_against_eager(Leaves(keep_a_size).double(), call, call)


@torch.library.custom_op("autopar_tests::tell", mutates_args=())
def tell(x: Tensor) -> None:
    raise AssertionError("never called")


@tell.register_fake
def _(x: Tensor) -> None:
    return None


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 4)], ids=["written", "captured"])
@pytest.mark.parametrize(
    ("act", "op"),
    [
        (lambda weight: torch.ops.aten._print("here"), r"aten\._print"),
        (lambda weight: tell(weight.detach()), r"autopar_tests\.tell"),
        (lambda weight: torch.ops.autopar_tests.tell(weight), r"autopar_tests\.tell"),
    ],
    ids=["print", "custom", "custom by name"],
)
def test_an_op_with_effects_is_refused(act: Callable[[Tensor], None], op: str, norm: Callable[[], nn.Module]) -> None:
    def altered(weight: Tensor) -> Tensor:
        act(weight)
        return weight

    with pytest.raises(TraceError, match=rf"module 1, .*test_trace\.py:\d+ .* calls {op}.* acts by something else"):
        trace(nn.Sequential(norm(), Alters(altered)).double(), (random(3, 4),), {})


def test_a_check_is_no_effect() -> None:
    def checked(weight: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg((weight > -9).all(), "small")
        return weight

    call = ((random(2, 4),), {})
    check_against_eager(Alters(checked), call, call)


def test_what_is_not_dense_is_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    odd = {
        "sparse_coo": x.to_sparse(),
        "nested": torch.nested.nested_tensor([x[0]]),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    }
    for kind, tensor in odd.items():
        with pytest.raises(InputError, match=f"input 0 is a {kind} tensor, and only dense ones can be cut"):
            trace(linear, (tensor,), {})
    linear.register_buffer("mask", x.to_sparse())
    with pytest.raises(TraceError, match="mask is a sparse_coo tensor"):
        trace(linear, (x,), {})
    with pytest.raises(TraceError, match=r"gradient of weight is a sparse_coo tensor.*sparse=False"):
        trace(nn.Embedding(8, 4, sparse=True), (tokens(2, 3, high=8),), {})
    linear = nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(TraceError, match=r"parameter weight is torch\.complex64.*view_as_complex"):
        trace(linear, (x.to(torch.complex64),), {})
    trace(linear.requires_grad_(False), (x.to(torch.complex64),), {})


def test_a_failure_prints_no_traceback_of_pytorchs_own(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TraceError, match="same reduction dim"):
        trace(nn.Linear(8, 8), (torch.randn(2, 9),), {})
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
            return self.linear(x)


def test_marks_for_the_profiler_are_left_out() -> None:
    joint = trace(Recorded(), (torch.randn(2, 4),), {})
    assert not [node for node in joint.module.graph.nodes if "profiler" in str(node.target)]
    assert all("val" in node.meta for node in joint.module.graph.nodes if node.op != "output")


@dataclass
class Unused:
    """Not registered with pytree."""

    x: int = 0


def test_an_unhashable_or_unknown_constant_is_compared_by_identity() -> None:
    first, second = Unused(), Unused()
    key = flatten_inputs((first,), {})[1]
    assert key == flatten_inputs((first,), {})[1]
    assert key != flatten_inputs((second,), {})[1]
    assert hash(key) is not None

"""Mutants: a program that lacks a collective, runs one twice or mixes two up must be told from the right one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from programs import Subject, subject
from tiny_models import ConvNet, Experts, Llama, Mlp, TinyGpt, token_batch
from torch import fx

from autopar.errors import VerificationError
from autopar.plan import Plan
from autopar.program import COLLECTIVE_KINDS, LocalProgram
from autopar.rules import Call

aten, C10D = torch.ops.aten, torch.ops._c10d_functional


MODELS: dict[str, Callable[[], Subject]] = {
    "mlp": lambda: subject(Mlp(), torch.randn(8, 12)),
    "gpt": lambda: subject(TinyGpt(vocab=24, layers=1), *token_batch(8, 4, 24)),
    "llama": lambda: subject(Llama(), *token_batch(8, 4, 24)),
    "odd vocabulary": lambda: subject(TinyGpt(vocab=25, layers=1), *token_batch(8, 4, 25)),
    "three heads": lambda: subject(TinyGpt(vocab=24, width=12, heads=3, layers=1), *token_batch(8, 4, 24)),
    "experts": lambda: subject(Experts(), torch.randn(8, 4, 16)),
    "images": lambda: subject(ConvNet(), torch.randn(8, 3, 5, 5)),
}
STRATEGIES = {"ddp": (4,), "zero3": (4,), "tp": (2,), "tp+sp": (2,), "fsdp+tp": (2, 2)}


@functools.cache
def rewritten(model: str, strategy: str) -> tuple[Subject, Plan, LocalProgram]:
    torch.manual_seed(0)
    ours = MODELS[model]()
    # Fresh norms and biases are all ones and zeros, so that one in another's place would go unseen.
    for parameter in ours.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plan = ours.plan(strategy, *STRATEGIES[strategy])
    return ours, plan, ours.program(plan)


def is_told(ours: Subject, plan: Plan, program: LocalProgram) -> bool:
    try:
        return not ours.compare(program, plan).ok
    except VerificationError:
        return True


# ---- the mutants


def collectives(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in COLLECTIVE_KINDS]


def edited(program: LocalProgram, backward: bool, edit: Callable[[fx.Graph, list[fx.Node]], None]) -> LocalProgram:
    """A copy of the program in which one graph is edited, given its collectives."""
    local = program.backward if backward else program.forward
    assert local is not None
    changed = copy.copy(local)
    graph, copies = fx.Graph(), {}
    graph.output(graph.graph_copy(local.module.graph, copies))
    changed.module = fx.GraphModule(local.module, graph)
    edit(graph, collectives(graph))
    graph.lint()
    mutant = copy.copy(program)
    setattr(mutant, "backward" if backward else "forward", changed)
    return mutant


_UNREAD: dict[object, Callable[[Call], set[str]]] = {
    aten.native_layer_norm_backward.default: lambda call: {"bias"},
    aten.convolution_backward.default: lambda call: set() if call["output_mask"][0] else {"weight"},
}
"""Arguments of which an op reads only the shape, so that a mutant of their values is no mutant."""


def is_read(value: fx.Node) -> bool:
    """Whether an op looks at a value, itself or through layout steps."""
    for user in value.users:
        if user.op == "output" or not (user.meta.get("layout") or user.target in _UNREAD):
            return True
        if user.target in _UNREAD:
            call = Call(user)
            if any(v is value for name, v in call.args.items() if name not in _UNREAD[user.target](call)):
                return True
        elif is_read(user):
            return True
    return False


def drop(graph: fx.Graph, node: fx.Node) -> None:
    """Put something local of the right shape in a collective's place."""
    kind, x = COLLECTIVE_KINDS[node.target], node.args[0]
    with graph.inserting_before(node):
        if kind == "all_gather":
            local = graph.call_function(torch.cat, ([x] * int(node.args[1]), 0))  # type: ignore[arg-type]
        elif kind == "reduce_scatter":
            local = graph.call_function(aten.slice.Tensor, (x, 0, 0, node.meta["val"].shape[0]))
        else:
            local = graph.call_function(aten.alias.default, (x,))
    local.meta = {key: value for key, value in node.meta.items() if key != "bytes"}
    node.replace_all_uses_with(local)
    graph.erase_node(node)


def double(graph: fx.Graph, node: fx.Node) -> None:
    """All-reduce what was reduced already."""
    wait = next(iter(node.users))
    with graph.inserting_after(wait):
        again = graph.node_copy(node, lambda n: wait if n is node.args[0] else n)
        again.args = (wait, *node.args[1:])
    with graph.inserting_after(again):
        done = graph.call_function(wait.target, (again,))  # type: ignore[arg-type]
        done.meta = dict(wait.meta)
    wait.replace_all_uses_with(done, lambda user: user is not again)


def are_alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two collectives could carry one another's values, and neither needs the other's result."""
    shapes = [(n.args[0].meta["val"].shape, n.args[0].meta["val"].dtype) for n in (a, b)]  # type: ignore[union-attr]
    return a.target is b.target and a.args[1:] == b.args[1:] and shapes[0] == shapes[1] and a not in ancestors(b)


def ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return seen


def swap(graph: fx.Graph, a: fx.Node, b: fx.Node) -> None:
    """Let two collectives carry one another's operands, and order the graph anew."""
    a.args, b.args = (b.args[0], *a.args[1:]), (a.args[0], *b.args[1:])
    placed: set[fx.Node] = set()
    left = list(graph.nodes)
    end = left[-1]
    while left:
        ready = next(n for n in left if placed.issuperset(n.all_input_nodes))
        if ready is not end:
            end.prepend(ready)
        placed.add(ready)
        left.remove(ready)


def mutants(program: LocalProgram) -> Iterator[tuple[str, LocalProgram]]:
    """Every mutant of both passes, with a name."""
    for backward in (False, True):
        local = program.backward if backward else program.forward
        assert local is not None
        found = collectives(local.module.graph)
        for i, node in enumerate(found):
            if not is_read(node):
                continue
            yield f"without {node.name}", edited(program, backward, lambda graph, nodes, i=i: drop(graph, nodes[i]))  # type: ignore[misc]
            if COLLECTIVE_KINDS[node.target] == "all_reduce" and node.args[1] == "sum":  # a maximum is the same twice
                yield f"twice {node.name}", edited(program, backward, lambda graph, nodes, i=i: double(graph, nodes[i]))  # type: ignore[misc]
        for i, node in enumerate(found):
            j = next((j for j in range(i + 1, len(found)) if are_alike(node, found[j])), None)
            if j is not None:
                yield (
                    f"{node.name} for {found[j].name}",
                    edited(
                        program,
                        backward,
                        lambda graph, nodes, i=i, j=j: swap(graph, nodes[i], nodes[j]),  # type: ignore[misc]
                    ),
                )


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("model", list(MODELS))
def test_every_mutant_is_told(model: str, strategy: str) -> None:
    ours, plan, program = rewritten(model, strategy)
    assert ours.compare(program, plan).ok
    made = dict(mutants(program))
    assert len(made) >= len(program.collectives()) - 3  # three norms' biases are gathered for the backward and not read
    assert [name for name, mutant in made.items() if not is_told(ours, plan, mutant)] == []

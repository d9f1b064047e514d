"""What plans of one graph share: nothing that one plan does shows in the program of another."""

from __future__ import annotations

import itertools

import pytest
import torch
from programs import Subject, subject
from tiny_models import Llama, TinyGpt, token_batch
from torch import fx

from autopar.errors import PlanError
from autopar.factors import analyse
from autopar.graph import MAX_KEPT
from autopar.mesh import Mesh
from autopar.passes.pipeline import lowered, rewrite
from autopar.placement import Placement, Replicate, cuts, local_shape, shard
from autopar.program import Collective, collectives_of
from autopar.runtime.sharding import shard_tensor
from autopar.strategies import STRATEGIES


def traced() -> Subject:
    torch.manual_seed(0)
    return subject(TinyGpt(64, 16, 4, layers=2, seq=8), *token_batch(8, 8, 64))


@pytest.fixture(scope="module")
def gpt() -> Subject:
    return traced()


def sizes_of(strategy: str) -> tuple[int, ...]:
    return (2, 2) if strategy in ("hsdp", "fsdp+tp") else (4,)


def test_rewriting_leaves_the_graph_as_it_was(gpt: Subject) -> None:
    before = gpt.joint.fingerprint()
    names = [node.name for node in gpt.joint.module.graph.nodes]
    for strategy in STRATEGIES:
        gpt.program(gpt.plan(strategy, *sizes_of(strategy)))
    assert gpt.joint.fingerprint() == before
    assert [node.name for node in gpt.joint.module.graph.nodes] == names


def test_a_program_does_not_depend_on_what_was_planned_before(gpt: Subject) -> None:
    for strategy in STRATEGIES:  # all on one graph, so the later ones find what the earlier ones left
        plan = gpt.plan(strategy, *sizes_of(strategy))
        alone = traced()
        assert alone.plan(strategy, *sizes_of(strategy)) == plan
        assert alone.program(plan).fingerprint() == gpt.program(plan).fingerprint(), strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_are_known_before_the_program_is(gpt: Subject, strategy: str) -> None:
    def key(c: Collective) -> tuple[str, str, str, bool, int]:
        return c.kind, c.axis, c.module, c.backward, c.num_bytes

    plan = gpt.plan(strategy, *sizes_of(strategy))
    early = sorted(map(key, collectives_of(lowered(gpt.joint, plan))))
    assert early == sorted(map(key, gpt.program(plan).collectives()))


def test_no_code_is_generated_for_a_program_that_does_not_run(gpt: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("code was generated")

    plan = gpt.plan("tp", 4)
    monkeypatch.setattr(fx.Graph, "python_code", refuse)
    program = rewrite(gpt.joint, plan)
    with pytest.raises(AssertionError, match="code was generated"):
        program.forward.module()


def test_a_graph_is_analysed_once(gpt: Subject) -> None:
    assert analyse(gpt.joint) is analyse(gpt.joint)


def test_few_derived_values_are_kept() -> None:
    joint = subject(Llama(), *token_batch(4, 8, 24)).joint
    for number in range(2 * MAX_KEPT):
        assert joint.keep(number, lambda number=number: number) == number
        joint.keep("often", object)
    assert len(joint.derived) == MAX_KEPT
    assert "often" in joint.derived


@pytest.mark.parametrize("size", [24, 30, 36, 42])
@pytest.mark.parametrize(
    "placements", list(itertools.product([Replicate(), shard(0), shard(0, 3), shard(0, 6)], repeat=2))
)
def test_local_shapes_are_those_of_the_parts(size: int, placements: tuple[Placement, ...]) -> None:
    mesh, whole = Mesh(("a", "b"), (2, 3)), torch.zeros(size, 2)
    try:
        parts = [shard_tensor(whole, placements, mesh, rank) for rank in range(mesh.num_ranks)]
    except PlanError:
        with pytest.raises(PlanError):
            local_shape((size, 2), placements, mesh)
        return
    for rank, part in enumerate(parts):
        assert local_shape((size, 2), placements, mesh, mesh.coordinate(rank)) == tuple(part.shape)
    assert len(cuts(placements, mesh)) == sum(not isinstance(p, Replicate) for p in placements)

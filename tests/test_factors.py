"""The factor analysis: which dims of a model are one factor, and how plans name them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import subject
from tiny_models import TinyGpt
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.factors import Factor, FactorAnalysis, analyse, leaves, root, unify
from autopar.plan import FactorRef

RUNS = settings(max_examples=100, deadline=None, derandomize=True, database=None)
BATCH, SEQ, VOCAB, WIDTH, HEADS, HEAD_DIM, FFN = 11, 7, 65, 30, 3, 10, 120


# ---- the forest


def sizes(factors: list[Factor]) -> list[int]:
    return [factor.size for factor in factors]


def test_equal_sizes_become_one() -> None:
    a, b = Factor(6), Factor(6)
    assert unify([a], [b])
    assert root(a) is root(b)


def test_a_multiple_is_cut() -> None:
    fused, heads, rest = Factor(24), Factor(4), Factor(6)
    assert unify([fused], [heads, rest])
    assert leaves([fused]) == [root(heads), root(rest)]


def test_cuts_reach_what_was_merged_before() -> None:
    a, b = Factor(24), Factor(24)
    unify([a], [b])
    unify([b], [Factor(2), Factor(12)])
    unify([a], [Factor(8), Factor(3)])
    assert sizes(leaves([a])) == [2, 4, 3]
    assert leaves([a]) == leaves([b])


def test_sizes_that_do_not_divide_are_left_alone() -> None:
    a, b, tail = Factor(6), Factor(4), Factor(3)
    assert not unify([a], [b, tail])
    assert leaves([a]) == [a]
    assert not unify([Factor(6)], [Factor(2)])
    assert not unify([Factor(6)], [])


def test_factors_of_size_one_are_nothing() -> None:
    a, one = Factor(5), Factor(1)
    assert unify([one, a, Factor(1)], [Factor(5)])
    assert leaves([one]) == []


def test_a_factor_may_stand_on_both_sides() -> None:
    a, b = Factor(4), Factor(4)
    assert unify([a, b], [b, a])
    assert root(a) is root(b)
    c = Factor(4)
    assert unify([c, Factor(6)], [Factor(2), Factor(12)])
    assert unify([c], [Factor(2), Factor(2)])


@st.composite
def groupings(draw: st.DrawFn) -> list[list[int]]:
    """Shapes that group the same chain of prime factors."""
    atoms = draw(st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        ends = sorted(draw(st.sets(st.integers(1, len(atoms)), max_size=4)) | {len(atoms)})
        starts = [0, *ends[:-1]]
        return [math.prod(atoms[a:b]) for a, b in zip(starts, ends, strict=True)]

    return [grouped() for _ in range(3)]


@RUNS
@given(groupings(), st.integers(0, 2))
def test_chains_of_views_agree_whatever_the_order(shapes: list[list[int]], first: int) -> None:
    lists = [[Factor(size) for size in shape] for shape in shapes]
    order = [first, (first + 1) % 3, (first + 2) % 3]
    assert unify(lists[order[0]], lists[order[1]])
    assert unify(lists[order[1]], lists[order[2]])
    found = [leaves(factors) for factors in lists]
    assert found[0] == found[1] == found[2]
    for shape, factors in zip(shapes, lists, strict=True):
        assert [math.prod(sizes(leaves([factor]))) for factor in factors] == shape


# ---- a transformer


@pytest.fixture(scope="module")
def gpt() -> FactorAnalysis:
    model = TinyGpt(vocab=VOCAB, width=WIDTH, heads=HEADS, layers=2, seq=SEQ)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    return analyse(subject(model, ids, ids).joint)


def parts(analysis: FactorAnalysis, anchor: str, dim: int) -> list[Factor]:
    return analysis.dim_factors(analysis.anchors[anchor], dim)


def test_fused_qkv_is_three_by_heads_by_head_dim(gpt: FactorAnalysis) -> None:
    assert sizes(parts(gpt, "blocks.0.qkv.weight", 0)) == [3, HEADS, HEAD_DIM]
    assert parts(gpt, "blocks.0.qkv.weight", 0) == parts(gpt, "blocks.0.qkv.bias", 0)
    assert parts(gpt, "blocks.0.out.weight", 1) == parts(gpt, "blocks.0.qkv.weight", 0)[1:]


def test_ffn_is_one_factor_of_its_block(gpt: FactorAnalysis) -> None:
    (ffn,) = parts(gpt, "blocks.0.up.weight", 0)
    assert ffn.size == FFN
    assert [ffn] == parts(gpt, "blocks.0.up.bias", 0) == parts(gpt, "blocks.0.down.weight", 1)
    assert [ffn] != parts(gpt, "blocks.1.up.weight", 0)
    assert parts(gpt, "blocks.0.qkv.weight", 0)[1] is not parts(gpt, "blocks.1.qkv.weight", 0)[1]


def test_the_residual_stream_is_shared_by_all_blocks(gpt: FactorAnalysis) -> None:
    (width,) = parts(gpt, "tokens.weight", 1)
    for anchor, dim in [
        ("positions.weight", 1), ("blocks.0.norm1.weight", 0), ("blocks.0.qkv.weight", 1), ("blocks.1.out.weight", 0),
        ("blocks.1.down.bias", 0), ("norm.bias", 0),
    ]:  # fmt: skip
        assert parts(gpt, anchor, dim) == [width], anchor


def test_batch_and_sequence_are_shared_by_all_inputs(gpt: FactorAnalysis) -> None:
    assert parts(gpt, "input:0", 0) == parts(gpt, "input:1", 0)
    assert sizes(parts(gpt, "input:0", 0)) == [BATCH]
    assert parts(gpt, "input:0", 1) == parts(gpt, "input:1", 1)
    assert parts(gpt, "input:0", 1) != parts(gpt, "positions.weight", 0)


def test_gradients_lie_as_their_parameters(gpt: FactorAnalysis) -> None:
    assert gpt.replicated == []
    mms = [node for node in gpt.rules if node.target is torch.ops.aten.mm.default and node.meta["backward"]]
    ffn = parts(gpt, "blocks.0.up.weight", 0)
    assert any(gpt.dim_factors(node, d) == ffn for node in mms for d in (0, 1))


class Coincidence(nn.Module):
    """Two layers of the same sizes that have nothing to do with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) @ self.right(x).T


def test_equal_sizes_alone_do_not_unify() -> None:
    found = analyse(subject(Coincidence(), torch.randn(6, 6)).joint)
    left_in, left_out = parts(found, "left.weight", 1), parts(found, "left.weight", 0)
    assert left_in == parts(found, "right.weight", 1)
    assert left_out == parts(found, "right.weight", 0), "contracted with one another"
    assert left_in != left_out
    assert parts(found, "input:0", 0) not in (left_in, left_out)


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y.sum(1)


def test_all_inputs_have_one_batch_even_if_the_model_does_not_combine_them() -> None:
    found = analyse(subject(TwoInputs(), torch.randn(4, 3), torch.randn(4, 5)).joint)
    assert parts(found, "input:0", 0) == parts(found, "input:1", 0)


class Rotary(nn.Module):
    """Swaps the halves of each head, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(5, 3 * 14, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (3, 14))
        left, right = q.chunk(2, -1)
        return torch.cat([-right, left], -1) * 2


def test_a_swap_of_halves_cuts_the_head() -> None:
    found = analyse(subject(Rotary(), torch.randn(4, 5)).joint)
    assert sizes(parts(found, "query.weight", 0)) == [3, 2, 7]


class Unruly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).histc(4)


def test_ops_without_a_rule_are_listed() -> None:
    found = analyse(subject(Unruly(), torch.randn(4, 6)).joint)
    assert "aten.histc.default" in {str(node.target) for node in found.replicated}


# ---- names


def test_a_plan_finds_its_factors(gpt: FactorAnalysis) -> None:
    assert gpt.find(FactorRef("blocks.0.qkv.weight", 0, 1)) is parts(gpt, "blocks.0.out.weight", 1)[0]
    assert gpt.find(FactorRef("input:0", 0)) is parts(gpt, "input:1", 0)[0]
    assert gpt.find(FactorRef("no.such.weight", 0)) is None


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (
            FactorRef("blocks.0.up.weight", 0, 1),
            "the plan cuts part 1 of dim 0 of 'blocks.0.up.weight', which has shape [120, 30] and 1 factors there; "
            "make a new plan for this model",
        ),
        (FactorRef("norm.bias", 3), "the plan cuts part 0 of dim 3 of 'norm.bias', which has shape [30]"),
        (FactorRef("norm.bias", -1), "the plan cuts part 0 of dim -1 of 'norm.bias'"),
    ],
    ids=["part", "dim", "negative"],
)
def test_a_plan_for_another_model_is_refused(gpt: FactorAnalysis, ref: FactorRef, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        gpt.find(ref)


def test_a_dim_of_size_one_has_no_factor() -> None:
    found = analyse(subject(TwoInputs(), torch.randn(1, 3), torch.randn(1, 5)).joint)
    assert found.find(FactorRef("input:0", 0)) is None


def check_analysis(found: FactorAnalysis) -> None:
    for (node, index), factors in found.dims.items():
        value: Any = node.meta["val"]
        value = value[index] if isinstance(value, (tuple, list)) else value
        for factor, size in zip(factors, value.shape, strict=True):
            assert math.prod(sizes(leaves([factor]))) == size, f"{node} dim of {size}"


def test_cut_factors_always_multiply_to_the_dim(gpt: FactorAnalysis) -> None:
    check_analysis(gpt)

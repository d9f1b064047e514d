"""Rules of ops that write into a tensor, sort it, or move its elements along some dims."""

from __future__ import annotations

import torch
from torch import fx

from autopar.rules import Call, Dims, OpRule, build, derives
from autopar.rules_compute import index, index_block
from autopar.rules_view import names

aten = torch.ops.aten

# -------------------------------------------------------------------------- along a dim, which stays whole; others free


@derives(
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
    aten.mode.default,
    aten.max.dim,
    aten.min.dim,
    aten.cummax.default,
    aten.cummin.default,
)
def select_along(call: Call) -> OpRule:
    """Values and indices along one dim; the indices count positions in that dim, which stays whole.  What has all
    positions, in some order, has the dim's factor: a plan that cuts a batch cuts the sorted batch too."""
    rank = len(call.shape("self"))
    if rank == 0:
        return build(call, {}, [() for _ in call.outputs])
    dim = call.dim("dim", rank)
    base = names(rank)
    source = tuple((f,) for f in base)
    if len(call.out_shape) < rank:
        found: Dims = tuple(d for i, d in enumerate(source) if i != dim)
    elif call.out_shape == call.shape("self"):
        found = source
    else:
        found = tuple(("found",) if i == dim else d for i, d in enumerate(source))
    return build(call, {"self": source}, [found] * len(call.outputs), whole=[base[dim], "found"])


@derives(aten.roll, aten.flip)
def move_along(call: Call) -> OpRule:
    """Elements move along the dims that are named."""
    base = names(len(call.out_shape))
    dims = tuple((f,) for f in base)
    moved = [base[d % len(base)] for d in call["dims"]] if call["dims"] else base
    return build(call, {"self": dims}, [dims], whole=moved, linear=[["self"]])


@derives(aten._fft_c2c, aten._fft_r2c, aten._fft_c2r)
def transform_along(call: Call) -> OpRule:
    """A Fourier transform along the dims that are named, whose sizes it may change."""
    rank = len(call.out_shape)
    base, after = names(rank), names(rank, "t")
    along = {int(d) % rank for d in call["dim"]}
    result: Dims = tuple((after[i],) if i in along else (f,) for i, f in enumerate(base))
    whole = [name for i in along for name in (base[i], after[i])]
    return build(call, {"self": tuple((f,) for f in base)}, [result], whole=whole)


@derives(aten.glu.default)
def glu(call: Call) -> OpRule:
    """Half of a dim gates the other half."""
    rank = len(call.out_shape)
    base, dim = names(rank), call.dim("dim", rank)
    source = tuple((f,) for f in base)
    result: Dims = tuple(("half",) if i == dim else d for i, d in enumerate(source))
    return build(call, {"self": source}, [result], whole=[base[dim], "half"])


@derives(aten.glu_backward.default)
def glu_backward(call: Call) -> OpRule:
    """The gradient of both halves."""
    rank = len(call.out_shape)
    base, dim = names(rank), call.dim("dim", rank)
    source = tuple((f,) for f in base)
    halved: Dims = tuple(("half",) if i == dim else d for i, d in enumerate(source))
    inputs: dict[str, Dims | list[Dims]] = {"grad_output": halved, "self": source}
    return build(call, inputs, [source], whole=[base[dim], "half"], linear=[["grad_output"]])


@derives(aten.repeat.default)
def repeat(call: Call) -> OpRule:
    """New dims in front, and dims that are repeated, which stay whole."""
    source, result = call.shape("self"), call.out_shape
    offset = len(result) - len(source)
    base, after = names(len(source)), names(len(result), "r")
    kept = [size == result[i + offset] for i, size in enumerate(source)]
    out: Dims = tuple(
        (base[i - offset],) if i >= offset and kept[i - offset] else (after[i],) for i in range(len(result))
    )
    whole = [*after, *(f for f, same in zip(base, kept, strict=True) if not same)]
    return build(call, {"self": tuple((f,) for f in base)}, [out], whole=whole, linear=[["self"]])


@derives(aten.view_as_real.default, aten.view_as_complex.default)
def complex_parts(call: Call) -> OpRule:
    """A last dim of two, real and imaginary part, appears or goes."""
    rank = min(len(call.out_shape), len(call.shape("self")))
    base = tuple((f,) for f in names(rank))
    real = "view_as_real" in str(call.op._schema.name)
    parts = (*base, ("parts",))
    source, result = (base, parts) if real else (parts, base)
    return build(call, {"self": source}, [result], whole=["parts"])


def _diagonal(call: Call, rank: int) -> tuple[Dims, Dims, list[str]]:
    """Dims of a tensor and of a diagonal of two of its dims, which comes last; the two and it stay whole."""
    base = names(rank)
    pair = {call.dim("dim1", rank), call.dim("dim2", rank)}
    dims = tuple((f,) for f in base)
    line: Dims = (*(d for i, d in enumerate(dims) if i not in pair), ("line",))
    return dims, line, ["line", *(base[i] for i in pair)]


@derives(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: Call) -> OpRule:
    """A diagonal of two dims."""
    dims, line, whole = _diagonal(call, len(call.shape("self")))
    return build(call, {"self": dims}, [line], whole=whole, linear=[["self"]])


@derives(aten.diagonal_backward.default)
def diagonal_backward(call: Call) -> OpRule:
    """Zeros around a diagonal; the sizes are arguments."""
    dims, line, whole = _diagonal(call, len(call.out_shape))
    return build(call, {"grad_output": line}, [dims], whole=whole, linear=[["grad_output"]])


def _windows(call: Call, rank: int, argument: str) -> tuple[Dims, Dims, list[str]]:
    """Dims of a tensor and of its windows along one dim, with what stays whole."""
    base, dim = names(rank), call.dim(argument, rank)
    dims = tuple((f,) for f in base)
    windows: Dims = (*(("window",) if i == dim else d for i, d in enumerate(dims)), ("place",))
    return dims, windows, [base[dim], "window", "place"]


@derives(aten.unfold.default)
def unfold(call: Call) -> OpRule:
    """Windows along one dim, which become a last one."""
    dims, windows, whole = _windows(call, len(call.shape("self")), "dimension")
    return build(call, {"self": dims}, [windows], whole=whole, linear=[["self"]])


@derives(aten.unfold_backward.default)
def unfold_backward(call: Call) -> OpRule:
    """The windows' sum; the sizes are arguments, and the windows may be the same along a dim (`torch.istft`'s are)."""
    dims, windows, whole = _windows(call, len(call.out_shape), "dim")
    sizes = zip(windows, call.shape("grad_in"), [*call.out_shape, 1], strict=True)
    read = tuple(() if given == 1 != made and dim[0] not in whole else dim for dim, given, made in sizes)
    return build(call, {"grad_in": read}, [dims], whole=whole, linear=[["grad_in"]])


@derives(aten.searchsorted.Tensor)
def search(call: Call) -> OpRule:
    """Each value is looked for in its row of the sorted ones, or in all of them if they are one row."""
    values, rows = call.shape("self"), call.shape("sorted_sequence")
    base = names(len(values))
    dims = tuple((f,) for f in base)
    inputs: dict[str, Dims | list[Dims]] = {"self": dims}
    if len(rows) > 1 or len(values) == 1 == len(rows):
        inputs["sorted_sequence"] = (*dims[: len(rows) - 1], ("sorted",))
    if call["sorter"] is not None:
        return build(call, {}, [tuple(() for _ in values)])
    return build(call, inputs, [dims], whole=["sorted"])


# ------------------------------------------------------------------------------------------------------------- writing


@derives(aten.select_scatter.default, aten.slice_scatter.default)
def write_slice(call: Call) -> OpRule:
    """Part of a dim is written; it stays whole, the others are those of the part."""
    rank = len(call.out_shape)
    base, dim = names(rank), call.dim("dim", rank)
    dims = tuple((f,) for f in base)
    narrow = len(call.shape("src")) < rank
    part: Dims = tuple(("part",) if i == dim else d for i, d in enumerate(dims) if not (narrow and i == dim))
    return build(call, {"self": dims, "src": part}, [dims], whole=[base[dim], "part"], linear=[["self", "src"]])


@derives(aten.diagonal_scatter.default)
def write_diagonal(call: Call) -> OpRule:
    """A diagonal of two dims is written."""
    dims, line, whole = _diagonal(call, len(call.out_shape))
    return build(call, {"self": dims, "src": line}, [dims], whole=whole, linear=[["self", "src"]])


def _is_zeros(value: object) -> bool:
    """Whether this is the constant 0, onto which parts may be summed rank by rank: anything else would count once for
    each rank."""
    return isinstance(value, fx.Node) and value.target is aten.full.default and value.args[1] in (0, False)


@derives(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
def scatter(call: Call) -> OpRule:
    """Elements are written along `dim`, which stays whole, as does any dim in which the index is shorter.  The elements
    may be cut where what they give is a sum (into zeros) or a maximum."""
    into, at = call.shape("self"), call.shape("index")
    rank = len(into)
    if rank == 0 or len(at) != rank:
        return build(call, {}, [tuple(() for _ in into)])
    dim = call.dim("dim", rank)
    given = call.shape("src") if "src" in call.args else at
    base, other, third = names(rank), names(rank, "i"), names(rank, "s")
    same = [i != dim and into[i] == at[i] == given[i] for i in range(rank)]
    combine = _combines(call) if at[dim] == given[dim] else None
    if combine:
        third[dim] = other[dim]
    dims = tuple((f,) for f in base)
    index_dims: Dims = tuple((base[i],) if same[i] else (other[i],) for i in range(rank))
    source_dims: Dims = tuple((base[i],) if same[i] else (third[i],) for i in range(rank))
    whole = [*other, *third, *(f for i, f in enumerate(base) if not same[i])]
    inputs: dict[str, Dims | list[Dims]] = {"self": dims, "index": index_dims}
    if "src" in call.args:
        inputs["src"] = source_dims
    free = {other[dim]} if combine else set()
    reduce = {name: combine for name in free if combine}
    return build(call, inputs, [dims], whole={*whole} - free, reduce=reduce, even=free)


def _combines(call: Call) -> str | None:
    """How the results of a part of the elements each make that of all, if they do."""
    if call.op in (aten.scatter.src, aten.scatter.value):
        return None
    how = {"sum": "sum", "amax": "max", "amin": "min"}.get(call.args.get("reduce", "sum"))
    if how == "sum":
        return how if _is_zeros(call["self"]) else None
    return how if call["include_self"] else None


@derives(aten.index_add.default)
def index_add(call: Call) -> OpRule:
    """Slices are added along `dim`, which stays whole; those that are added to zeros may be cut."""
    rank = len(call.out_shape)
    base, dim = names(rank), call.dim("dim", rank)
    dims = tuple((f,) for f in base)
    source: Dims = tuple(("rows",) if i == dim else d for i, d in enumerate(dims))
    inputs: dict[str, Dims | list[Dims]] = {"self": dims, "index": (("rows",),), "source": source}
    whole = [base[dim]] if _is_zeros(call["self"]) else [base[dim], "rows"]
    return build(call, inputs, [dims], whole=whole, linear=[["self", "source"]], even=["rows"])


@derives(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call) -> OpRule:
    """Values are written where index tensors point; dims that they do not index are free if the values have them, and
    so are the index tensors' own where values are added to zeros."""
    indices = list(call["indices"])
    into, values = call.shape("self"), call.shape("values")
    used = [i for i, node in enumerate(indices) if node is not None]
    vals = [indices[i].meta["val"] for i in used]
    adjacent = used == list(range(used[0], used[-1] + 1))
    if any(v.dtype == torch.bool for v in vals) or not adjacent:
        return build(call, {}, [tuple(() for _ in into)])
    block, terms = index_block(vals)
    if not (call["accumulate"] and _is_zeros(call["self"])):
        block, terms = tuple(() for _ in block), [tuple(() for _ in term) for term in terms]
    free = [i for i in range(len(into)) if i not in used]
    # The shape that the values broadcast to: free dims before, the indices', free dims after.
    before, after = ([i for i in free if i < used[0]], [i for i in free if i > used[-1]])
    target = (*((f"d{i}",) for i in before), *block, *((f"d{i}",) for i in after))
    offset = len(target) - len(values)
    term: Dims = tuple(
        target[i + offset] if size != 1 and target[i + offset] else (f"v{i}",) for i, size in enumerate(values)
    )
    has = {name for group in term for name in group}
    dims: Dims = tuple((f"d{i}",) if f"d{i}" in has else (f"w{i}",) for i in range(len(into)))
    whole = [*(f"w{i}" for i in range(len(into))), *(f"v{i}" for i in range(len(values)))]
    even = [name for group in block for name in group]
    return build(call, {"self": dims, "indices": terms, "values": term}, [dims], whole=whole, even=even)


derives(aten._unsafe_index.Tensor)(index)

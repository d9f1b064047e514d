"""The plan as text: a header, one row per module with repeated blocks folded, memory, collectives, candidates."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table

from autopar.graph import JointGraph
from autopar.placement import ROWS_MARGIN, describe_sharding, is_sharded
from autopar.plan import Candidate, MemoryParts, ModuleRow, Plan, Storage
from autopar.program import LocalProgram

Key = TypeVar("Key", bound=Hashable)


def render_plan(plan: Plan, width: int = 120) -> str:
    """The plan as plain text of at most `width` columns; the same plan always gives the same text."""
    parts: list[RenderableType] = [_header(plan)]
    report = plan.report
    if report is None:
        parts += [_factor_lines(plan), Group("Parameters at rest", _storage_table(plan))]
        parts += [_recompute_lines(plan)] if plan.recompute else []
    else:
        parts.append(Group("Modules", _module_table(report.rows)))
        parts += [_recompute_lines(plan)] if plan.recompute else []
        parts.append(Group("Memory at the peak, per rank", _memory_table(report.memory, report.budget_bytes)))
        if report.collective_bytes:
            parts.append(Group("Collectives, per rank and step", _collective_table(report.collective_bytes)))
        if report.candidates:
            parts.append(Group("Candidates", _candidate_table(report.candidates)))
        if report.replicated_ops:
            parts.append(_replicated_note(report.replicated_ops))
        if report.whole_modules:
            parts.append(_whole_note(report.whole_modules))
        if report.by_group:
            parts.append(_by_group_note(report.by_group))
    return as_text(parts, width)


def as_text(parts: Iterable[RenderableType], width: int = 120) -> str:
    """What rich would print, as plain text of at most `width` columns with an empty line between the parts."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, color_system=None, force_terminal=False, markup=False, highlight=False, emoji=False
    )
    for part in parts:
        console.print(part)
        console.print()
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip("\n")


def build_rows(
    joint: JointGraph,
    program: LocalProgram,
    describe_param: Callable[[str], str],
    copies: Callable[[str], Sequence[str]] = lambda module: (module,),
) -> tuple[ModuleRow, ...]:
    """One row for each module that owns parameters or collectives, in the order in which they run, equal ones folded.

    Args:
        joint: the traced program; names the parameters, their shapes and the tied ones.
        program: the rewritten one; has the collectives and the shardings of activations.
        describe_param: a parameter's placement in a word or two, such as `column` or `shard(0)@dp`.
        copies: the modules of the whole model that a module of a folded graph stands for.

    A folded row's collectives are those of one of its modules, its bytes those of all of them.
    """
    owned: dict[str, dict[str, str]] = defaultdict(dict)
    shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for path, node in joint.param_nodes().items():
        module, _, name = path.rpartition(".")
        owned[module][name] = describe_param(path)
        shapes[module].append(tuple(node.meta["val"].shape))
    for alias, original in joint.tied.items():
        if original in joint.param_nodes():
            module, _, name = alias.rpartition(".")
            owned[module][name] = f"tied to {original}"
    calls: dict[str, Counter[str]] = defaultdict(Counter)
    num_bytes: Counter[str] = Counter()
    for c in program.collectives():
        calls[c.module][f"{c.kind}@{c.axis}"] += 1
        num_bytes[c.module] += c.num_bytes
    activations = _activations(program)
    order = list(dict.fromkeys(node.meta.get("module", "") for node in program.joint.module.graph.nodes))
    named = [module for module in dict.fromkeys([*order, *owned, *calls]) if module in owned or module in calls]
    rows = [
        (
            copy,
            (
                _describe_params(owned.get(module, {})),
                activations.get(module, ""),
                _describe_calls(calls.get(module, {})),
                num_bytes[module],
                tuple(shapes.get(module, ())),
            ),
        )
        for module in named
        for copy in copies(module)
    ]
    return tuple(
        ModuleRow(module, count, params, activation, collectives, count * size)
        for module, count, (params, activation, collectives, size, _) in fold_repeats(rows)
    )


def fold_repeats(rows: Sequence[tuple[str, Key]]) -> list[tuple[str, int, Key]]:
    """Fold rows whose dotted paths differ in a number only and whose keys are equal to (pattern, count, key).

    Where all rows of a pattern are equal the number becomes `*`; otherwise runs of neighbours become ranges, such as
    `h.0-3.mlp`.  A folded row stands where its first member stood.
    """
    folded = [(tuple(path.split(".")), 1, key) for path, key in rows]
    for position in reversed(range(max((len(parts) for parts, _, _ in folded), default=0))):
        folded = _fold_at(folded, position)
    return [(".".join(parts), count, key) for parts, count, key in folded]


_Row = tuple[tuple[str, ...], int, Key]


def _fold_at(rows: list[_Row[Key]], position: int) -> list[_Row[Key]]:
    patterns: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
    for i, (parts, _, _) in enumerate(rows):
        if position < len(parts) and parts[position].isdigit():
            patterns[parts[:position], parts[position + 1 :]].append(i)
    label: dict[int, tuple[str, list[int]]] = {}
    for members in patterns.values():
        members.sort(key=lambda i: int(rows[i][0][position]))
        numbers = [int(rows[i][0][position]) for i in members]
        contents = [rows[i][1:] for i in members]
        if len(members) > 1 and all(content == contents[0] for content in contents):
            runs = [("*", members)]
        else:
            runs = [
                (f"{numbers[start]}-{numbers[end]}" if end > start else str(numbers[start]), members[start : end + 1])
                for start, end in _equal_runs(numbers, contents)
            ]
        label.update({min(run): (text, run) for text, run in runs})
    folded = []
    for i, (parts, count, key) in enumerate(rows):
        if i in label:
            text, run = label[i]
            folded.append(((*parts[:position], text, *parts[position + 1 :]), count * len(run), key))
        elif not (position < len(parts) and parts[position].isdigit()):
            folded.append((parts, count, key))
    return folded


def _equal_runs(numbers: Sequence[int], contents: Sequence[object]) -> list[tuple[int, int]]:
    """First and last index of each run of consecutive numbers with equal contents."""
    runs: list[tuple[int, int]] = []
    for i in range(len(numbers)):
        if i and numbers[i] == numbers[i - 1] + 1 and contents[i] == contents[i - 1]:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units, such as `1.5 GiB`."""
    size, units = float(num_bytes), ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if size < 1024 or unit == units[-1]:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the loop returns at the last unit")


def format_time(seconds: float) -> str:
    """Seconds with three digits in the fitting unit, such as `1.50 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            value = seconds * scale
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    raise AssertionError("the loop returns at the last unit")


def _activations(program: LocalProgram) -> dict[str, str]:
    """Sharding of the last thing that each module computes in the forward pass."""
    found: dict[str, str] = {}
    for node in program.forward.module.graph.nodes:
        sharding = node.meta.get("sharding")
        if node.op == "call_function" and sharding is not None and isinstance(node.meta["val"], torch.Tensor):
            found[node.meta.get("module", "")] = describe_sharding(sharding, program.mesh)
    return found


def _describe_params(params: Mapping[str, str]) -> str:
    """Equal descriptions once: `column`, or `weight: row, bias: replicate`."""
    by_words: dict[str, list[str]] = defaultdict(list)
    for name, words in params.items():
        by_words[words].append(name)
    if len(by_words) == 1:
        return next(iter(by_words))
    return ", ".join(f"{' '.join(names)}: {words}" for words, names in by_words.items())


def _describe_calls(calls: Mapping[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(calls.items()))


def _header(plan: Plan) -> str:
    lines = [f"autopar plan: {plan.strategy} on mesh {plan.mesh}{', from cache' if plan.from_cache else ''}"]
    report = plan.report
    if report is None:
        return f"{lines[0]}, not priced"
    if report.mesh_sizes and report.mesh_sizes != plan.mesh.sizes:
        most = ", since plans have one or two axes" if len(report.mesh_sizes) > 2 else ""
        lines.append(
            f"mesh {'×'.join(map(str, report.mesh_sizes))} is taken as {plan.mesh}{most}: the same ranks in their order"
        )
    budget = "none" if report.budget_bytes is None else f"{format_bytes(report.budget_bytes)} per device"
    precision = f", precision {report.precision}" if report.precision else ""
    micro_steps = f" of {report.accumulate} micro-steps" if report.accumulate > 1 else ""
    lines.append(
        f"cluster {report.cluster}{precision}, budget {budget}, predicted peak {format_bytes(report.memory.total)}"
    )
    lines.append(
        f"step{micro_steps} {format_time(report.step_time_s)} = compute {format_time(report.compute_s)}"
        f" + collectives that nothing hides {format_time(report.exposed_s)}"
    )
    if report.num_searched > len(report.candidates) and report.bound_s > 0:
        gap = report.step_time_s / report.bound_s - 1
        lines.append(
            f"best of {report.num_searched} plans simulated; {gap:.0%} above {format_time(report.bound_s)},"
            " the least computing of any of them"
        )
    return "\n".join(lines)


def _table(*columns: str, right: Iterable[str] = (), keep_first: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        justify: JustifyMethod = "right" if column in right else "left"
        # A number or a name cut short would read as another one: the other columns fold instead.
        firm = column in right or (i == 0 and keep_first)
        table.add_column(column, justify=justify, overflow="fold", no_wrap=firm)
    return table


def _module_table(rows: Sequence[ModuleRow]) -> Table:
    names = [(row.module or "(root)") + (f" ×{row.count}" if row.count > 1 else "") for row in rows]
    columns = ("module", "parameters", "output", "collectives of each", "bytes of all")
    table = _table(*columns, right=columns[-1:], keep_first=max(map(len, names), default=0) <= 48)
    for name, row in zip(names, rows, strict=True):
        size = format_bytes(row.collective_bytes) if row.collective_bytes else ""
        table.add_row(name, row.params, row.activation, row.collectives, size)
    return table


def _memory_table(memory: MemoryParts, budget: int | None) -> Table:
    names = ("params", "grads", "optimizer", "activations", "temporaries", "reserve", "total", "budget")
    table = _table(*names, right=names)
    sizes = [getattr(memory, name) for name in names[:-1]]
    table.add_row(*map(format_bytes, sizes), "none" if budget is None else format_bytes(budget))
    return table


def _collective_table(collective_bytes: Mapping[str, int]) -> Table:
    table = _table("collective", "axis", "bytes", right=("bytes",))
    for name, size in sorted(collective_bytes.items()):
        kind, _, axis = name.partition("@")
        table.add_row(kind, axis, format_bytes(size))
    table.add_row("total", "", format_bytes(sum(collective_bytes.values())))
    return table


def _candidate_table(candidates: Sequence[Candidate]) -> Table:
    numbers = ("step", "compute", "exposed", "peak")
    table = _table("strategy", "mesh", *numbers, "verdict", right=numbers)
    for c in candidates:
        step, compute, exposed = (format_time(t) for t in (c.step_time_s, c.compute_s, c.exposed_s))
        if c.is_bound:
            numbers_of = (f"≥ {step}", "", "", f"≥ {format_bytes(c.peak_bytes)}")
        else:
            numbers_of = (step, compute, exposed, format_bytes(c.peak_bytes))
        table.add_row(c.strategy, c.mesh, *numbers_of, c.verdict)
    return table


def _replicated_note(replicated_ops: Mapping[str, int]) -> str:
    ops = ", ".join(f"{name} ×{count}" for name, count in sorted(replicated_ops.items()))
    return f"No sharding rule, so these run whole on every rank: {ops}"


def _whole_note(modules: Sequence[str]) -> str:
    each = "\n".join(f"  {words}" for words in modules)
    return (
        "Decided by values of tensors, so these modules run whole on every rank, on the batch of all ranks; their time"
        f" and memory are estimates:\n{each}"
    )


def _by_group_note(axes: Sequence[str]) -> str:
    return (
        f"Along {', '.join(axes)} each rank has the rows of its own experts; time and memory are predicted for at most "
        f"{ROWS_MARGIN} times an even share of them"
    )


def _factor_lines(plan: Plan) -> str:
    lines = []
    for name, factors in zip(plan.mesh.names, plan.factors, strict=True):
        words = [f"{f.label or 'factor'} ({f.anchor}, dim {f.dim}, part {f.part})" for f in factors]
        lines.append(f"cut along {name}: {', '.join(words) or 'nothing'}")
    return "\n".join(lines)


def _recompute_lines(plan: Plan) -> str:
    rows = fold_repeats([(region or "(root)", level) for region, level in plan.recompute.items()])
    words = [f"{region}{f' ×{count}' if count > 1 else ''}: {level}" for region, count, level in rows]
    return f"Computed again in the backward pass: {', '.join(words)}"


def _storage_table(plan: Plan) -> Table:
    table = _table("parameter", "sharding", "gathered copy")
    rows = [(path, (describe_sharding(rest.sharding, plan.mesh), _copy(rest))) for path, rest in plan.storage.items()]
    for path, count, (sharding, copy) in fold_repeats(rows):
        table.add_row(path if count == 1 else f"{path} ×{count}", sharding, copy)
    return table


def _copy(rest: Storage) -> str:
    if not any(map(is_sharded, rest.sharding)):
        return ""
    return "gathered again for backward" if rest.regather else "kept for backward"

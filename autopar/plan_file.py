"""Plans as JSON files: written, read, and compared with the model that they are to be used for.

Equal plans whose mappings have equal order give equal text.  The versions in a file say who wrote it; whether it can
be read is decided by its schema version alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.code_versions import versions
from autopar.errors import InputError, PlanError
from autopar.graph import InputKind, JointGraph
from autopar.mesh import Mesh
from autopar.placement import (
    Partial,
    Sharding,
    cuts,
    describe_placement,
    describe_sharding,
    is_sharded,
    shard_dim,
    shard_split,
)
from autopar.plan import Plan
from autopar.plan_reader import INFINITE, MAX_FILE_BYTES, SCHEMA_VERSION, plan_from_json
from autopar.regions import prefixes

__all__ = ["check_plan_matches", "load_plan", "plan_from_json", "plan_to_json", "replace_file", "save_plan"]


def plan_to_json(plan: Plan) -> str:
    """The plan, with its report, as JSON text that `plan_from_json` reads back to an equal plan.

    Raises:
        PlanError: if the plan holds something that could not be read back, such as a NaN or a partial storage.
    """
    if not isinstance(plan, Plan):
        raise InputError(f"what is saved must be a plan, got {plan!r}; a ParallelModule has it as .plan")
    axes = plan.mesh.num_axes
    if len(plan.factors) != axes:
        raise PlanError(f"the plan lists factors for {len(plan.factors)} axes, but its mesh {plan.mesh} has {axes}")
    content = {
        "schema_version": SCHEMA_VERSION,
        "autopar": versions()["autopar"],
        "torch": versions()["torch"],
        "graph_fingerprint": plan.graph_fingerprint,
        "strategy": plan.strategy,
        "mesh": _plain(plan.mesh),
        "delay_reduction": plan.delay_reduction,
        "prefetch": plan.prefetch,
        "overlap": plan.overlap,
        "recompute": dict(plan.recompute),
        "factors": {name: _plain(factors) for name, factors in zip(plan.mesh.names, plan.factors, strict=True)},
        "storage": {
            name: {"sharding": [describe_placement(p) for p in rest.sharding], "regather": rest.regather}
            for name, rest in plan.storage.items()
        },
        "report": _plain(plan.report),
    }
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise PlanError(f"the plan cannot be written as JSON: {error}") from error
    text = _FLAT_LIST.sub(lambda found: "[" + re.sub(r"\n *", " ", found[1]) + "]", text)
    plan_from_json(text)
    return text


_FLAT_LIST = re.compile(r"\[\n *([^\[\]{}]*?)\n *\]")
"""A list of numbers or strings, which reads better on one line.  Line ends never occur inside a JSON string."""


def _plain(value: Any) -> Any:
    """Records as objects and tuples as lists, so that JSON can hold them."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return INFINITE if value == math.inf else value


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file, in one step: a reader sees the old file or the new one.

    Raises:
        InputError: if it is no plan, or the file cannot be written.
        PlanError: as `plan_to_json`.
    """
    replace_file(_as_path(path), plan_to_json(plan).encode())


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file.

    Raises:
        InputError: if there is no such file, or it cannot be read.
        PlanError: if the file is no plan; the message names file and key.
    """
    path = _as_path(path)
    try:
        if not path.is_file():
            raise InputError(f"there is no plan file {str(path)!r}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read plan file {str(path)!r}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise PlanError(f"{path}: the file has more than {MAX_FILE_BYTES} bytes, so it is no plan")
    try:
        return plan_from_json(content.decode())
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: the plan file is not UTF-8 text: {error}") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _as_path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"a plan's file is given by its path, got {path!r}")
    return Path(path)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file aside and rename it into place, so that no reader ever sees half of it.

    Raises:
        InputError: if it cannot be written.
    """
    if not path.name or "\0" in str(path):
        raise InputError(f"cannot write {str(path)!r}: that names no file")
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a directory refuses by itself
            raise InputError(f"cannot write {str(path)!r}: it is a device or a pipe, which a file would replace")
        try:
            with aside.open("xb") as file:
                file.write(content)
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def check_plan_matches(plan: Plan, joint: JointGraph) -> None:
    """Refuse a plan that was made for another model.

    A plan stays valid for another batch size or sequence length, which change the graph's fingerprint.  So what is
    compared is the parameters: the same names, and storage that fits the shapes of the graph's own.

    Raises:
        PlanError: with up to five of the parameters that differ, and both fingerprints.
    """
    params = {name: tuple(node.meta["val"].shape) for name, node in joint.param_nodes().items()}
    axes = plan.mesh.num_axes
    if len(plan.factors) != axes:
        raise PlanError(f"the plan lists factors for {len(plan.factors)} axes, but its mesh {plan.mesh} has {axes}")
    if type(plan.prefetch) is not int or plan.prefetch < 0:
        raise PlanError(f"prefetch of the plan must be a whole number from 0, found {plan.prefetch!r}")
    if type(plan.overlap) is not bool:
        raise PlanError(f"overlap of the plan must be True or False, found {plan.overlap!r}")
    modules = {node.meta["module"] for node in joint.module.graph.nodes if node.op == "call_function"}
    modules.update(name.rpartition(".")[0] for name in params)  # a list of parameters runs nothing, and is a region
    known = {"", *(prefix for module in modules for prefix in prefixes(module))}
    differences = [
        _list_some("the plan does not say how to store", "parameter", [n for n in params if n not in plan.storage]),
        _list_some("the model does not have", "parameter", [n for n in plan.storage if n not in params]),
        _list_some("the model runs nothing in", "region", sorted(set(plan.recompute) - known)),
        _list_some("the plan cuts dims of tensors that the model does not have:", "name", _strangers(plan, joint)),
    ]
    if any(differences):
        made_for = plan.graph_fingerprint or "none, it was written by hand"
        raise PlanError(
            f"the plan ({plan.strategy} on mesh {plan.mesh}) was made for another model: "
            f"{'; '.join(filter(None, differences))} (fingerprint of the plan's graph: {made_for}; of this one: "
            f"{joint.fingerprint()}); make a new plan for this model"
        )
    for name, shape in params.items():
        _check_storage(name, plan.storage[name].sharding, shape, plan.mesh)


def _strangers(plan: Plan, joint: JointGraph) -> list[str]:
    """Anchors of the plan that are no parameter or buffer, and that it does not store either.  (An input may be
    missing: a call in evaluation may have no labels.)"""
    held = {spec.path for spec in joint.inputs if spec.kind in (InputKind.PARAM, InputKind.BUFFER)}
    anchors = dict.fromkeys(ref.anchor for refs in plan.factors for ref in refs)
    return [a for a in anchors if not a.startswith("input:") and a not in held and a not in plan.storage]


def _list_some(words: str, noun: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{words} {len(names)} {noun}{'s' if len(names) > 1 else ''}: {', '.join(map(repr, names[:5]))}{more}"


def _check_storage(name: str, sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> None:
    if len(sharding) != mesh.num_axes:
        raise PlanError(
            f"the plan gives parameter {name!r} {len(sharding)} placements, but its mesh {mesh} has {mesh.num_axes} "
            "axes: make a new plan"
        )
    for placement in sharding:
        words = f"the plan stores parameter {name!r} as {describe_placement(placement)}"
        if isinstance(placement, Partial):
            raise PlanError(f"{words}, but a parameter rests whole or cut")
        if is_sharded(placement):
            dim, split = shard_dim(placement), shard_split(placement)
            if not 0 <= dim < len(shape):
                raise PlanError(f"{words}, but in this model it has shape {list(shape)}, without a dim {dim}")
            if shape[dim] % split:
                raise PlanError(f"{words}, but its dim {dim} of size {shape[dim]} does not divide into {split} parts")
    _check_nesting(name, sharding, shape, mesh)


def _check_nesting(name: str, sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Parts of different sizes cannot be cut again: their parts would have more than two sizes, which no padding brings
    to one."""
    sizes = list(shape)
    uneven: dict[int, str] = {}
    for cut in cuts(sharding, mesh):
        parts, axis = mesh.sizes[cut.axis], mesh.names[cut.axis]
        if parts > 1 and cut.dim in uneven:
            raise PlanError(
                f"the plan stores parameter {name!r} as {describe_sharding(sharding, mesh)}, but axis "
                f"{uneven[cut.dim]!r} makes parts of different sizes of its dim {cut.dim} of size {shape[cut.dim]}, "
                f"which axis {axis!r} cannot cut again: cut another dim along {axis!r}, or leave it whole there"
            )
        if sizes[cut.dim] // cut.split % parts:
            uneven[cut.dim] = axis
        sizes[cut.dim] //= parts

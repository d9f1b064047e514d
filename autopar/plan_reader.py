"""Reading a plan from JSON text, every field checked by hand.

Reading builds plain data only: nothing in the text is executed, imported or unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.placement import Partial, Placement, describe_placement, parse_placement
from autopar.plan import (
    RECOMPUTE_LEVELS,
    Candidate,
    FactorRef,
    MemoryParts,
    ModuleCost,
    ModuleRow,
    Plan,
    PlanReport,
    Storage,
)
from autopar.precision import PRECISIONS

SCHEMA_VERSION = 6
MAX_FILE_BYTES = 64 * 2**20
"""Longer texts are refused unread: a plan has a few hundred bytes a parameter."""
INFINITE = "infinite"
"""Stands for a time that is infinite (of a candidate that was never priced): JSON has no number for it."""

T = TypeVar("T")
Reader = Callable[[Any, str], T]
"""Checks a JSON value and converts it; the text says where in the file it stands."""


def plan_from_json(text: str) -> Plan:
    """Read a plan that `plan_to_json` wrote, or one written by hand in the same form.

    Raises:
        PlanError: if the text is no plan; the message names the key that is wrong, missing or unknown.
    """
    if len(text) > MAX_FILE_BYTES:
        raise PlanError(f"the plan file has {len(text)} characters; more than {MAX_FILE_BYTES} are not read")
    try:
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise PlanError("the plan file is nested too deeply to be a plan") from None
    except PlanError:
        raise
    except ValueError as error:  # not JSON, or a number of thousands of digits
        raise PlanError(f"the plan file is not JSON: {error}") from error
    return _read_plan(content)


def _refuse_constant(word: str) -> Any:
    raise PlanError(f"the plan file holds {word}, which is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise PlanError(f"the plan file has key {_shown(name)} twice in one object")
        content[name] = value
    return content


def _read_plan(content: Any) -> Plan:
    version = _mapping(content, "the root").get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise PlanError(
            f"the plan file has schema_version {_shown(version)}, but this autopar reads {SCHEMA_VERSION}: make the "
            "plan again"
        )
    _require_keys(content, _PLAN_KEYS, "the root")
    for name in ("autopar", "torch"):
        _name(content[name], name)
    mesh = _read_mesh(content["mesh"])
    factors = _mapping(content["factors"], "factors")
    _require_keys(factors, mesh.names, "factors")
    report = content["report"]
    return Plan(
        strategy=_name(content["strategy"], "strategy"),
        mesh=mesh,
        factors=tuple(_tuple_of(_record_of(FactorRef))(factors[name], f"factors.{name}") for name in mesh.names),
        storage={
            _name(name, "a key of storage"): _read_storage(item, f"storage.{name}", mesh)
            for name, item in _mapping(content["storage"], "storage").items()
        },
        recompute={
            _words(name, "a key of recompute"): _level(level, f"recompute.{name}")
            for name, level in _mapping(content["recompute"], "recompute").items()
        },
        delay_reduction=_flag(content["delay_reduction"], "delay_reduction"),
        prefetch=_count(content["prefetch"], "prefetch"),
        overlap=_flag(content["overlap"], "overlap"),
        graph_fingerprint=_fingerprint(content["graph_fingerprint"], "graph_fingerprint"),
        report=None if report is None else _record_of(PlanReport)(report, "report"),
    )


def _read_mesh(value: Any) -> Mesh:
    _require_keys(_mapping(value, "mesh"), ("names", "sizes"), "mesh")
    names = _tuple_of(_name)(value["names"], "mesh.names")
    sizes = _tuple_of(_count)(value["sizes"], "mesh.sizes")
    try:
        return Mesh(names, sizes)
    except MeshError as error:
        raise PlanError(f"mesh of the plan file is wrong: {error}") from error


def _read_storage(value: Any, where: str, mesh: Mesh) -> Storage:
    _require_keys(_mapping(value, where), ("sharding", "regather"), where)
    sharding = _tuple_of(_placement)(value["sharding"], f"{where}.sharding")
    if len(sharding) != mesh.num_axes:
        raise PlanError(
            f"{where}.sharding of the plan file has {len(sharding)} placements, but mesh {mesh} has {mesh.num_axes} "
            "axes"
        )
    return Storage(sharding, _flag(value["regather"], f"{where}.regather"))


# ---------------------------------------------------------------------------------------------------------- containers


def _wrong(where: str, wanted: str, value: Any) -> PlanError:
    return PlanError(f"{where} of the plan file must be {wanted}, found {_shown(value)}")


def _shown(value: Any) -> str:
    """A value in a message: short, and without characters that a terminal would act on."""
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    return value


def _require_keys(value: Mapping[str, Any], wanted: Iterable[str], where: str) -> None:
    keys = dict.fromkeys(wanted)
    problems = [f"lacks key {_shown(name)}" for name in keys if name not in value]
    problems += [f"has unknown key {_shown(name)}" for name in value if name not in keys]
    if problems:
        raise PlanError(f"{where} of the plan file {', '.join(problems[:5])}")


def _tuple_of(read: Reader[T]) -> Reader[tuple[T, ...]]:
    def read_all(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(value))

    return read_all


def _mapping_of(read: Reader[T]) -> Reader[dict[str, T]]:
    def read_all(value: Any, where: str) -> dict[str, T]:
        items = _mapping(value, where).items()
        return {_name(name, f"a key of {where}"): read(item, f"{where}.{name}") for name, item in items}

    return read_all


def _record_of(kind: Callable[..., T]) -> Reader[T]:
    def read_record(value: Any, where: str) -> T:
        fields = _RECORDS[kind]
        _require_keys(_mapping(value, where), fields, where)
        return kind(**{name: read(value[name], f"{where}.{name}") for name, read in fields.items()})

    return read_record


# -------------------------------------------------------------------------------------------------------------- values


def _name(value: Any, where: str) -> str:
    """A name: one line of printable characters, so no control or escape characters, and not empty."""
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or not value.isprintable():
        raise _wrong(where, "a printable name of at most 4096 characters", value)
    return value


def _words(value: Any, where: str) -> str:
    """Text for readers; may be empty and have several lines."""
    if not isinstance(value, str) or not value.replace("\n", "").isprintable():
        raise _wrong(where, "printable text", value)
    return value


def _fingerprint(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > 64 or not set(value) <= set("0123456789abcdef"):
        raise _wrong(where, "a hexadecimal digest, or empty", value)
    return value


def _level(value: Any, where: str) -> str:
    if value not in RECOMPUTE_LEVELS:
        raise _wrong(where, f"one of {', '.join(RECOMPUTE_LEVELS)}", value)
    return str(value)


def _precision(value: Any, where: str) -> str:
    if not isinstance(value, str) or (value and value not in PRECISIONS):
        raise _wrong(where, f"one of {', '.join(PRECISIONS)}, or empty", value)
    return str(value)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "true or false", value)
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _wrong(where, "a whole number from 0", value)
    return value


def _count_or_none(value: Any, where: str) -> int | None:
    return None if value is None else _count(value, where)


def _seconds(value: Any, where: str) -> float:
    if value == INFINITE:
        return math.inf
    if type(value) not in (int, float) or not 0 <= value < 1e300:
        raise _wrong(where, f"seconds from 0, or {INFINITE!r}", value)
    return float(value)


def _placement(value: Any, where: str) -> Placement:
    wanted = "a placement such as 'replicate', 'shard(0)' or 'shard(0, split=3)'"
    if not isinstance(value, str):
        raise _wrong(where, wanted, value)
    try:
        placement = parse_placement(value)
    except ValueError:
        raise _wrong(where, wanted, value) from None
    if isinstance(placement, Partial) or describe_placement(placement) != value:
        raise _wrong(where, wanted, value)
    return placement


_PLAN_KEYS = (
    "schema_version", "autopar", "torch", "graph_fingerprint", "strategy", "mesh", "recompute", "delay_reduction",
    "prefetch", "overlap", "factors", "storage", "report",
)  # fmt: skip

_RECORDS: dict[Any, dict[str, Reader[Any]]] = {
    FactorRef: {"anchor": _name, "dim": _count, "part": _count, "label": _words},
    MemoryParts: {field.name: _count for field in dataclasses.fields(MemoryParts)},
    ModuleRow: {
        "module": _words, "count": _count, "params": _words, "activation": _words, "collectives": _words,
        "collective_bytes": _count,
    },
    Candidate: {
        "strategy": _name, "mesh": _name, "step_time_s": _seconds, "compute_s": _seconds, "exposed_s": _seconds,
        "peak_bytes": _count, "verdict": _words, "modules": _tuple_of(_record_of(ModuleCost)), "is_bound": _flag,
    },
    ModuleCost: {
        "module": _words, "compute_s": _seconds, "exposed_s": _mapping_of(_seconds), "rest_bytes": _count,
        "saved_bytes": _count,
    },
    PlanReport: {
        "cluster": _words, "budget_bytes": _count_or_none, "step_time_s": _seconds, "compute_s": _seconds,
        "exposed_s": _seconds, "memory": _record_of(MemoryParts), "rows": _tuple_of(_record_of(ModuleRow)),
        "candidates": _tuple_of(_record_of(Candidate)), "collective_bytes": _mapping_of(_count),
        "num_searched": _count, "bound_s": _seconds, "replicated_ops": _mapping_of(_count),
        "by_group": _tuple_of(_name), "whole_modules": _tuple_of(_words), "precision": _precision, "accumulate": _count,
        "mesh_sizes": _tuple_of(_count),
    },
}  # fmt: skip
"""How each field of a record is read; a record's keys are exactly these."""

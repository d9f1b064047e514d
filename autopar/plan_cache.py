"""Plans kept from one run to the next, each under a digest of everything that it was made from.

An entry is a plan file like any other (`autopar.plan_file`), named for what was asked and for its own content.  Reading
it executes nothing.  It is used only if it is whole and fits what is asked; otherwise it is planned again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from autopar.code_versions import own_code
from autopar.errors import InputError, PlanError
from autopar.graph import JointGraph, describe_value
from autopar.plan import Plan
from autopar.plan_file import check_plan_matches, plan_from_json, plan_to_json, replace_file
from autopar.plan_reader import MAX_FILE_BYTES
from autopar.rules import user_rules

MAX_ENTRIES = 256
"""So many plans are kept; the ones used least recently go first."""

_KEY_DIGITS = 32
_CONTENT_DIGITS = 16


def request_key(joint: JointGraph, *asked: object) -> str:
    """A digest of what a plan is made from.

    Args:
        joint: the graph that is planned on.
        asked: everything else; the texts (`repr`) of these values must say all that there is to say.

    The graph's own fingerprint says what is computed.  Planning reads more: who owns a node, in which pass it is, how
    its value lies in memory, the batch dims and tied names; and autopar's code and tables, and the rules of the user's.
    """
    digest = hashlib.sha256()
    for part in (joint.fingerprint(), *asked, own_code(), torch.__version__, sorted(user_rules().items())):
        digest.update(f"{part!r}\n".encode())
    digest.update(f"{sorted(joint.batch_dims.items())} {sorted(joint.tied.items())} {joint.trains}\n".encode())
    for node in joint.module.graph.nodes:
        owner, backward = node.meta.get("module"), node.meta.get("backward")
        digest.update(f"{owner} {backward} {_layout(node.meta.get('val'))}\n".encode())
    return digest.hexdigest()[:_KEY_DIGITS]


def _layout(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{describe_value(value)} {value.stride()} {value.device} {value.requires_grad}"
    return " ".join(map(_layout, value)) if isinstance(value, (tuple, list)) else ""


def open_cache(wanted: bool = True) -> PlanCache | None:
    """The cache in the directory `AUTOPAR_CACHE_DIR`, by default `autopar` in the user's own for caches
    (`XDG_CACHE_HOME`, `~/.cache`).

    None if it is not `wanted`, `AUTOPAR_CACHE` is 0, or the user has no home.
    """
    if not wanted or os.environ.get("AUTOPAR_CACHE") == "0":
        return None
    if named := os.environ.get("AUTOPAR_CACHE_DIR"):
        return PlanCache(Path(named))
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # relative ones are invalid
    try:
        return PlanCache((base if base.is_absolute() else Path.home() / ".cache") / "autopar")
    except RuntimeError:
        return None


class PlanCache:
    """Plans in a directory.  What goes wrong with it is told in a warning, and is never an error."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, key: str, check: Callable[[Plan], None]) -> Plan | None:
        """The plan kept under a key.

        Args:
            key: a `request_key`.
            check: raises a `PlanError` for a plan that is not what is asked for.
        """
        with contextlib.suppress(OSError):  # no such directory: nothing is kept
            for path in sorted(self.directory.glob(f"{key}-*.json")):
                try:
                    plan = _read(path)
                    check(plan)
                    os.utime(path)  # used now
                except (OSError, PlanError) as error:
                    _note(f"the plan kept in {str(path)!r} is not used, and planned again: {error}")
                else:
                    return plan
        return None

    def keep(self, key: str, plan: Plan) -> None:
        """Keep a plan under a key, in the place of another one."""
        try:
            content = plan_to_json(plan).encode()
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.directory / f"{key}-{_content_digest(content)}.json"
            replace_file(path, content)
            for other in self.directory.glob(f"{key}-*.json"):
                if other != path:
                    other.unlink(missing_ok=True)
            self._drop_old()
        except (OSError, InputError, PlanError) as error:
            _note(
                f"the plan is not kept for the next time: {error}; name another directory in AUTOPAR_CACHE_DIR, or set "
                "AUTOPAR_CACHE=0"
            )

    def _drop_old(self) -> None:
        """Remove the entries beyond `MAX_ENTRIES`; nothing, if another process removes some meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            entries = sorted(self.directory.glob(_ENTRY), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in entries[MAX_ENTRIES:]:
                path.unlink(missing_ok=True)


def check_kept(plan: Plan, joint: JointGraph, fingerprint: str, num_ranks: int, budget: int) -> None:
    """That a plan that was kept is one for what is asked.

    Args:
        plan: the plan.
        joint: the whole graph that it must fit.
        fingerprint: of the graph that is planned on.
        num_ranks, budget: ranks of the mesh; bytes on one device.

    Raises:
        PlanError: if it is not.
    """
    report = plan.report
    if report is None:
        raise PlanError("it has no report")
    if plan.graph_fingerprint != fingerprint or plan.mesh.num_ranks != num_ranks:
        raise PlanError(
            f"it was made for graph {plan.graph_fingerprint} on {plan.mesh.num_ranks} ranks, not for {fingerprint} on "
            f"{num_ranks}"
        )
    if report.budget_bytes != budget or report.memory.total > budget:
        raise PlanError(f"it takes {report.memory.total} bytes of a budget of {report.budget_bytes}, not of {budget}")
    check_plan_matches(plan, joint)


_ENTRY = f"{'[0-9a-f]' * _KEY_DIGITS}-{'[0-9a-f]' * _CONTENT_DIGITS}.json"


def _read(path: Path) -> Plan:
    """The plan in a file of the cache; refused unless the file is what was once written under this name."""
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        raise PlanError(f"it is no plan file of at most {MAX_FILE_BYTES} bytes")
    content = path.read_bytes()
    if path.stem.rpartition("-")[2] != _content_digest(content):
        raise PlanError("it was changed or cut short since it was written")
    try:
        return plan_from_json(content.decode())
    except UnicodeDecodeError as error:
        raise PlanError(f"it is not UTF-8 text: {error}") from error


def _content_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_CONTENT_DIGITS]


def _note(text: str) -> None:
    warnings.warn(f"plan cache: {text}", stacklevel=2)


__all__ = ["MAX_ENTRIES", "PlanCache", "check_kept", "open_cache", "request_key"]

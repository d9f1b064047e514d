"""Find the modules of a model that cannot be traced since they read values of tensors, and make each an `OpaqueCall`.

The model is run on fake tensors.  Where a module's forward reads a value, the module is run on assumed values
(`autopar.assumed_values`).  If shapes and dtypes of what it gives are the same under several assumptions it is one op
from then on; if not, or if it does something else than give values, the module that calls it is looked at in its place.
The model itself never is, nor one that holds all of its parameters: nothing would be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar._compat import FakeTensor, tree_leaves, value_read, version_of
from autopar.assumed_runs import AssumedRuns
from autopar.errors import AutoparError, TraceError
from autopar.opaque import OPAQUE_OPS, OpaqueCall, OpaqueName, TensorKind, UnfitError, call_opaque, find_call
from autopar.opaque_module import REGISTRIES, Given, ModuleCall
from autopar.trace_errors import read_place

Forward = Callable[..., Any]


@dataclass
class _Known:
    """A call that was found out about: the numbers and texts on its modules, and what it gave."""

    settings: Mapping[tuple[int, str], Any]
    given: Given
    call: OpaqueCall
    aliases: tuple[tuple[int, int], ...]


class OpaqueModules:
    """The modules of a model that are one op each.

    Attributes:
        called_again: whether modules may have the settings that a call before has left on them.
        places: by path, the source line for which the module is one.
        reasons: by path, why a module that reads values could not be one.
    """

    def __init__(self, model: nn.Module, wide: bool) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._forwards = {module: module.forward for module in self._paths}
        parameters = set(model.parameters())
        self._everything = {p for m, p in self._paths.items() if parameters and parameters <= set(m.parameters())}
        self._wide = wide
        self._known: dict[Hashable, list[_Known]] = {}
        self._searches = self._assumes = False
        self._aliased: list[tuple[str, Tensor, int]] = []
        self.called_again = False
        self.places: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def forwards(self) -> dict[nn.Module, Forward]:
        """What modules run in a trace, in the place of their own forward."""
        if self._searches:
            return {m: partial(self._attempt, m) for m, path in self._paths.items() if path}
        return {m: partial(self._call, m) for m, path in self._paths.items() if path in self.places}

    def search(self, run: Callable[[], object]) -> None:
        """Find the modules.

        Args:
            run: runs the model on fake tensors whose values cannot be read, with `forwards` in the place of its
                modules' own.

        Raises:
            TraceError: if a module does what no op may do.
            Exception: what the model raises because the root itself would have to be one.
        """
        self._searches = True
        try:
            before = None
            while before != set(self.places):  # a run that found one went on after it had failed
                before = set(self.places)
                self._aliased.clear()
                run()
        finally:
            self._searches = False
        for path, tensor, version in self._aliased:
            if version_of(tensor) != version:
                raise TraceError(
                    f"{self._where(path)} may return a tensor that it was given, which is changed in place later: let"
                    " it return a copy (x.clone())"
                )

    def why_not(self) -> str:
        """Why the model itself would have to be one op, in words."""
        reasons = "".join(f" (module {path} cannot: {reason})" for path, reason in self.reasons.items())
        return (
            f"No module inside of the model holds that line and could run whole on every rank{reasons}, and the model"
            " itself is not run so: nothing would be divided. Move the line to a module of its own that takes and"
            " returns tensors whose shapes do not depend on values"
        )

    def _where(self, path: str) -> str:
        return f"module {path}, which runs whole on every rank ({self.places[path]}),"

    def _attempt(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module as it is, or whole if it reads values."""
        path, forward = self._paths[module], self._forwards[module]
        if self._assumes:  # it is inside of one that runs whole
            return forward(*args, **kwargs)
        if path in self.reasons:  # whoever calls it is one
            return forward(*args, **kwargs)
        if path not in self.places:
            before = [(inner, dict(vars(inner))) for inner in module.modules()]
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                for inner, attributes in before:
                    vars(inner).clear()
                    vars(inner).update(attributes)
                place = error.place if isinstance(error, _WholeError) else _place(error)
                if not place:
                    raise
                self.places[path] = place
        try:
            return self._call(module, *args, **kwargs)
        except UnfitError as error:
            self.reasons[path] = str(error)
            raise _WholeError(self.places.pop(path)) from error

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module as one op."""
        call, tensors = ModuleCall.of(module, self._forwards, args, kwargs, self._wide)
        kinds = tuple((TensorKind.of(t), t.device, t.requires_grad) for t in tensors)
        key = (call.key(), kinds, torch.is_grad_enabled())
        if self._searches:
            _check_not_told(module)
        known = self._match(self._known.get(key, ()), call)
        if known is None:
            if not self._searches:
                raise TraceError(f"{self._where(self._paths[module])} is called otherwise when it is traced again")
            if self._paths[module] in self._everything:
                raise UnfitError("it holds all parameters of the model")
            known = self._find_out(call, tensors)
            self._known.setdefault(key, []).append(known)
        results = call_opaque(tensors, known.call.name)
        if self._searches:
            shared = [*(results[i] for i, _ in known.aliases), *(tensors[j] for _, j in known.aliases)]
            self._aliased += [(self._paths[module], tensor, version_of(tensor)) for tensor in shared]
        return known.given.place(module, results)

    def _match(self, found: Sequence[_Known], call: ModuleCall) -> _Known | None:
        """The call that was found out about with the same numbers and texts on its modules."""
        settings = _settings(call)
        for known in found:
            own = known.given.settings if self.called_again else ()
            if all(known.settings.get(key) == value for key, value in settings.items() if key not in own):
                return known
        return None

    def _find_out(self, call: ModuleCall, tensors: Sequence[Tensor]) -> _Known:
        path = self._paths[call.module]
        self._assumes = True
        try:
            opaque, given, aliases = AssumedRuns(call, tensors, path, self.places[path]).find_out()
        finally:
            self._assumes = False
        return _Known(_settings(call), given, opaque, aliases)


def hold_calls(graph: fx.Graph) -> None:
    """Let a graph's nodes keep the calls alive that they name."""
    for node in graph.nodes:
        if node.target in OPAQUE_OPS:
            node.args = (*node.args[:-1], OpaqueName(find_call(node.args[-1])))


class _WholeError(Exception):
    """A module reads values, at `place`, and cannot be one op."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


def _place(error: Exception) -> str:
    """Where values were read, if that is what an exception comes from."""
    return "" if isinstance(error, AutoparError) or value_read(error) is None else read_place(error)


def _check_not_told(module: nn.Module) -> None:
    """Raise if someone has set a tensor on a module that is to be called: an op does not get it."""
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name not in REGISTRIES and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
                raise UnfitError(f"a tensor is set as {name} of a {type(inner).__name__} before it is called")


def _settings(call: ModuleCall) -> dict[tuple[int, str], Any]:
    return {(at, name): (type(value), value) for at, name, value in call.settings}

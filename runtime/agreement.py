"""What the ranks must have in common, compared before anything of the model is sent; what differs is named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from autopar.errors import InputError, StaleModelError
from autopar.program import LocalProgram
from autopar.runtime.control import ControlGroup

_ABSENT = "nothing"


def agree_on_setup(control: ControlGroup, setup: Mapping[str, str]) -> None:
    """Make sure that all ranks have the same versions, code and arguments; called on every rank.

    Args:
        setup: what is compared -> what it is on this rank, in words.

    Raises:
        InputError: on every rank, with up to five differences, and which ranks have what.
    """
    if control.all_agree(digest(repr(sorted(setup.items())))):
        return
    raise InputError(
        f"the ranks differ: {differences(control.gather(dict(setup)))}. Start every rank with the same packages, files "
        "and arguments of parallelize"
    )


def agree_on_program(control: ControlGroup, program: LocalProgram) -> None:
    """Make sure that all ranks compiled the same program; called on every rank.

    Raises:
        StaleModelError: on every rank, with the first place where the programs differ, and which ranks have what there.
    """
    if control.all_agree(digest(program.fingerprint())):
        return
    lines = list(program.lines())
    digests = control.gather([digest(line) for line in lines])
    longest = max(map(len, digests))
    first = next(i for i in range(longest) if len({tuple(one[i : i + 1]) for one in digests}) > 1)
    there = by_value(control.gather(lines[first] if first < len(lines) else "the end"))
    raise StaleModelError(
        f"the ranks compiled different programs; the first difference, at line {first} of {longest}: {there}. "
        "The model, its constants or arguments that are no tensors differ between ranks: make them equal"
    )


def differences(everywhere: Sequence[Mapping[str, str]]) -> str:
    """Up to five names that stand for different things on different ranks, and which ranks have what; empty without."""
    names = dict.fromkeys(name for one in everywhere for name in one)
    found = {name: [one.get(name, _ABSENT) for one in everywhere] for name in names}
    listed = [f"{name} is {by_value(values)}" for name, values in found.items() if len(set(values)) > 1]
    return "; ".join(listed[:5]) + (f"; and {len(listed) - 5} more" if len(listed) > 5 else "")


def digest(text: str) -> int:
    """A number for `ControlGroup.all_agree`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def by_value(values: Sequence[str]) -> str:
    """`a on ranks 0-2, b on rank 3`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on rank{'s' if len(where) > 1 else ''} {_runs(where)}" for value, where in ranks.items())


def _runs(ascending: Sequence[int]) -> str:
    """`0, 2-4` of 0, 2, 3 and 4."""
    runs: list[list[int]] = []
    for number in ascending:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

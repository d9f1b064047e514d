"""Emulated hosts: starting a program on them; from within, link counters, the host's own link, this process's memory.

`netlab` is a tool that joins network namespaces by rate-limited links (needs root).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Hosts:
    """Emulated hosts.

    Attributes:
        netlab: path of the tool.
        num_hosts: how many.
        ranks_per_host: processes on each.
        rate: of each host's link, as `100mbit`; `none` for as fast as it goes.
        real_time: give the ranks real-time priority, where others use the CPUs too.
    """

    netlab: str
    num_hosts: int
    ranks_per_host: int
    rate: str
    real_time: bool = False

    def command(self, program: Iterable[str], *flags: str) -> list[str]:
        """What runs this interpreter with the arguments `program` as every rank; `flags` go to the tool."""
        return [
            self.netlab, "run", "--hosts", str(self.num_hosts), "--ranks-per-host", str(self.ranks_per_host),
            "--rate", self.rate, *(["--rt"] if self.real_time else []), *flags, "--", sys.executable, *program,
        ]  # fmt: skip


def set_link(state: str) -> None:
    """Take the link of the host that this process runs on `up` or `down`."""
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


def mark(label: str) -> dict[str, Any] | None:
    """Counters of every link and of the CPUs right now; None outside an emulated cluster."""
    path = os.environ.get("NETLAB_MARK")
    if not path:
        return None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(path)
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps({"label": label}).encode() + b"\n")
            stream.flush()
            return dict(json.loads(stream.readline()))


def link_bytes(before: dict[str, Any], after: dict[str, Any], num_steps: int) -> dict[str, dict[str, int]]:
    """Bytes per step sent and received on each link between two marks."""

    def delta(link: str, counter: str) -> int:
        return (after["links"][link][counter] - before["links"][link][counter]) // num_steps

    return {link: {"tx": delta(link, "tx_bytes"), "rx": delta(link, "rx_bytes")} for link in before["links"]}


def machine_load(before: dict[str, Any], after: dict[str, Any], own_cpu_s: float) -> dict[str, float]:
    """How busy the machine was between two marks, and which share of that was not ours (`own_cpu_s`)."""
    cpu = {key: after["cpu"][key] - before["cpu"][key] for key in ("total", "busy", "steal")}
    total = max(cpu["total"], 1e-9)
    return {
        "busy_share": round(cpu["busy"] / total, 3),
        "foreign_share": round(max(0.0, cpu["busy"] - own_cpu_s) / total, 3),
        "steal_s": round(cpu["steal"], 2),
    }


def resident_mb(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (peak) of this process in MiB; 0 where the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return 0.0


def reset_peak_resident() -> None:
    """Start `VmHWM` anew, where the system lets us."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

"""Reading the link counters of the emulated cluster that a benchmark runs in, and this process's memory."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any


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

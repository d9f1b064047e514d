"""The cost model's times beside published measurements of single ops and collectives.

    python -m benchmarks.time_model --ops op_efficiency.csv --collectives nccl_busbw.csv [--json OUT]

Prints, per device and kind, the relative error of the predicted time: median, 90th percentile, and bias; and beside it
that of a roofline with one efficiency, which is the best one for these very rows.  `--ops` has columns hardware, op,
shape, peak_TFLOPs, achieved_TFLOPs; `--collectives` op, gpus, nodes, hardware, bytes, busbw_GBps, time_us, notes.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.cluster import Cluster, Device, axis_link
from autopar.cost_model.collectives import PHASES, collective_time, wire_bytes
from autopar.cost_model.efficiency import attention_blocks, attention_time, matmul_time
from autopar.errors import InputError
from autopar.mesh import Mesh

SUSTAINED_S = 5e-4
"""Shorter ops may run before the card meets its power limit; they are counted apart."""

UNFIT = ("do not calibrate", "below-par")
"""Words of notes that say that a row's machine was not as described."""


@dataclass(frozen=True)
class Sample:
    """One measured op: `floor_s` is its time at the device's sustained rates, whatever the shape."""

    group: str
    measured_s: float
    predicted_s: float
    floor_s: float


@dataclass(frozen=True)
class Row:
    """Errors of one group of samples."""

    group: str
    count: int
    median_error: float
    p90_error: float
    bias: float
    roofline_median_error: float
    roofline_p90_error: float


def ops(path: Path) -> Iterator[Sample]:
    """Matmuls and attention; rows of another form are passed over."""
    for row in _rows(path):
        device = _device(row["hardware"])
        if device is None or "=" not in row["shape"]:
            continue
        shape = {key.strip(): value for key, value in (part.split("=") for part in row["shape"].split(","))}
        if row["op"] in ("sdp_fwd", "sdp_bwd"):
            yield _attention(row, shape, device)
        elif {"m", "n", "k"} <= shape.keys():
            yield _matmul(row, shape, device)


def _matmul(row: dict[str, str], shape: dict[str, str], device: Device) -> Sample:
    m, n, k = (int(shape[name]) for name in ("m", "n", "k"))
    itemsize = 1 if "fp8" in row["op"] else 2
    written = (4 if shape.get("out_dtype") == "fp32" else 2) * (2 if shape.get("accumulate") == "True" else 1)
    moved_s = (itemsize * k * (m + n) + written * m * n) / device.memory_bandwidth_bytes_s
    faster = 2 // itemsize  # tensor cores take twice as many operands of half the size
    measured_s = 2 * m * n * k / float(row["achieved_TFLOPs"]) / 1e12
    compute_s = matmul_time(1, m, n, k, itemsize, "bf16", device) / faster
    floor_s = max(2 * m * n * k / device.flops["bf16"] / faster, moved_s)
    length = "sustained" if measured_s >= SUSTAINED_S else "short"
    predicted_s = max(compute_s, moved_s) + device.kernel_start_s
    return Sample(f"{row['hardware']} {row['op']} {length}", measured_s, predicted_s, floor_s)


def _attention(row: dict[str, str], shape: dict[str, str], device: Device) -> Sample:
    """Causal attention, whose published rate counts the whole score matrix: two products forward, five backward."""
    rows, length, heads, score, value = (
        int(shape[name]) for name in ("batch", "seq_len", "head_num", "qk_head_dim", "v_head_dim")
    )
    is_backward = row["op"] == "sdp_bwd"
    scores = rows * heads * length**2
    measured_s = (5 if is_backward else 2) * scores * (score + value) / float(row["achieved_TFLOPs"]) / 1e12
    flops = 2 * scores * (3 * score + 2 * value if is_backward else score + value)
    blocks = attention_blocks(rows, heads, length)
    predicted_s = attention_time(flops, blocks, True, is_backward, "bf16", device) + device.kernel_start_s
    return Sample(f"{row['hardware']} {row['op']}", measured_s, predicted_s, flops / 2 / device.flops["bf16"])


def collectives(path: Path) -> Iterator[Sample]:
    """Runs of nccl-tests; the line beside the model is one bus bandwidth for all sizes."""
    for row in _rows(path):
        device = _device(row["hardware"])
        if device is None or row["op"] not in PHASES or not row["bytes"] or any(w in row["notes"] for w in UNFIT):
            continue
        ranks, nodes, num_bytes = int(row["gpus"]), int(row["nodes"]), int(float(row["bytes"]))
        wire = wire_bytes(row["op"], ranks, num_bytes)
        bus = float(row["busbw_GBps"] or 0) * 1e9
        measured_s = float(row["time_us"]) / 1e6 if row["time_us"] else wire / bus if bus else 0.0
        if not measured_s:
            continue
        link = axis_link(Cluster.parse(f"{nodes}x{ranks // nodes} {device.name}"), Mesh(("dp",), (ranks,)), "dp")
        size = "16 MiB and more" if num_bytes >= 2**24 else "smaller"
        where = "one node" if nodes == 1 else f"{nodes} nodes, {row['link']}"
        predicted_s = collective_time(row["op"], ranks, num_bytes, link)
        yield Sample(f"{device.name} {where}, {size}", measured_s, predicted_s, wire / link.bandwidth_bytes_s)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _device(hardware: str) -> Device | None:
    """The known device of a published name such as `A100-SXM4-80GB`, `A100-PCIe` or `B200 (…)`."""
    family = hardware.split("-")[0].split()[0]
    for name in (f"{family}-PCIe-80GB",) if "PCIe" in hardware else (family,):
        try:
            return Cluster.parse(f"1 {name}").device
        except InputError:
            continue
    return None


def summarise(samples: Iterable[Sample]) -> list[Row]:
    """Errors by group, in the order of the names."""
    groups: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return [_row(group, groups[group]) for group in sorted(groups)]


def _row(group: str, samples: list[Sample]) -> Row:
    ratios = [s.predicted_s / s.measured_s for s in samples]
    fitted = statistics.median(s.measured_s / s.floor_s for s in samples)
    flat = [s.floor_s * fitted / s.measured_s for s in samples]
    return Row(group, len(samples), *_errors(ratios), statistics.fmean(ratios) - 1, *_errors(flat))


def _errors(ratios: list[float]) -> tuple[float, float]:
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return statistics.median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))]


def main(arguments: list[str] | None = None) -> None:
    """Read the files, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=Path)
    parser.add_argument("--collectives", type=Path)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    given = parser.parse_args(arguments)
    samples = [*(ops(given.ops) if given.ops else ()), *(collectives(given.collectives) if given.collectives else ())]
    rows = summarise(samples)
    print("| measured | rows | median | 90th percentile | bias | one efficiency: median | 90th percentile |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        shares = (row.median_error, row.p90_error, row.bias, row.roofline_median_error, row.roofline_p90_error)
        print(f"| {row.group} | {row.count} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

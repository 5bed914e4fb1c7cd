"""The part ``machine``: what it is that everything else is measured on."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.findings import Line
from meshwright.bench.machine import this_machine, versions
from meshwright.ir.result import Check


def run(context: Context) -> None:
    """Note devices and versions, and compare a matrix product on the device with one on the CPU."""
    all_versions = versions()
    all_versions["cuda"] = str(torch.version.cuda)
    if context.device.type == "cuda":
        all_versions["cudnn"] = str(torch.backends.cudnn.version())
        all_versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        all_versions["driver"] = _driver()
    try:
        all_versions["triton"] = version("triton")
    except PackageNotFoundError:
        print("Triton is not installed: nothing can be compiled", flush=True)
    context.notes.add(Line(machine=this_machine(accelerators=not context.rehearse), versions=all_versions))
    print(all_versions, flush=True)
    if context.device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            print(torch.cuda.get_device_properties(index), flush=True)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, dtype=torch.float64, generator=generator) for _ in range(2))
    there = (left.to(context.device) @ right.to(context.device)).cpu()
    error = float((there - left @ right).norm() / (left @ right).norm())
    known = context.catalog_cluster()
    context.notes.add_finding(
        Check(
            target="a product on the device equals that on the CPU, in float64",
            passed=int(error < 1e-12),
            total=1,
            verdict="pass" if error < 1e-12 else "fail",
            measured=f"relative error {error:.0e}",
        )
    )
    context.notes.add_finding(
        Check(
            target="the catalog has the device",
            verdict="reported",
            passed=int(known is not None),
            total=1,
            measured=known.device.name if known is not None else "it does not",
        )
    )


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "(unknown)"
    return done.stdout.strip().split("\n")[0] or "(unknown)"

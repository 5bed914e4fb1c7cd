"""Makes the cluster of this machine's GPUs from their measurements."""

import math
import time

import msgspec
import torch

from meshwright.catalog import load_software, reported_cluster
from meshwright.cost.fitted_kernels import fitted_kernels
from meshwright.errors import ClusterError
from meshwright.ir.cluster import Calibration, Cluster
from meshwright.ir.device import Device, Kernels
from meshwright.runtime.calibrate_gpus import MeasuredGpu
from meshwright.runtime.machine import machine_name
from meshwright.runtime.measured import curves, levels_of

NAME = "this-machine-gpus"
LEAST_SPREAD, HOST_SPREAD = 0.03, 0.25
"""The least uncertainty of a step's time, and that of the time that the host adds, on a calibrated GPU: what a
measurement of kernels cannot show (clock rates under load, interference)."""


def gpu_cluster(gpu: MeasuredGpu) -> Cluster:
    """The cluster of the measured GPUs: peaks are those of the data sheet, if the catalog has the device, else the best
    measured rates. Products follow fitted constants, all other measured kinds their curves."""
    name, memory_bytes, processors, num_devices = gpu.properties
    base = _catalog(gpu)
    best = {row.dtype: 0.0 for row in gpu.products}
    for row in gpu.products:
        m, n, k, batch = row.product
        best[row.dtype] = max(best[row.dtype], 2 * m * n * k * batch / row.seconds)
    device = Device(
        name=name, kind="gpu", memory_bytes=memory_bytes or 2**33, peak_flops_per_s=best,
        memory_bandwidth_bytes_per_s=gpu.streamed_bytes_per_s, origin="measured",
    )  # fmt: skip
    kernels = Kernels(processors=processors)
    if base is not None:
        kernels = base.device.kernels or kernels
        peaks = {dtype: max(peak, best.get(dtype, 0.0)) for dtype, peak in base.device.peak_flops_per_s.items()}
        bandwidth = max(base.device.memory_bandwidth_bytes_per_s, gpu.streamed_bytes_per_s)
        device = msgspec.structs.replace(
            base.device, memory_bytes=memory_bytes, peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=bandwidth,
            origin="measured",
        )  # fmt: skip
    kernels = msgspec.structs.replace(
        kernels, kernel_s=gpu.measured.kernel_s, launch_s=gpu.launch_s,
        bandwidth_fraction=min(1.0, gpu.streamed_bytes_per_s / device.memory_bandwidth_bytes_per_s),
    )  # fmt: skip
    fitted = fitted_kernels(device, kernels, [(row.product, row.dtype, row.seconds) for row in gpu.products])
    there, back = (rate / 1e9 for rate in gpu.copies)
    device = msgspec.structs.replace(
        device,
        kernels=fitted.kernels,
        efficiency=curves(gpu.measured, device.peak_flops_per_s["bfloat16"], device.memory_bandwidth_bytes_per_s),
        source=f"meshwright calibrate: products deviate by {fitted.deviation:.1%} from the fitted constants; copies "
        f"{there:.1f} GB/s to the device, {back:.1f} GB/s back; a product beside a copy takes {gpu.beside:.2f} times "
        f"as long. Peaks: {base.device.source if base is not None else 'the best measured rates'}",
    )
    software = load_software("meshwright")
    step = min(1.0, max(LEAST_SPREAD, math.hypot(fitted.deviation, gpu.measured.drift)))
    spread = msgspec.structs.replace(software.spread, step=step, host=HOST_SPREAD)
    each, boxes = gpu.places.each, gpu.places.num_boxes
    levels = levels_of(list(gpu.timings), each, boxes) if each * boxes > 1 else ()
    if not levels and base is not None:
        levels = base.resized(num_devices).levels if num_devices > 1 else ()
    count = each * boxes if gpu.timings else num_devices if levels else 1
    return Cluster(
        name=NAME,
        num_devices=count,
        source=f"meshwright calibrate on {machine_name()}",
        device=device,
        levels=levels,
        collectives=gpu.timings,
        software=msgspec.structs.replace(software, host=1.0, spread=spread, source="host: measured; else the catalog"),
        calibration=Calibration(
            machine=gpu_name(gpu.properties.name),
            torch=str(torch.__version__),
            time_s=round(time.time()),
            spread=0.0,
            drift=round(gpu.measured.drift, 4),
        ),
    )


def gpu_name(reported: str) -> str:
    """The name of this machine with its GPUs, which identifies their measurements."""
    return f"{machine_name()}, {reported}"


def _catalog(gpu: MeasuredGpu) -> Cluster | None:
    try:
        return reported_cluster(*gpu.properties)
    except ClusterError:
        return None

"""The part ``calibrate``: kernels, launches, copies and links of this machine, as ``meshwright calibrate`` measures
them."""

from __future__ import annotations

from benchmarks.gpu.context import Context
from meshwright import api
from meshwright.api.measured_gpus import gpu_cluster
from meshwright.ir.cluster import Cluster
from meshwright.ir.kernel import Product
from meshwright.ir.result import Check, Verdict
from meshwright.runtime import calibrate_gpus
from meshwright.runtime.calibrate_gpus import GpuEffort
from meshwright.runtime.device import num_cuda_devices

SMALL = GpuEffort(
    products=(Product(256, 256, 256), Product(128, 256, 64), Product(64, 64, 64)), elements=(2**14, 2**16),
    lengths=(32, 64), heads=2, width=16, copied_bytes=2**16,
)  # fmt: skip


def run(context: Context) -> None:
    """Calibrate, and keep the cluster file."""
    if num_cuda_devices() > 1 and not context.rehearse:
        cluster = api.calibrate(context.cluster_file, device="cuda")
    else:
        cluster = _alone(context)
    device = cluster.device
    print(device.source, flush=True)
    for kind, curve in device.efficiency.items():
        print(f"{kind:<20} " + "  ".join(f"{size:.3g}: {fraction:.1%}" for size, fraction in curve), flush=True)
    print(f"{device.kernels}\n{cluster.software.spread}\npeaks {device.peak_flops_per_s}", flush=True)
    for level in cluster.levels:
        print(f"{level.name}: alpha {level.alpha_s:.3g} s, beta {level.beta_s_per_byte:.3g} s per byte", flush=True)
    for row in cluster.collectives:
        print(
            f"{row.operation} {row.algorithm} {row.ranks} ranks {row.bytes} bytes: {row.time_s * 1e6:.1f} us",
            flush=True,
        )
    deviation = cluster.software.spread.step
    verdict: Verdict = "pass" if deviation <= 0.1 else "fail"
    context.notes.add_finding(
        Check(
            target="fitted constants of matrix products hold, and calls repeat, within 10%",
            verdict="reported" if context.rehearse else verdict, passed=int(deviation <= 0.1), total=1,
            measured=f"standard deviation {deviation:.1%}; the same call from sweep to sweep "
            f"{cluster.calibration.drift if cluster.calibration else 0.0:.1%}",
        )
    )  # fmt: skip


def _alone(context: Context) -> Cluster:
    effort = SMALL if context.rehearse else GpuEffort()
    calibration = calibrate_gpus.measure(effort, lambda what: print(what, flush=True), context.device)
    assert calibration is not None
    cluster = gpu_cluster(calibration)
    api.save_cluster(cluster, context.cluster_file)
    for row in calibration.products:
        m, n, k, _ = row.product
        rate = 2 * m * n * k / row.seconds / 1e12
        print(f"{row.dtype} {m:.0f} x {n:.0f} x {k:.0f}: {row.seconds * 1e6:.1f} us, {rate:.1f} TFLOP/s", flush=True)
    return cluster

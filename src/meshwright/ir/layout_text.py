"""A layout as text, for messages and tables."""

from meshwright.ir.layout import Layout


def layout_text(layout: Layout) -> str:
    """The layout as text, without default values: ``dp2 x tp2, 4 micro-batches, 1f1b``."""
    names = ("pp",) if layout.stage_sizes else ("dp", "ep", "cp", "tp", "pp")
    grid = isinstance(layout.tp, tuple)
    sizes = {name: getattr(layout, name) for name in names if not (grid and name == "tp")}
    axes = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    if grid:
        axes += " x " * bool(axes) + "tp " + "x".join(map(str, layout.grid))
    for name, parts in (("spatial", layout.spatial), ("mixed", layout.mixed)):
        if max(parts, default=1) > 1:
            axes += " x " * bool(axes) + f"{name} " + "x".join(map(str, parts))
    groups = f" in groups of {layout.zero_ranks}" if layout.zero_ranks else ""
    zero = " by parameter" if layout.zero < 0 else "/".join(map(str, layout.stage_zero or (layout.zero,)))
    words = (
        (layout.zero or layout.stage_zero, f"zero{zero}{groups}"),
        (layout.offload != "none", f"{layout.offload} on the host"),
        (layout.precision, layout.precision),
        (layout.float8, f"float8 {layout.float8}"),
        (layout.microbatches > 1, f"{layout.microbatches} micro-batches"),
        (layout.pp > 1, layout.schedule),
        (layout.in_flight, f"{layout.in_flight} in flight"),
        (layout.chunks > 1, f"{layout.chunks} chunks"),
        (
            layout.stage_sizes,
            "stages of "
            + " and ".join(
                " x ".join(f"{axis}{size}" for axis, size in own.items() if size > 1) or "one rank"
                for own in layout.stage_sizes
            ),
        ),
        (layout.context != "gather", f"{layout.context} attention"),
        (layout.sequence_parallel, "sequence parallel"),
        (layout.recompute != "none", f"recompute {layout.recompute}"),
        (layout.batch_statistics == "rank", "statistics of each rank"),
        (layout.codec not in ("", "none"), f"gradients in {layout.codec}"),
        (layout.parameter_codec, f"parameters in {layout.parameter_codec}"),
        (layout.activation_codec, f"activations in {layout.activation_codec}"),
        (layout.replicas > 1, f"{layout.replicas} replicas, {layout.consistency}"),
        (layout.workspace_bytes, f"{layout.workspace_bytes / 2**20:.4g} MiB of workspace"),
    )
    return ", ".join([axes or "one rank", *(str(word) for shown, word in words if shown)])

"""Measures the profiles of a workflow's models on this machine, or predicts them for another device."""

from collections.abc import Callable

import msgspec
import torch

from meshwright.api.machine import known_cluster
from meshwright.errors import WorkflowError
from meshwright.serving.models import captured_variant, examples_of, mean_and_variation
from meshwright.serving.workflow import Operator, Variant, Workflow


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The profile of a variant: measured seconds for an item (0: only predicted) with their variation, the seconds that
    the cost model predicts, and the bytes of a result."""

    operator: str
    variant: str
    measured_s: float
    variation: float
    predicted_s: float
    message_bytes: int


def profile(
    workflow: Workflow, *, cluster: str = "", progress: Callable[[str], None] = lambda what: None
) -> tuple[Profile, ...]:
    """Profile every variant that has a model, on one core. The first such variants stand for operators before it.

    ``cluster``: predict seconds for a device of this cluster (a name or a file), and measure nothing. Empty: measure
    here, and predict for this machine.

    Raises:
        WorkflowError: no variant of an operator has a model, or a model refuses its inputs.
        CaptureError: a model cannot be captured.
    """
    if not any(variant.model for operator in workflow.operators for variant in operator.variants):
        raise WorkflowError(
            "no variant has a model", where=workflow.name, remedy="write [operators.variants.model] with a name"
        )
    known = known_cluster(cluster or None, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = {
            operator.name: next(
                (variant.name for variant in operator.variants if variant.model), operator.variants[0].name
            )
            for operator in workflow.operators
        }
        examples = examples_of(workflow, first)
        profiles = []
        for name in workflow.order:
            operator = workflow.operator_of[name]
            for variant in (variant for variant in operator.variants if variant.model):
                progress(f"{name}: {variant.name}")
                model = captured_variant(operator, variant, examples)
                inputs = [examples[source] for source in operator.inputs]
                result = model(*inputs)
                mean_s, variation = (0.0, 0.0) if cluster else mean_and_variation(model.measured_s(*inputs))
                profiles.append(Profile(
                    operator=name, variant=variant.name, measured_s=mean_s, variation=variation,
                    predicted_s=model.predicted_s(known), message_bytes=result.numel() * result.element_size(),
                ))  # fmt: skip
        return tuple(profiles)
    finally:
        torch.set_num_threads(threads)


def with_profiles(workflow: Workflow, profiles: tuple[Profile, ...], device: str) -> Workflow:
    """The workflow with these profiles as the seconds on a kind of device: measured ones, or predicted ones if nothing
    was measured."""
    by_name = {(profile.operator, profile.variant): profile for profile in profiles}

    def filled(operator: Operator, variant: Variant) -> Variant:
        known = by_name.get((operator.name, variant.name))
        if known is None:
            return variant
        return msgspec.structs.replace(
            variant, seconds=variant.seconds | {device: known.measured_s or known.predicted_s},
            variation=known.variation or variant.variation, message_bytes=float(known.message_bytes),
        )  # fmt: skip

    operators = tuple(
        msgspec.structs.replace(operator, variants=tuple(filled(operator, variant) for variant in operator.variants))
        for operator in workflow.operators
    )
    return msgspec.structs.replace(workflow, operators=operators)

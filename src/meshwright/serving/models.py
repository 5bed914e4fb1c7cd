"""Variants as PyTorch models: captured for inference, lowered for one device, costed, run and measured.

The steps are those of training: capture, a plan of one rank, lowering. What is costed is what runs.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from meshwright import build
from meshwright.api.plans import plan
from meshwright.capture.opaque_capture import capture
from meshwright.cost.host import launched_s
from meshwright.cost.node_costs import NodeCosts
from meshwright.errors import CaptureError, WorkflowError
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import Layout
from meshwright.ir.run import Run
from meshwright.ir.run_data import RandomData
from meshwright.ir.stages import PROLOGUE
from meshwright.lower.function import boxed_function
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.plans import PlanLowering
from meshwright.lower.stage import lower_stage
from meshwright.serving.workflow import Operator, Source, Variant, Workflow

aten = torch.ops.aten

WARM_UP, MEASURED, LEAST_S = 3, 30, 0.3
"""Calls before a measurement, the least number of measured calls, and the least seconds that they take together."""

INTERRUPTED = 3.0


class InferenceModel:
    """A model for one item at a time, captured with the shapes of ``example`` and lowered for one CPU core.

    Raises:
        CaptureError: the model cannot be traced, or does not return one floating-point tensor.
    """

    def __init__(self, module: nn.Module, example: Sequence[Tensor], where: str = "model") -> None:
        module = module.eval()

        def answer(model: nn.Module, batch: Mapping[str, Sequence[Tensor]]) -> Tensor:
            result = model(*batch["inputs"])
            if not isinstance(result, Tensor) or not result.is_floating_point():
                raise CaptureError(
                    f"it returns a {type(result).__name__}", where=where, remedy="return one floating-point tensor"
                )
            return result.sum()  # capture wants a scalar; what is summed is the answer

        captured = capture(module, answer, {"inputs": list(example)}, training=False)
        chosen = plan(captured.graph, "cpu-local", devices=1, layout=Layout())
        lowered = lower_stage(
            PlannedGraph(captured.graph, chosen), 0, {}, rules=captured.rules, constants=captured.constants
        )
        self._mesh, self.graph = chosen.mesh, captured.graph
        (self.program,) = PlanLowering(captured.graph)(chosen)
        phase = lowered.functions[PROLOGUE]
        graph, constants = phase.graph, captured.constants
        (total,) = graph.output_node().all_input_nodes
        while total.target is not aten.sum.default:
            (total,) = total.all_input_nodes
        graph.output_node().args = ([total.args[0]],)
        graph.eliminate_dead_code()
        self._function = boxed_function(graph, constants)
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        held = [*lowered.program.parameters, *lowered.program.buffers]
        self._values = {kept.value: values[kept.name].detach() for kept in held if kept.value}
        names = [f"batch.inputs[{index}]" for index in range(len(example))]
        by_name = {given.name: given.value for given in lowered.program.inputs}
        self._inputs = [by_name.get(name, "") for name in names]
        self._order = [str(node.name) for node in graph.find_nodes(op="placeholder")]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The model's result for one item."""
        values = self._values | dict(zip(self._inputs, inputs, strict=True))
        with torch.inference_mode():
            (result,) = self._function([values[name] for name in self._order])
        answer: Tensor = result
        return answer

    def predicted_s(self, cluster: Cluster, threads: int = 1) -> float:
        """Seconds for an item on a device of a cluster, by the cost model of training."""
        nodes = [node for phase in self.program.phases for node in phase.nodes]
        costs = NodeCosts(self._mesh, cluster, threads, num_ranks=1)
        cost = costs.of(nodes)
        return launched_s(cost.seconds, costs.launch_s * cost.launches)

    def measured_s(self, *inputs: Tensor) -> list[float]:
        """Seconds of many calls, with the threads that PyTorch has."""
        for _ in range(WARM_UP):
            self(*inputs)
        seconds: list[float] = []
        while len(seconds) < MEASURED or sum(seconds) < LEAST_S:
            begun = time.perf_counter()
            self(*inputs)
            seconds.append(time.perf_counter() - begun)
        return seconds


def items_of(source: Source, count: int, seed: int = 0) -> list[Tensor]:
    """Random items of a source. Raise a WorkflowError if it has no shape."""
    if not source.shape:
        raise WorkflowError(
            "it has no shape, so that no model can read its items", where=f"sources.{source.name}",
            remedy="write shape = [3, 64, 64], or emulate the devices",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, *source.shape, generator=generator) for _ in range(count)]


def module_of(operator: Operator, variant: Variant) -> nn.Module:
    """The model of a variant, with the same initial values in every process. Raise a WorkflowError if it has none."""
    where = f"operators.{operator.name}.{variant.name}"
    if variant.model is None:
        raise WorkflowError(
            "it has no model", where=where, remedy="write [operators.variants.model], or emulate the devices"
        )
    return build.model(Run(model=variant.model, data=RandomData()))


def examples_of(workflow: Workflow, models: Mapping[str, str]) -> dict[str, Tensor]:
    """A result of every source and operator, with these variants; by running the models one after the other."""
    examples = {source.name: items_of(source, 1)[0] for source in workflow.sources}
    for name in workflow.order:
        operator = workflow.operator_of[name]
        module = module_of(operator, operator.variant(models[name])).eval()
        with torch.inference_mode():
            examples[name] = _run(
                module, [examples[source_name] for source_name in operator.inputs], f"operators.{name}.{models[name]}"
            )
    return {name: value.clone() for name, value in examples.items()}


def _run(module: nn.Module, inputs: Sequence[Tensor], where: str) -> Tensor:
    try:
        result: Tensor = module(*inputs)
    except (RuntimeError, TypeError) as error:
        shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in inputs)
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        raise WorkflowError(
            f"the model refuses its inputs ({shapes}): {problem}", where=where,
            remedy="let shapes and inputs fit the model; each item is a batch of one",
        ) from None  # fmt: skip
    return result


def captured_variant(operator: Operator, variant: Variant, example: Mapping[str, Tensor]) -> InferenceModel:
    """The variant's model, captured for the results ``example`` of its inputs."""
    where = f"operators.{operator.name}.{variant.name}"
    return InferenceModel(module_of(operator, variant), [example[name] for name in operator.inputs], where)


def mean_and_variation(seconds: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation divided by it. Calls that took more than ``INTERRUPTED`` medians are left
    out: other programs had the core."""
    own = [value for value in seconds if value <= INTERRUPTED * float(np.median(seconds))]
    mean = float(np.mean(own))
    return mean, float(np.std(own)) / mean

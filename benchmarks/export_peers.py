"""Runs in the environment of other trainers: ``python -m benchmarks.export_peers NAME FOLDER...`` prints lines of JSON.

``torchtitan``, ``megatron`` and ``deepspeed`` give each folder's configuration to the package's own parser, and print
its error, if any. ``train-deepspeed`` and ``train-accelerate`` train a small model on this rank, and print its losses.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LR = 0.1


def torchtitan(folder: Path) -> None:
    """Give the file to ``ConfigManager``, and check the number of ranks."""
    import importlib

    from torchtitan.config.manager import ConfigManager

    sys.path.insert(0, str(folder))
    try:
        sys.modules.pop("torchtitan_config", None)
        importlib.import_module("torchtitan_config")
        config = ConfigManager().parse_args(["--module", "torchtitan_config", "--config", "exported"])
    finally:
        sys.path.remove(str(folder))
    from torch.distributed.pipelining.schedules import get_schedule_class

    parallel = config.parallelism
    if parallel.pipeline_parallel_degree > 1:
        get_schedule_class(parallel.pipeline_parallel_schedule)
    degrees = ("replicate", "shard"), ("tensor", "pipeline", "context")
    ranks = 1
    for name in degrees[0]:
        ranks *= getattr(parallel, f"data_parallel_{name}_degree")
    for name in degrees[1]:
        ranks *= getattr(parallel, f"{name}_parallel_degree")
    _equal("ranks", ranks, _ranks(folder))


def megatron(folder: Path) -> None:
    """Make ``TransformerConfig`` and ``DistributedDataParallelConfig``, whose fields mostly have the arguments' names.
    The package has no parser of arguments: the parser is in Megatron-LM."""
    import dataclasses

    import torch
    from megatron.core import ModelParallelConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    words = shlex.split((folder / "megatron.args").read_text())
    given: dict[str, Any] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            value = words[index + 1] if index + 1 < len(words) and not words[index + 1].startswith("--") else True
            given[word[2:].replace("-", "_")] = value
    if "num_experts" in given:
        given["num_moe_experts"] = given.pop("num_experts")
    if "num_virtual_stages_per_pipeline_rank" in given:
        given["virtual_pipeline_model_parallel_size"] = given.pop("num_virtual_stages_per_pipeline_rank")
    given["add_bias_linear"] = "disable_bias_linear" not in given
    given["gated_linear_unit"] = "swiglu" in given
    given.pop("attention_backend", None)  # a member of an enum there
    low = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    model = TransformerConfig if "hidden_size" in given else ModelParallelConfig  # a captured model has no sizes
    for kind in (model, DistributedDataParallelConfig):
        names = {field.name for field in dataclasses.fields(kind)}
        values = {name: _value(value) for name, value in {**given, **low}.items() if name in names}
        kind(**values)


def _value(text: Any) -> Any:
    """The number in a text, if it is one."""
    if not isinstance(text, str) or not text.replace(".", "", 1).isdecimal():
        return text
    return int(text) if text.isdecimal() else float(text)


def deepspeed(folder: Path) -> None:
    """Give the file to ``DeepSpeedConfig``, which checks the sizes of the batch."""
    from deepspeed.runtime import config as module

    path = folder / "ds_config.json"
    given = json.loads(path.read_text())
    own = given.get("tensor_parallel", {}).get("autotp_size", 1) * given.get("pipeline", {}).get("stages", 1)
    own *= given.get("sequence_parallel_size", 1)
    data_ranks = _ranks(folder) // own

    class Parallel:
        """The numbers of ranks, by the methods that DeepSpeed calls."""

        def get_data_parallel_world_size(self) -> int:
            return data_ranks

        def get_model_parallel_world_size(self) -> int:
            return own

    module.dist.get_rank = lambda: 0
    config = module.DeepSpeedConfig(str(path), mpu=Parallel())
    _equal("batch", config.train_batch_size, given["train_batch_size"])
    _equal("stage", config.zero_config.stage, given["zero_optimization"]["stage"])


def train_deepspeed(folder: Path, model: str) -> list[float]:
    """Losses of three steps by ``deepspeed.initialize`` with the folder's configuration."""
    import deepspeed as package
    import deepspeed.comm.torch as backend
    import torch
    import torch.distributed as dist

    from tests.distributed import exports, hugging_face, oracle

    backend.build_shm_op = lambda: None  # gloo carries everything: DeepSpeed would compile a kernel of its own
    with oracle.WiderCasts():
        subject = hugging_face.subject(model, exports.STEPS, exports.EVEN)
        package.init_distributed(dist_backend="gloo")
        optimizer = torch.optim.SGD(subject.model.parameters(), lr=LR)
        engine, *_ = package.initialize(model=subject.model, config=str(folder / "ds_config.json"), optimizer=optimizer)
        rank, ranks, steps = dist.get_rank(), dist.get_world_size(), engine.gradient_accumulation_steps()
        losses = []
        for batch in subject.batches:
            total = torch.zeros((), dtype=torch.float64)
            for step in range(steps):
                part = exports.part(batch, step * ranks + rank, ranks * steps)
                loss = engine(**part).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach() / steps
            losses.append(_mean(total))
    return losses


def train_accelerate(folder: Path, model: str) -> list[float]:
    """Losses of three steps by ``Accelerator`` on CPUs, where it knows data parallelism only."""
    import torch
    from accelerate import Accelerator

    from tests.distributed import exports, hugging_face, oracle

    with oracle.WiderCasts():
        subject = hugging_face.subject(model, exports.STEPS, exports.EVEN)
        accelerator = Accelerator(cpu=True)
        split = accelerator.prepare(subject.model)
        optimizer = accelerator.prepare(torch.optim.SGD(split.parameters(), lr=LR))
        losses = []
        for batch in subject.batches:
            part = exports.part(batch, accelerator.process_index, accelerator.num_processes)
            loss = split(**part).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(_mean(loss.detach()))
    return losses


def _mean(loss: Any) -> float:
    import torch.distributed as dist

    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def _ranks(folder: Path) -> int:
    return int((folder / "ranks").read_text())


def _equal(name: str, value: Any, wanted: Any) -> None:
    if value != wanted:
        raise ValueError(f"{name} is {value}, not {wanted}")


PARSERS: Mapping[str, Callable[[Path], None]] = {"torchtitan": torchtitan, "megatron": megatron, "deepspeed": deepspeed}
TRAINERS: Mapping[str, Callable[[Path, str], list[float]]] = {
    "train-deepspeed": train_deepspeed, "train-accelerate": train_accelerate,
}  # fmt: skip


def main(name: str, *arguments: str) -> None:
    """Run one of the functions above."""
    if name in TRAINERS:
        losses = TRAINERS[name](Path(arguments[0]), arguments[1])
        print(f"LOSSES {json.dumps(losses)}\n", end="", flush=True)  # in one piece: torchrun's ranks do not buffer
        return
    for folder in map(Path, arguments):
        try:
            PARSERS[name](folder)
            answer = {}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a parser is a refusal
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print("ANSWER", json.dumps({"folder": folder.name, **answer}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A subclass of Hugging Face's Trainer that trains by our plan. Data, schedule, logs, evaluation and checkpoints are
Trainer's own.

    trainer = PlannedTrainer(model=model, args=args, train_dataset=data, plan=mw.Layout(tp=2))
    trainer.train()

Every rank draws the global batch: ``per_device_train_batch_size`` x ranks x ``gradient_accumulation_steps`` samples,
which the plan divides. So losses do not depend on the layout.
"""

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.bridges.extras import missing
from meshwright.bridges.planned import Planned, checked, give_whole_batches
from meshwright.errors import LayoutError, PlanError
from meshwright.ir.layout import Layout, Recompute

try:
    import accelerate.data_loader as loaders
    from transformers import Trainer, TrainingArguments
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as error:
    raise missing("transformers, or accelerate, which its Trainer needs,", "hf") from error

_WHERE = "TrainingArguments"
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("fp16", (False,), "use bf16=True"),
    ("fp16_full_eval", (False,), "evaluate in the precision of the parameters"),
    ("bf16_full_eval", (False,), "evaluate in the precision of the parameters"),
    ("fsdp", (None, "", [], False), "give the plan a layout: Layout(dp=-1, zero=3)"),
    ("deepspeed", (None,), "give the plan a layout: Layout(dp=-1, zero=3)"),
    ("parallelism_config", (None,), "give the plan a layout: Layout(dp=..., tp=..., cp=...)"),
    ("auto_find_batch_size", (False,), "set the batch size; mw.plan predicts the memory that it takes"),
    ("use_liger_kernel", (False,), "leave it out: its kernels replace modules that the plan splits"),
    ("torch_empty_cache_steps", (None,), "leave it out: the plan's memory is kept from step to step"),
    ("average_tokens_across_devices", (True,), "leave it at True: the loss is the mean over the whole batch"),
)
"""Arguments that training by a plan cannot honour: name, values that are accepted, remedy."""


class PlannedTrainer(Trainer):
    """Hugging Face's Trainer with a plan. It takes the arguments of ``Trainer``.

    Args:
        plan: what :func:`meshwright.parallelize` takes. Default: data parallelism over all ranks, in
            ``gradient_accumulation_steps`` micro-batches; with ``activation_checkpointing``, blocks are recomputed.
        plan_options: further arguments of ``parallelize``, such as ``{"seconds": 60.0}``.

    ``planned.trainer`` is our trainer; it exists from the first batch on.

    Raises:
        PlanError: an argument that cannot be honoured, by name.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        plan: Any = None,
        plan_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.lr_scheduler: Any
        self._created_lr_scheduler: bool
        self._plan, self._options = plan, checked(plan_options or {}, "plan_options")
        args = copy.copy(args) if args is not None else TrainingArguments(output_dir="tmp_trainer")
        _refuse(args)
        if self._plan is None:
            recompute: Recompute = "full" if args.activation_checkpointing else "none"
            self._plan = Layout(dp=-1, microbatches=args.gradient_accumulation_steps, recompute=recompute)
        # one batch is all samples of an update: the collator pads them together, and the plan divides them
        args.per_device_train_batch_size *= args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        args.average_tokens_across_devices = False  # a training batch is whole on every rank: nothing is gathered
        super().__init__(model, args, *positional, **others)
        self.planned = self._of_model()

    # --- data ----------------------------------------------------------------------------------------------------

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        *positional: Any,
        is_training: bool = False,
        **others: Any,
    ) -> Any:
        """Return the loader; for training, one that gives every rank the global batch."""
        size = batch_size * self.args.world_size if is_training else batch_size
        loader = super()._get_dataloader(dataset, description, size, *positional, is_training=is_training, **others)
        if is_training:
            give_whole_batches(loader, (loaders.BatchSamplerShard, loaders.IterableDatasetShard))
        return loader

    # --- a step --------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Make optimizer and schedule, and load their state. The model is not wrapped."""
        if self.planned.model is not self.model:
            self.planned = self._of_model()
        if resume_from_checkpoint is not None and self.planned.trainer is not None:
            raise PlanError(
                "this trainer has trained already", where="resume_from_checkpoint", remedy="resume with a new trainer"
            )
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._keep_accelerate_away()
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of the global batch by the plan, and return its loss."""
        model.train()
        batch = {"inputs": self._prepare_inputs(inputs), "num_items": num_items_in_batch}
        loss = self.planned.begin(batch, self.optimizer, self.state.global_step).loss(batch)
        loss.backward()
        return loss.detach()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._trained().clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm if grad_norm is not None else self._trained().clip_gradients(float("inf"))

    # --- evaluation and files ------------------------------------------------------------------------------------

    def evaluation_loop(self, *positional: Any, **others: Any) -> Any:
        """Evaluate as Trainer does, each rank its part of the data with the whole model."""
        self._keep_accelerate_away()
        self.args.average_tokens_across_devices = self.args.world_size > 1  # here each rank has a part of the batch
        try:
            with self.planned.whole():
                return super().evaluation_loop(*positional, **others)
        finally:
            self.args.average_tokens_across_devices = False

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the context of evaluation: autocast to bfloat16 with ``bf16``, as accelerate has it."""
        if not self.args.bf16:
            return super().autocast_smart_context_manager(cache_enabled)
        return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=bool(cache_enabled))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the folder that ``from_pretrained`` reads; its whole tensors are gathered on rank 0."""
        if state_dict is None and self.planned.trainer is not None:
            state_dict = self.planned.trainer.full_state_dict()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimizer's whole state as Trainer does, so that Trainer and other layouts can load it."""
        state = self._trained().full_optimizer_state_dict()
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_best_model(self) -> None:
        if not self.planned.is_split:
            super()._load_best_model()
            return
        self._trained().load_weights(str(self.state.best_model_checkpoint))

    # --- inside --------------------------------------------------------------------------------------------------

    def _of_model(self) -> Planned:
        options = {"seed": self.args.seed, "device": self.args.device, "compile": self.args.torch_compile}
        if self.args.bf16:
            options["precision"] = "bfloat16"
        return Planned(self.model, self._loss_of, self._plan, options | self._options)

    def _loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss that is captured: Trainer's own, of the whole batch."""
        loss: Tensor = self.compute_loss(model, dict(batch["inputs"]), num_items_in_batch=batch["num_items"])
        return loss

    def _trained(self) -> Any:
        if self.planned.trainer is None:
            raise LayoutError("no step was made yet", where="PlannedTrainer", remedy="call train() first")
        return self.planned.trainer

    def _keep_accelerate_away(self) -> None:
        """Keep evaluation from wrapping the model: accelerate prepares a model only if it has none."""
        if self.model not in self.accelerator._models:
            self.accelerator._models.append(self.model)


def _refuse(args: TrainingArguments) -> None:
    for name, accepted, remedy in _REFUSED:
        value = getattr(args, name, accepted[0])
        if value not in accepted:
            raise PlanError(f"{value!r} cannot be honoured", where=f"{_WHERE}, {name}", remedy=remedy)
    if args.n_gpu > 1:
        raise PlanError(
            f"one process would use {args.n_gpu} GPUs", where=_WHERE, remedy="start one process for each: torchrun"
        )
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            raise PlanError(
                "True cannot be honoured: every rank draws the whole batch",
                where=f"{_WHERE}, accelerator_config.{name}",
                remedy="leave it out",
            )
    if args.dataloader_drop_last and args.gradient_accumulation_steps > 1:
        raise PlanError(
            f"True drops other samples with gradient_accumulation_steps={args.gradient_accumulation_steps}, because a "
            "batch is all samples of an update",
            where=f"{_WHERE}, dataloader_drop_last",
            remedy="set one of the two, and Layout(microbatches=...)",
        )
    if "layerwise" in str(args.optim).lower() or "lomo" in str(args.optim).lower():
        raise PlanError(
            f"{args.optim!s} updates parameters inside of backward",
            where=f"{_WHERE}, optim",
            remedy="use an optimizer that updates them in step(), such as adamw_torch",
        )

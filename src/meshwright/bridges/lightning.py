"""A strategy of Lightning, by which an unmodified LightningModule trains by our plan.

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=PlannedStrategy(plan=mw.Layout(tp=2)))
    trainer.fit(module, loader)

``training_step`` is captured: it is called once for each shape of the batch, and the plan runs what it does. Its
``self.log`` of scalars becomes metrics of the captured step, which are logged in every step. A loader's batch is the
batch of all ranks together, and every rank gets it whole.
"""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from meshwright.bridges.extras import missing
from meshwright.bridges.planned import Planned, checked
from meshwright.errors import CaptureError, LayoutError, PlanError
from meshwright.ir.layout import Layout

try:
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, Strategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise missing("lightning", "lightning") from error

_LOGGED = "logged"
_Entry = tuple[str, Any, dict[str, Any]]
"""A call of ``self.log``: name, value (None if the value is a metric of the step), other arguments."""


class PlannedPrecision(Precision):
    """Lightning's precision for planned steps: it clips by the norm over all ranks."""

    def __init__(self, strategy: "PlannedStrategy", evaluation: Precision) -> None:
        self._strategy, self._evaluation = strategy, evaluation
        self.precision = evaluation.precision

    def forward_context(self) -> Any:
        """Return the context of validation, test and prediction."""
        return self._evaluation.forward_context()

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of the whole model."""
        self._strategy.trained.clip_gradients(clip_val)


class PlannedStrategy(DDPStrategy):
    """Lightning's strategy for several processes, with a plan.

    Args:
        plan: what :func:`meshwright.parallelize` takes. Default: data parallelism over all ranks.
        plan_options: further arguments of ``parallelize``.
        others: arguments of ``DDPStrategy`` that concern processes, such as ``process_group_backend``.

    ``planned.trainer`` is our trainer; it exists from the first batch on.

    Raises:
        PlanError: manual optimization, several optimizers, or a precision that cannot be honoured.
    """

    strategy_name = "meshwright"

    def __init__(self, plan: Any = None, plan_options: Mapping[str, Any] | None = None, **others: Any) -> None:
        self._plan = plan if plan is not None else Layout(dp=-1)
        self._options = checked(plan_options or {}, "plan_options")
        self.planned: Planned | None = None
        self._calls: SimpleQueue[_Entry | None] = SimpleQueue()  # a queue: a step may not change what it reads
        self._entries: list[_Entry] = []
        self._whole = ExitStack()
        super().__init__(**others)

    @property
    def trained(self) -> Any:
        """Our trainer.

        Raises:
            LayoutError: no step was made yet.
        """
        if self.planned is None or self.planned.trainer is None:
            raise LayoutError("no step was made yet", where="PlannedStrategy", remedy="call fit first")
        return self.planned.trainer

    # --- setup ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The precision of the steps and of evaluation."""
        return self._precision_plugin if self._precision_plugin is not None else PlannedPrecision(self, Precision())

    @precision_plugin.setter
    def precision_plugin(self, given: Precision | None) -> None:
        if given is None:  # the Trainer gives it later
            self._precision_plugin = None
            return
        mixed = type(given) is MixedPrecision and given.precision == "bf16-mixed"
        if type(given) not in (Precision, PlannedPrecision) and not mixed:
            raise PlanError(
                f"{given.precision!r} cannot be honoured", where="Trainer, precision",
                remedy="use '32-true' or 'bf16-mixed', or convert the module before fit",
            )  # fmt: skip
        if mixed:
            self._options.setdefault("precision", "bfloat16")
        self._precision_plugin = given if isinstance(given, PlannedPrecision) else PlannedPrecision(self, given)

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does. It leaves the loaders' samplers alone, so that every rank draws whole batches."""
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != TrainerFn.FITTING and self.world_size == 1:
            Strategy.setup(self, trainer)
        else:
            super().setup(trainer)

    def setup_distributed(self) -> None:
        """Start torch.distributed, unless this process is alone."""
        self.set_world_ranks()
        if self.world_size > 1:
            super().setup_distributed()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let all ranks draw the same random order, from the seed of rank 0."""
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(self.broadcast(torch.initial_seed()))
        return dataloader

    def configure_ddp(self) -> None:
        """Leave the module as it is; the plan's trainer takes it over at the first batch."""
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise PlanError(
                "a captured step cannot call optimizers itself", where=f"{type(module).__name__}, manual optimization",
                remedy="use automatic optimization; for alternating losses, call mw.parallelize for each of them",
            )  # fmt: skip
        self.planned = Planned(module, self._loss_of, self._plan, {"device": self.root_device} | self._options)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizer of ``configure_optimizers``."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise PlanError(
                f"it returned {len(self.optimizers)} optimizers", where="configure_optimizers",
                remedy="return one optimizer; it may have several groups of parameters",
            )  # fmt: skip

    # --- a step --------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, *_: Any) -> Any:
        """Run forward and backward of the whole batch by the plan, and log what the captured step logs."""
        module, planned = self.lightning_module, self.planned
        assert module is not None
        assert planned is not None
        trainer = planned.begin(batch, self.optimizers[0], module.trainer.global_step)
        loss = trainer.loss(batch)
        while not self._calls.empty():
            entry = self._calls.get()
            self._entries = [] if entry is None else [*self._entries, entry]
        for number, (name, value, others) in enumerate(self._entries):
            module.log(name, trainer.metrics[f"{_LOGGED}_{number}"] if value is None else value, **others)
        return loss

    def _loss_of(self, module: nn.Module, batch: Any) -> Any:
        """Run the module's own step, and note its calls of ``self.log``. This function is captured."""
        calls, metrics = self._calls, SimpleQueue[tuple[str, Tensor]]()
        calls.put(None)
        numbers = iter(range(1_000_000))

        def log(_: Any, name: str, value: Any, **others: Any) -> None:
            number = next(numbers)
            if isinstance(value, Tensor):
                metrics.put((f"{_LOGGED}_{number}", value.detach()))
            elif not isinstance(value, int | float):
                raise CaptureError(
                    f"self.log({name!r}) of a {type(value).__name__} cannot be captured",
                    where=f"{type(module).__name__}.training_step",
                    remedy="log scalar tensors in training_step; metrics of torchmetrics belong to validation_step",
                )
            calls.put((name, None if isinstance(value, Tensor) else value, others))

        def log_dict(owner: Any, values: Mapping[str, Any], **others: Any) -> None:
            for name, value in values.items():
                log(owner, name, value, **others)

        kind: Any = type(module)
        with patch.object(kind, "log", log), patch.object(kind, "log_dict", log_dict):
            result = kind.training_step(module, batch, *_numbers_of(kind))
        loss = result
        if isinstance(result, Mapping):
            loss = result.get("loss")
            if more := [key for key in result if key != "loss"]:
                raise CaptureError(
                    f"it returns {more[0]!r} beside the loss", where=f"{type(module).__name__}.training_step",
                    remedy="log it, or compute it in validation_step: only scalars come back from a planned step",
                )  # fmt: skip
        logged = {}
        while not metrics.empty():
            name, value = metrics.get()
            logged[name] = value
        return loss, logged

    # --- evaluation and files ------------------------------------------------------------------------------------

    def _enter_whole(self) -> None:
        if self.planned is not None:
            self._whole.enter_context(self.planned.whole())

    def on_validation_start(self) -> None:
        """Give the module whole parameters."""
        self._enter_whole()

    def on_validation_end(self) -> None:
        """Take whole parameters away again."""
        self._whole.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole tensors, on rank 0. Every rank must call it."""
        if self.planned is None or self.planned.trainer is None:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        return self.planned.trainer.full_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's whole state, on rank 0. Every rank must call it."""
        if self.planned is None or self.planned.trainer is None:
            state: dict[str, Any] = super().optimizer_state(optimizer)
            return state
        return self.planned.trainer.full_optimizer_state_dict()

    def on_train_end(self) -> None:
        """Leave the module with whole trained parameters."""
        if self.planned is not None:
            self.planned.give_back()

    def teardown(self) -> None:
        """End the training. After an error, a module whose parameters are split stays on the meta device."""
        self._whole.close()
        module = self.lightning_module
        if module is not None and any(value.is_meta for value in module.parameters()):
            self._lightning_module = None
        super().teardown()


def _numbers_of(kind: Any) -> tuple[Any, ...]:
    """The number of the batch, if ``training_step`` takes it. A step that uses it cannot be captured."""
    parameters = inspect.signature(kind.training_step).parameters
    return (_BatchNumber(),) if "batch_idx" in parameters or len(parameters) > 2 else ()


class _BatchNumber:
    """The number of a batch, which a captured step may not use: it would be the same in every step."""

    def _refused(self, *_: Any) -> Any:
        raise CaptureError(
            "the step uses the number of the batch, which would be the same in every step",
            where="training_step, batch_idx",
            remedy="put the number into the batch, or do this in a callback",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __index__ = __int__ = __float__ = __bool__ = _refused
    __eq__ = __ne__ = _refused
    __hash__ = object.__hash__

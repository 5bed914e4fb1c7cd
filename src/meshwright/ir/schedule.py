"""The schedule: the ordered actions of every rank in one step, written as in ``torch.distributed.pipelining``."""

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import ClassVar

import msgspec

from meshwright.errors import ScheduleError

_ACTION = re.compile(r"([0-9]+)(F|I|W|B|(?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)([0-9]*)")


class ActionKind(StrEnum):
    """The kind of an action. Its value is its text form in PyTorch.

    ``F`` is forward. Backward is ``B``, or it is split into ``I`` (gradients of the stage's inputs) and ``W``
    (gradients of the stage's parameters). A send or receive names the stage of the rank that runs it. So ``1SEND_F0``
    on one rank matches ``2RECV_F0`` on another rank, and ``2SEND_B0`` matches ``1RECV_B0``. ``UNSHARD`` gathers the
    stage's parameters, ``RESHARD`` frees the gathered parameters, and ``REDUCE_GRAD`` reduces the stage's gradients.
    Each of these three runs once for all micro-batches.
    """

    F = "F"
    I = "I"  # noqa: E741 - the grammar's letter
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    __hash__ = str.__hash__  # the hash of enums is a Python function, and schedules hash millions of kinds

    @property
    def computes(self) -> bool:
        """Whether the action runs operators of the model."""
        return self in (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)

    @property
    def transfers(self) -> bool:
        """Whether the action sends to another rank or receives from another rank."""
        return self in (ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B)

    @property
    def has_microbatch(self) -> bool:
        """Whether the action belongs to one micro-batch. Otherwise, it belongs to the whole step of a stage."""
        return self not in _WHOLE_STEP


_WHOLE_STEP = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One action of a rank for one stage. ``microbatch`` is None for ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD``.

    ``gc=False``: an action refers to no container, and garbage collections would walk through thousands of actions.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if (self.microbatch is None) is not (self.kind in _WHOLE_STEP):
            raise ScheduleError(
                f"`{self}` {'needs a' if self.microbatch is None else 'has no'} micro-batch",
                remedy=f"write `{self.stage}{self.kind.value}{0 if self.microbatch is None else ''}`",
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def from_text(cls, text: str) -> "Action":
        """Parse an action such as ``2F0`` or ``3REDUCE_GRAD``; raises a ScheduleError if the text is not an action."""
        match = _ACTION.fullmatch(text)
        if match is None:
            kinds = ", ".join(kind.value for kind in ActionKind)
            raise ScheduleError(
                f"`{text}` is not an action", remedy=f"write stage, kind, micro-batch, as in `2F0`; kinds: {kinds}"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), ActionKind(kind), int(microbatch) if microbatch else None)


class ActionList:
    """The actions of one rank, in order. A file stores them as one string: ``0F0 0SEND_F0 0RECV_B0``."""

    __slots__ = ("actions",)

    def __init__(self, actions: Iterable[Action] = ()) -> None:
        self.actions = tuple(actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, position: int) -> Action:
        return self.actions[position]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionList) and self.actions == other.actions

    def __hash__(self) -> int:
        return hash(self.actions)

    def __repr__(self) -> str:
        return f"ActionList({self.to_text()!r})"

    def to_text(self, separator: str = " ") -> str:
        """The actions as one line of text."""
        return separator.join(map(str, self.actions))

    @classmethod
    def from_text(cls, text: str) -> "ActionList":
        """Parse actions that are separated by spaces or commas; empty cells (idle steps) are left out.

        Raises:
            ScheduleError: a word is not an action. The message has the word and its position, counted from 0.
        """
        actions: list[Action] = []
        for word in re.split(r"[,\s]+", text):
            try:
                if word:
                    actions.append(Action.from_text(word))
            except ScheduleError as error:
                raise error.within(f"position {len(actions)}") from None
        return cls(actions)


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The actions of all pipeline ranks in one step, for ``num_stages`` stages. A rank holds ``num_chunks`` stages.

    With ``in_flight``, the order of forwards and backwards is a rule (``schedules/message_driven.py``), which allows at
    most ``in_flight`` micro-batches in flight on a rank. The lists then show one possible order: the order if F takes 1
    unit of time, B takes 2, and communication takes none.

    This class checks only counts and indices. The package ``schedules`` checks whether the actions can run: it checks
    their order, matching sends and receives, and deadlocks.

    Raises:
        ScheduleError: a count is below 1, or an action has a stage or micro-batch that does not exist.
    """

    VERSION: ClassVar[int] = 1
    version: int = 1
    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    in_flight: int = 0
    ranks: tuple[ActionList, ...]

    def __post_init__(self) -> None:
        for key in ("num_stages", "num_microbatches", "num_chunks"):
            if getattr(self, key) < 1:
                raise ScheduleError(f"{key} is {getattr(self, key)}", where=key, remedy="give 1 or more")
        for rank, actions in enumerate(self.ranks):
            for position, action in enumerate(actions):
                if not 0 <= action.stage < self.num_stages:
                    self._refuse(rank, position, "stage", action.stage, self.num_stages)
                if action.microbatch is not None and not 0 <= action.microbatch < self.num_microbatches:
                    self._refuse(rank, position, "micro-batch", action.microbatch, self.num_microbatches)

    @property
    def homes(self) -> dict[int, int]:
        """Maps a stage to the rank whose actions run it."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def _refuse(self, rank: int, position: int, what: str, index: int, count: int) -> None:
        raise ScheduleError(
            f"`{self.ranks[rank][position]}`: there is no {what} {index}",
            where=f"rank {rank}, position {position}",
            remedy=f"this schedule has {count}, counted from 0; correct the action or the count",
        )

    @classmethod
    def of(
        cls,
        name: str,
        ranks: Iterable[Iterable[Action]],
        *,
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        num_chunks: int | None = None,
        in_flight: int = 0,
    ) -> "Schedule":
        """The schedule with these lists of actions, one for each rank. By default, counts are the smallest that fit."""
        lists = tuple(ActionList(actions) for actions in ranks)
        if num_stages is None:
            num_stages = max((action.stage for actions in lists for action in actions), default=0) + 1
        if num_microbatches is None:
            num_microbatches = max((action.microbatch or 0 for actions in lists for action in actions), default=0) + 1
        if num_chunks is None:
            num_chunks = max((len({action.stage for action in actions}) for actions in lists), default=1) or 1
        return cls(
            name=name,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            in_flight=in_flight,
            ranks=lists,
        )

    def to_text(self, separator: str = " ") -> str:
        """One line of actions for each rank. With ``separator=","``, it is the CSV that PyTorch's schedules read."""
        return "".join(actions.to_text(separator) + "\n" for actions in self.ranks)

    @classmethod
    def from_text(cls, text: str, *, name: str) -> "Schedule":
        """Parse text with one line for each rank, in which spaces or commas separate actions.

        Raises:
            ScheduleError: a word is not an action. The message has the word and its rank and position.
        """
        ranks = []
        for rank, line in enumerate(text.splitlines()):
            try:
                ranks.append(ActionList.from_text(line))
            except ScheduleError as error:
                raise error.within(f"rank {rank}", ", ") from None
        return cls.of(name, ranks)

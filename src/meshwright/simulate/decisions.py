"""Decisions: which action each rank of a message-driven pipeline runs next, in the simulation.

A rank may decide only when all messages that it could have received by then are known. So all ranks run until they
wait, and then the earliest decision is taken: no rank can still send a message before that time.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from meshwright.ir.schedule import Action, ActionKind
from meshwright.schedules.message_driven import next_action
from meshwright.simulate.network import Links
from meshwright.simulate.program import ByRule, SimulatedAction

_RECEIVES = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B}


class RankDecisions:
    """The decisions of all classes of ranks. ``arrivals`` has the times at which messages arrive, by class and
    receiving action. ``run`` is called with a class and the entries that it runs next. Without entries, all
    micro-batches of the class have run. With ``links``, decisions are made on the clock of ``links``."""

    def __init__(
        self,
        rules: Sequence[ByRule | None],
        arrivals: Mapping[tuple[int, Action], float],
        run: Callable[[int, tuple[SimulatedAction, ...]], None],
        links: Links | None,
    ) -> None:
        self._entries = [rule.entries if rule is not None else {} for rule in rules]
        self._progress = {class_id: rule.begin for class_id, rule in enumerate(rules) if rule is not None}
        self._arrivals, self._run, self._links = arrivals, run, links
        self._idle: dict[int, float] = {}
        self._due: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()

    def wait(self, class_id: int, now_s: float) -> None:
        """From now on, a rank is idle until a decision."""
        if self._progress[class_id].done:
            self._run(class_id, ())
            return
        self._idle[class_id] = now_s
        known = (self._arrivals.get((class_id, self._receive(class_id, kind))) for kind in _RECEIVES)
        for time_s in {now_s, *(time_s for time_s in known if time_s is not None and time_s > now_s)}:
            self._decide_at(class_id, time_s)

    def arrive(self, class_id: int, time_s: float) -> None:
        """A message for a rank arrives."""
        if class_id in self._idle:
            self._decide_at(class_id, max(time_s, self._idle[class_id]))

    def advance(self) -> bool:
        """Take the earliest decision. Returns False if no decision is due, or if ``links`` will make them."""
        if not self._due:
            return False
        time_s, _, class_id = heapq.heappop(self._due)
        self._decide(class_id, time_s)
        return True

    def awaited(self) -> dict[int, tuple[int, Action]]:
        """Maps each rank that is still without a decision to a message that it waits for."""
        kinds = {
            class_id: ActionKind.B if self._progress[class_id].needs(ActionKind.B) else ActionKind.F
            for class_id in self._idle
        }
        return {class_id: (class_id, self._receive(class_id, kind)) for class_id, kind in kinds.items()}

    def _receive(self, class_id: int, kind: ActionKind) -> Action:
        """The receive of the next forward or backward."""
        progress = self._progress[class_id]
        number = progress.backwards if kind is ActionKind.B else progress.forwards
        return Action(progress.stage, _RECEIVES[kind], number)

    def _decide_at(self, class_id: int, time_s: float) -> None:
        if self._links is not None:
            self._links.call_at(time_s, partial(self._decide, class_id))
        else:
            heapq.heappush(self._due, (time_s, next(self._numbers), class_id))

    def _decide(self, class_id: int, time_s: float) -> None:
        if class_id not in self._idle or time_s < self._idle[class_id]:  # already decided, or computing until later
            return
        progress = self._progress[class_id]
        for kind in _RECEIVES:
            arrival = self._arrivals.get((class_id, self._receive(class_id, kind)))
            if progress.waits(kind) and arrival is not None and arrival <= time_s:
                progress = progress.received(kind)
        self._progress[class_id] = progress
        action = next_action(progress)
        if action is not None:
            del self._idle[class_id]
            self._progress[class_id] = progress.after(action)
            self._run(class_id, self._entries[class_id][action])

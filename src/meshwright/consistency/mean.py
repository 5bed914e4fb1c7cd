"""The mean of flat tensors over all living replicas. It is computed with letters, and has the same bits on all
replicas.

A round computes one mean. In a round, each replica owns a segment of every tensor. It receives that segment from all
replicas, adds the segments up in the order of replicas, and sends their mean to all. This is a reduce-scatter and an
all-gather, in which a replica sends 2 (P - 1) / P of the bytes of its tensors.

    replica    0          1          2
    mean+      b c ->     a   c ->   a b   ->      contributions, to the owners of the segments a, b, c
    mean=      A   ->     B   ->     C     ->      means, to all

Replicas may die in the middle of a round. An *attempt* of a round is among the members of one view, and needs a
contribution of each member. When the view changes, all replicas that have not finished the round begin a new attempt. A
replica that has finished the round never contributes again, so a later attempt cannot produce another mean. It answers
each contribution to a later attempt with its mean (``mean!``). So all survivors get the same mean, of the same
contributors.

A replica keeps a mean until every member has said (``mean.``) that it has finished the round. A replica that has just
joined takes part in the rounds of others without values of its own, until it has received the state of another replica.

Several rounds may be in progress. Nothing happens between calls: ``take`` acts on a letter, ``look`` on a new view.

With a codec, contributions and means are coded. A message leaves out a part of its values. A replica keeps what its
messages leave out, as contributor and as owner, in its residual. If the codec has error feedback, it adds the residual
to its next contribution to the same slot: count * mean + sum of new residuals = sum of values + sum of old residuals.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.mailbox import Letter, Mailbox, replica_name, replica_number, replicas_of
from meshwright.compress.coder import draw_of
from meshwright.consistency.coded import decoded, encoded
from meshwright.consistency.rounds import Kinds, OpenRound, Parts, RoundMean, kinds_of, parts_at, wide
from meshwright.ir.codec import Codec, codec_of


class Mean:
    """A replica's part in means over replicas.

    Args:
        codec: the codec of contributions and means; empty: they are not encoded.
    """

    def __init__(self, mailbox: Mailbox, replica: int, codec: str = "") -> None:
        self._mailbox, self._replica, self._joins = mailbox, replica, False
        self._codec: Codec | None = codec_of(codec) if codec else None
        self._rounds: dict[int, OpenRound] = {}
        self._early: dict[int, list[Letter]] = {}
        self._results: dict[int, RoundMean] = {}
        self._unclaimed: dict[int, int] = {}
        """The slots of the rounds whose mean this replica has not yet claimed."""
        self._next = 0
        self._over: set[int] = set()
        self._floor = 0
        """All rounds with a smaller number are finished at every replica."""
        self._needs: dict[int, int] = {}
        """For each other replica: the first round whose mean it may still need."""
        self._residuals: dict[int, list[Tensor]] = {}
        self._seen = mailbox.view

    # --- rounds ------------------------------------------------------------------------------------------------------

    def start(self, values: Sequence[Tensor], slot: int = 0) -> int:
        """Begin the next round. Return its number, which is the same at all replicas.

        Args:
            values: flat tensors; they must not change until the round has finished.
            slot: rounds with equal slots have the same elements, and share a residual.
        """
        self.look()
        number, self._next = self._next, self._next + 1
        self._unclaimed[number] = slot
        if number not in self._rounds and number not in self._results:  # this replica may have helped in it before
            self._begin(OpenRound(number, slot, values))
        return number

    def is_finished(self, number: int) -> bool:
        """Whether ``claim`` has a result. First check whether there is a new view."""
        self.look()
        return number in self._results

    def all_have_finished(self) -> bool:
        """Whether all living replicas have finished the rounds that this replica has begun."""
        self.look()
        return all(self._needs.get(member, 0) >= self._next for member in self._members if member != self._replica)

    def claim(self, number: int) -> RoundMean:
        """The mean of a finished round. It can be claimed once. Copy its tensors before you change them, unless no
        other replica can still ask for them."""
        del self._unclaimed[number]
        result = self._results[number]
        self._forget()
        return result

    def take(self, letter: Letter) -> bool:
        """Act on a letter. Return whether it belongs to a mean."""
        match letter.kind:
            case "mean+" | "mean=":
                self._arrived(letter)
            case "mean!":
                number, epoch, count, *members = letter.numbers
                if number not in self._over and number >= self._floor:
                    self._finish(number, RoundMean(epoch, tuple(members), count, list(letter.tensors)))
            case "mean.":
                self._needs[replica_number(letter.sender)] = letter.numbers[0]
                self._forget()
            case _:
                return False
        return True

    def look(self) -> None:
        """Begin the current rounds again, if the view has changed."""
        view = self._mailbox.view
        if self._seen.epoch == view.epoch:
            return
        for name, joined in view.joined.items():
            if self._seen.joined.get(name) != joined and name.startswith("replica "):  # the replica has joined again
                self._needs.pop(replica_number(name), None)
        self._seen = view
        self._forget()
        for number in sorted(self._rounds):
            if number in self._rounds and self._rounds[number].epoch != view.epoch:
                self._begin(self._rounds[number])

    def join(self) -> None:
        """Take part as a replica that has joined. It has no state yet: until ``load_state``, it helps in rounds that it
        has not begun itself."""
        self._joins = True

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The state that this replica keeps between steps: residuals, and its part in the current rounds."""
        result = {"next": torch.tensor([self._next])}
        for slot, tensors in self._residuals.items():
            result |= {f"residual.{slot}.{index}": tensor for index, tensor in enumerate(tensors)}
        for number, slot in self._unclaimed.items():
            if (finished := self._results.get(number)) is not None:
                name, tensors = f"mean.{number}.{slot}.{finished.num_contributors}", finished.tensors
            elif number in self._rounds and (values := self._rounds[number].values) is not None:
                name, tensors = f"values.{number}.{slot}.0", list(values)
            else:  # the other replicas compute the mean
                name, tensors = f"awaited.{number}.{slot}.0", [torch.empty(0)]
            result |= {f"{name}.{index}": tensor for index, tensor in enumerate(tensors)}
        return {name: tensor.clone() for name, tensor in result.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``state``. Current rounds begin again. A replica that joins takes the means in the state, and
        receives the means of the other rounds from all others."""
        self._next = int(state["next"])
        lists: dict[str, dict[int, Tensor]] = {}
        for name, tensor in state.items():
            if name != "next":
                stem, _, index = name.rpartition(".")
                lists.setdefault(stem, {})[int(index)] = tensor.clone()
        for stem, indexed in sorted(lists.items(), key=lambda item: [int(word) for word in item[0].split(".")[1:]]):
            tensors = [indexed[index] for index in sorted(indexed)]
            what, first, *rest = stem.split(".")
            if what == "residual":
                if not self._joins:
                    self._residuals[int(first)] = tensors
                continue
            number, (slot, count) = int(first), map(int, rest)
            self._unclaimed[number] = slot
            if what == "mean":
                self._results.setdefault(number, RoundMean(-1, tuple(self._members), count, tensors))
                self._over.add(number)
                self._rounds.pop(number, None)
            elif what == "values" and not self._joins:
                self._begin(OpenRound(number, slot, tensors))
        self._joins = False
        self._say_what_is_needed()

    # --- an attempt --------------------------------------------------------------------------------------------------

    @property
    def _members(self) -> list[int]:
        return replicas_of(self._mailbox.view.members)

    def _begin(self, round_: OpenRound) -> None:
        """Begin an attempt among the members of the view: send each member its segment."""
        self._rounds[round_.number] = round_
        view = self._mailbox.view
        round_.epoch, round_.members = view.epoch, replicas_of(view.members)
        round_.contributions, round_.means, round_.count = {}, {}, 0
        sent = self._segments(round_)
        kinds, weight = round_.kinds, int(sent is not None)
        for index, member in enumerate(round_.members):
            if member != self._replica:
                numbers = (round_.number, round_.epoch, weight, *(kinds.lengths if weight else ()))
                tensors = sent[index] if sent is not None else []
                self._mailbox.send(replica_name(member), "mean+", numbers, tensors, kinds.text if weight else "")
        self._go_on(round_)

    def _segments(self, round_: OpenRound) -> list[Parts] | None:
        """The messages of all segments of this replica's values. Its own segment becomes a contribution."""
        if round_.values is None:
            round_.contributions[self._replica] = None
            return None
        values, count = list(round_.values), len(round_.members)
        round_.kinds = kinds = Kinds(tuple(map(len, values)), tuple(value.dtype for value in values))
        own = round_.members.index(self._replica)
        if self._codec is None:
            sent = [parts_at(values, kinds.segments(index, count)) for index in range(count)]
            round_.contributions[self._replica] = sent[own]
            return sent
        vectors = [value.to(wide(value.dtype)) for value in values]
        if (residual := self._residuals.get(round_.slot)) is not None:
            vectors = [vector + left for vector, left in zip(vectors, residual, strict=True)]
        if count == 1:  # nothing is sent, so nothing is encoded
            round_.contributions[self._replica] = vectors
            round_.left_out[round_.epoch] = [torch.zeros_like(vector) for vector in vectors]
            return [[]]
        sent, seen = [], [vector.clone() for vector in vectors]
        for index in range(count):
            spans, messages = kinds.segments(index, count), []
            for place, (vector, (begin, end)) in enumerate(zip(vectors, spans, strict=True)):
                draw = draw_of(round_.number, self._replica, index, place)
                message, seen[place][begin:end] = encoded(vector[begin:end], self._codec, draw, select=True)
                messages.append(message)
            sent.append(messages)
        round_.contributions[self._replica] = parts_at(seen, kinds.segments(own, count))
        round_.left_out[round_.epoch] = [vector - known for vector, known in zip(vectors, seen, strict=True)]
        return sent

    def _arrived(self, letter: Letter) -> None:
        """Act on a contribution or on the mean of a segment."""
        number, epoch = letter.numbers[:2]
        if number < self._floor:
            return
        if number in self._over:
            if letter.kind == "mean+":
                self._hand_out(number, letter)
            return
        if epoch < self._seen.epoch:
            return
        self._early.setdefault(number, []).append(letter)
        if number in self._rounds:
            self._go_on(self._rounds[number])
        elif self._joins or number < self._next:
            self._begin(OpenRound(number, 0, None))

    def _go_on(self, round_: OpenRound) -> None:
        """Take the letters of this attempt that have arrived. Add up this replica's segment, and end the round, if all
        parts have arrived."""
        self._take_early(round_)
        own, members = self._replica, round_.members
        if own not in round_.means and len(round_.contributions) == len(members):
            contributors = [member for member in members if round_.contributions[member] is not None]
            if not contributors:
                return  # the replicas that began the round have died
            self._add_up(round_, len(contributors))
        if len(round_.means) == len(members):
            columns = zip(*(round_.means[member] for member in members), strict=True)
            means = [torch.cat(column) for column in columns]
            self._finish(round_.number, RoundMean(round_.epoch, tuple(members), round_.count, means))

    def _take_early(self, round_: OpenRound) -> None:
        later = []
        for letter in self._early.pop(round_.number, []):
            number, epoch, count, *lengths = letter.numbers
            sender = replica_number(letter.sender)
            if epoch > round_.epoch:
                later.append(letter)
            elif epoch == round_.epoch and letter.kind == "mean+":
                if lengths:
                    round_.kinds = kinds = kinds_of(lengths, letter.text)
                    spans = kinds.segments(round_.members.index(self._replica), len(round_.members))
                    round_.contributions[sender] = self._decoded(letter, kinds, spans)
                else:
                    round_.contributions[sender] = None
            elif epoch == round_.epoch:
                round_.count = count
                kinds = kinds_of(lengths, letter.text)
                spans = kinds.segments(round_.members.index(sender), len(round_.members))
                round_.means[sender] = self._decoded(letter, kinds, spans)
        if later:
            self._early[round_.number] = later

    def _decoded(self, letter: Letter, kinds: Kinds, spans: list[tuple[int, int]]) -> Parts:
        if self._codec is None:
            return list(letter.tensors)
        return [
            decoded(message, self._codec, end - begin, wide(dtype))
            for message, (begin, end), dtype in zip(letter.tensors, spans, kinds.dtypes, strict=True)
        ]

    def _add_up(self, round_: OpenRound, count: int) -> None:
        """Compute the mean of this replica's segment for all replicas."""
        kinds, members = round_.kinds, round_.members
        own = members.index(self._replica)
        spans, means, messages = kinds.segments(own, len(members)), [], []
        for place, dtype in enumerate(kinds.dtypes):
            total = None
            for member in members:
                if (parts := round_.contributions[member]) is not None:
                    term = parts[place].to(wide(dtype))
                    total = term.clone() if total is None else total.add_(term)
            assert total is not None
            mean = total.div_(count)
            if self._codec is None:
                mean = message = mean.to(dtype)
            elif len(members) == 1:
                message = mean
            else:
                draw = draw_of(round_.number, self._replica, -1, place)
                message, known = encoded(mean, self._codec, draw, select=False)
                if round_.epoch in round_.left_out:
                    begin, end = spans[place]
                    round_.left_out[round_.epoch][place][begin:end] += count * (mean - known)
                mean = known
            means.append(mean)
            messages.append(message)
        round_.means[self._replica], round_.count = means, count
        round_.contributions = dict.fromkeys(members)
        numbers = (round_.number, round_.epoch, count, *kinds.lengths)
        for member in members:
            if member != self._replica:
                self._mailbox.send(replica_name(member), "mean=", numbers, messages, kinds.text)

    # --- the end of a round ------------------------------------------------------------------------------------------

    def _finish(self, number: int, result: RoundMean) -> None:
        round_ = self._rounds.pop(number, None)
        self._results[number] = result
        self._over.add(number)
        if round_ is not None and self._codec is not None and self._codec.feedback and result.epoch in round_.left_out:
            self._residuals[round_.slot] = round_.left_out[result.epoch]
        for letter in self._early.pop(number, []):
            if letter.kind == "mean+":
                self._hand_out(number, letter)
        self._say_what_is_needed()

    def _hand_out(self, number: int, letter: Letter) -> None:
        """Answer a contribution to a later attempt with the mean that this replica has."""
        result = self._results.get(number)
        if result is not None and letter.numbers[1] > result.epoch:
            numbers = (number, result.epoch, result.num_contributors, *result.members)
            self._mailbox.send(letter.sender, "mean!", numbers, result.tensors)

    def _say_what_is_needed(self) -> None:
        if not self._joins:
            needed = min([*self._rounds, *(each for each in self._unclaimed if each not in self._over), self._next])
            for member in self._members:
                if member != self._replica:
                    self._mailbox.send(replica_name(member), "mean.", (needed,))
        self._forget()

    def _forget(self) -> None:
        """Forget the means that no replica can still ask for."""
        needed = min((self._needs.get(member, 0) for member in self._members if member != self._replica), default=2**62)
        for number in [each for each in self._results if each < needed and each not in self._unclaimed]:
            if not self._joins and number < self._next:
                del self._results[number]
        self._floor = max(self._floor, min([needed, self._next, *self._rounds, *self._unclaimed]))
        self._over = {number for number in self._over if number >= self._floor}

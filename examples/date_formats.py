"""Sequence to sequence with attention: dates as people write them become 2026-11-26, character by character.

    python examples/date_formats.py
    torchrun --nproc-per-node 2 examples/date_formats.py

A recurrent encoder reads the characters, and a recurrent decoder writes others. Before each, attention chooses which
states of the encoder matter (Bahdanau, Cho, Bengio, "Neural Machine Translation by Jointly Learning to Align and
Translate", 2015). The loops over characters are ordinary Python; capture unrolls them. Batches are split over ranks.
Afterwards the plain model, with the trained weights, writes dates that it has not seen, without being shown the answer.
"""

import datetime
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from application import Outcome, Training, parallelized, run
from torch import Tensor, nn

import meshwright as mw

FORMATS = ("%d %b %Y", "%b %d, %Y", "%d.%m.%Y", "%m/%d/%y", "%Y %b %d")
CHARACTERS = ["", *"0123456789-,./ ", *"abcdefghijklmnopqrstuvwxyz"]
"""The first is the start of an answer, and fills questions that are shorter than the longest."""
QUESTION, ANSWER = 12, 10
FIRST_DAY, DAYS = datetime.date(1970, 1, 1).toordinal(), 80 * 365


class Translator(nn.Module):
    """Encoder, additive attention and decoder: questions [b, 12], answers so far [b, 10] to logits [b, 10, c]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), width)
        self.encoder, self.decoder = nn.GRUCell(width, width), nn.GRUCell(2 * width, width)
        self.key, self.query, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.head = nn.Linear(2 * width, len(CHARACTERS))

    def forward(self, question: Tensor, answer: Tensor) -> Tensor:
        state = self.embedding(question[:, 0]) * 0
        states = []
        for character in self.embedding(question).unbind(1):
            state = self.encoder(character, state)
            states.append(state)
        memory = torch.stack(states, dim=1)
        keys, logits = self.key(memory), []
        for character in self.embedding(answer).unbind(1):
            scores = self.score(torch.tanh(keys + self.query(state).unsqueeze(1)))
            context = (scores.softmax(dim=1) * memory).sum(dim=1)
            state = self.decoder(torch.cat([character, context], dim=-1), state)
            logits.append(self.head(torch.cat([state, context], dim=-1)))
        return torch.stack(logits, dim=1)


def translation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the characters of the answers, each after the right characters before it."""
    logits = model(batch["question"], batch["given"])
    return F.cross_entropy(logits.flatten(0, 1), batch["answer"].flatten())


def dates(count: int, held_out: bool, draw: random.Random) -> dict[str, Tensor]:
    """Random dates. Every seventh day is held out; ``given`` is the answer that is moved by one character."""
    days = [day for day in draw.sample(range(DAYS), 8 * count) if (day % 7 == 0) is held_out][:count]
    questions, answers = [], []
    for day in days:
        date = datetime.date.fromordinal(FIRST_DAY + day)
        questions.append(_numbers(date.strftime(draw.choice(FORMATS)).lower()[:QUESTION], QUESTION))
        answers.append(_numbers(date.isoformat(), ANSWER))
    answer = torch.tensor(answers)
    return {"question": torch.tensor(questions), "given": F.pad(answer[:, :-1], (1, 0)), "answer": answer}


def _numbers(text: str, length: int) -> list[int]:
    return [CHARACTERS.index(character) for character in text] + [0] * (length - len(text))


def training(ranks: int) -> Training:
    """The trainer for this number of ranks, and batches of 128 dates without end."""

    def batches() -> Iterator[dict[str, Tensor]]:
        draw = random.Random(0)
        while True:
            yield dates(128, False, draw)

    torch.manual_seed(0)
    return parallelized(Translator(), translation_loss, batches(), mw.Layout(dp=ranks), lr=5e-3)


def written(model: nn.Module, question: Tensor) -> Tensor:
    """The answers [b, 10] that a model writes, one most likely character after the other."""
    answer = torch.zeros(len(question), 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(ANSWER):
            logits = model(question, answer)
            answer = torch.cat([answer, logits[:, -1:].argmax(dim=-1)], dim=1)
    return answer[:, 1:]


def main(ranks: int, steps: int = 300, goal: float = 90.0) -> list[Outcome]:
    """Train, and count the held-out dates that are written without an error."""
    training_run = training(ranks)
    training_run.run(steps)
    plain, held_out = Translator(), dates(500, True, random.Random(1))

    def right() -> float:
        return 100 * float((written(plain, held_out["question"]) == held_out["answer"]).all(dim=1).float().mean())

    untrained = right()
    plain.load_state_dict(training_run.trainer.full_state_dict(all_ranks=True))
    return [Outcome("held-out dates right", right(), "untrained", untrained, goal)]


if __name__ == "__main__":
    run(main, __doc__)

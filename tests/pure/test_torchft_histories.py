"""Our DiLoCo beside torchft's: the exact histories of its regression test, which it writes and compares itself.

Both fragments of torchft's model have one parameter, which begins at 1. The inner learning rate is 1, the outer 2, and
every gradient is 2. torchft sends a fragment's change ``delay`` steps before its turn, and applies it in its turn; ours
sends it in its turn, and applies it ``delay`` steps later. So our replicas first make ``delay`` steps without
gradients: then as many steps lie between equal events.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm.mailbox import Mailbox, replica_name
from meshwright.consistency.rules import exchange_of
from meshwright.ir.consistency import consistency_of
from tests.virtual_mailbox import VirtualNetwork

GOLDEN = Path(__file__).parents[1] / "golden" / "torchft_diloco.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
EVERY, FRAGMENTS, OUTER, GRADIENT = 6, 2, 2.0, 2.0


def histories(case: dict[str, Any], seed: int, kills: dict[int, str] | None = None) -> dict[str, list[list[float]]]:
    """What our replicas' parameters are before each of their steps."""
    delay, steps = case["delay"], len(case["history"][0]) - 1
    rule = consistency_of(
        f"diloco({EVERY}, lr={OUTER}, momentum=0, fragments={FRAGMENTS}, delay={delay}, merge={case['alpha']})"
    )

    def body(replica: int) -> Any:
        def run(box: Mailbox) -> list[list[float]]:
            exchange, parameters = exchange_of(rule, box, replica, 2), [torch.ones(FRAGMENTS, dtype=torch.float64)]
            history = []
            for step in range(delay + steps):
                if step >= delay:
                    history.append(parameters[0].tolist())
                exchange.begin(parameters)
                gradients = [torch.full_like(parameters[0], GRADIENT if step >= delay else 0.0)]
                for each in exchange.updates(gradients):
                    parameters[0].sub_(each[0])
                exchange.end(parameters)
            history.append(parameters[0].tolist())
            exchange.leave()
            return history

        return run

    network = VirtualNetwork(random.Random(seed).randrange, kills)
    return network.run({replica_name(replica): body(replica) for replica in range(2)})


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: f"delay {case['delay']}, alpha {case['alpha']}")
def test_replicas_have_the_history_of_torchft(case: dict[str, Any]) -> None:
    outcomes = histories(case, seed=0)
    assert [outcomes[replica_name(replica)] for replica in range(2)] == case["history"]


@pytest.mark.parametrize("turn", [5, 40, 90])
def test_a_survivor_has_the_history_of_torchft(turn: int) -> None:
    """Whenever the other replica dies: all replicas have equal gradients, so the mean of fewer is the same."""
    case = CASES[-1]
    assert "recovery" in case["test"]
    outcomes = histories(case, seed=1, kills={turn: replica_name(1)})
    assert outcomes[replica_name(0)] == case["history"][0]
    assert replica_name(1) not in outcomes

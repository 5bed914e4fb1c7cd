"""What a consistency rule did in a run, as text."""

from __future__ import annotations

from meshwright.ir.replica_use import ReplicaUse


def test_prediction_and_measurement_stand_side_by_side() -> None:
    use = ReplicaUse(
        rule="server(ssp=3)", num_replicas=4, num_steps=20, waited_s=0.004, sent_bytes=3 * 2**20,
        staleness={0: 10, 1: 5, 3: 5}, predicted_waited_s=0.002, predicted_bytes=2**21, predicted_staleness={0: 20},
    )  # fmt: skip
    title, heads, waited, sent, ahead = use.lines()
    assert title.strip() == "4 replicas, server(ssp=3), 20 steps"
    assert heads.split() == ["replicas", "predicted", "measured"]
    assert waited.split()[-4:] == ["2", "ms", "4", "ms"]
    assert sent.split()[-4:] == ["2", "MiB", "3", "MiB"]
    assert "0.0 (at most 0)" in ahead
    assert "1.0 (at most 3)" in ahead

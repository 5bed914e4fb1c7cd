"""The device: peaks by dtype, and efficiency between measured points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ClusterError, refuse
from meshwright.ir.device import Device, device_problems


def device(**changes: object) -> Device:
    fields: dict[str, object] = {
        "name": "chip",
        "kind": "accelerator",
        "memory_bytes": 16_000_000_000,
        "memory_bandwidth_bytes_per_s": 1e12,
        "peak_flops_per_s": {"float32": 1e13, "bfloat16": 1e14},
    }
    return Device(**(fields | changes))  # type: ignore[arg-type]


CURVED = device(efficiency={"matmul": ((1e6, 0.1), (1e8, 0.5), (1e10, 0.8))})


def test_a_peak_is_by_dtype_and_a_missing_one_says_what_there_is() -> None:
    assert device().peak("bfloat16") == 1e14
    with pytest.raises(ClusterError) as caught:
        device().peak("float8")
    assert str(caught.value) == (
        "device chip: there is no peak for 'float8'\n"
        "  -> use float32 or bfloat16, or add 'float8' to the device's peak_flops_per_s"
    )


def test_efficiency_is_linear_in_the_logarithm_of_the_size() -> None:
    assert CURVED.efficiency_at("matmul", 1e6) == 0.1
    assert CURVED.efficiency_at("matmul", 1e7) == pytest.approx(0.3)
    assert CURVED.efficiency_at("matmul", 1e9) == pytest.approx(0.65)


def test_efficiency_is_constant_beyond_the_curve_and_one_without_it() -> None:
    assert CURVED.efficiency_at("matmul", 0.0) == 0.1
    assert CURVED.efficiency_at("matmul", 1e15) == 0.8
    assert CURVED.efficiency_at("softmax", 1e15) == 1.0


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_rising_curve_rises_everywhere(size: float, other_size: float) -> None:
    low, high = sorted((size, other_size))
    assert CURVED.efficiency_at("matmul", low) <= CURVED.efficiency_at("matmul", high) + 1e-12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 80}, "d.memory_bytes: 80 is not between 1e+06 and 1e+16\n  -> give bytes: 80 GB are 80e9"),
        (
            {"memory_bandwidth_bytes_per_s": 2039.0},
            (
                "d.memory_bandwidth_bytes_per_s: 2039 is not between 1e+06 and 1e+16\n"
                "  -> give bytes per second: 2 TB/s are 2e12"
            ),
        ),
        (
            {"peak_flops_per_s": {"bfloat16": 312.0}},
            (
                "d.peak_flops_per_s.bfloat16: 312 is not between 1e+06 and 1e+19\n"
                "  -> give FLOP per second: 312 TFLOP/s are 312e12"
            ),
        ),
        (
            {"peak_flops_per_s": {"float32": float("nan")}},
            (
                "d.peak_flops_per_s.float32: nan is not between 1e+06 and 1e+19\n"
                "  -> give FLOP per second: 312 TFLOP/s are 312e12"
            ),
        ),
        (
            {"peak_flops_per_s": {"float_32": 1e13}},
            (
                "d.peak_flops_per_s: unknown dtype 'float_32'\n  -> did you mean `float32` or `tfloat32` or `float8`? "
                "known dtypes: float64, float32, tfloat32, bfloat16, float16, float8, int8"
            ),
        ),
        (
            {"efficiency": {"matmul": ((1e8, 0.5), (1e6, 0.6))}},
            (
                "d.efficiency.matmul: [[100000000.0, 0.5], [1000000.0, 0.6]] is not an efficiency curve\n"
                "  -> give [size, fraction] points: rising sizes above 0, fractions above 0 and up to 1"
            ),
        ),
    ],
)
def test_an_impossible_device_is_refused_by_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        refuse(ClusterError, device_problems(device(**changes), "d"))
    assert str(caught.value) == message


@pytest.mark.parametrize("curve", [(), ((0.0, 0.5),), ((1e6, 0.0),), ((1e6, 1.01),), ((1e6, 0.5), (1e6, 0.5))])
def test_what_is_no_curve_is_refused(curve: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ClusterError, match="is not an efficiency curve"):
        refuse(ClusterError, device_problems(device(efficiency={"matmul": curve}), "d"))

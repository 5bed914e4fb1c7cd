"""Numbers in the text format of Prometheus, which scrapers and node_exporter's text files read."""

import math
import re
from collections.abc import Mapping

PREFIX = "meshwright"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """A gauge for each value: ``held_out/loss`` becomes ``meshwright_held_out_loss``. All have the same labels."""
    names = {f"{PREFIX}_{re.sub('[^a-zA-Z0-9]+', '_', name).strip('_')}": value for name, value in values.items()}
    label_text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for name, value in names.items():
        lines += [
            f"# TYPE {name} gauge",
            f"{name}{{{label_text}}} {number(value)}" if label_text else f"{name} {number(value)}",
        ]
    return "".join(f"{line}\n" for line in lines)


def number(value: float) -> str:
    """A number as Prometheus writes it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if not float(value).is_integer() else str(int(value))


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

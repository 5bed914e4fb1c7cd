"""The use of codecs in a run: measurements beside predictions."""

from collections.abc import Sequence

import msgspec

from meshwright.ir.units import aligned, seconds, size


class CodecUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The use of a codec for one bucket in a step, on rank 0: the bytes of the bucket, the bytes that the rank sent,
    and the seconds of encoding and decoding. ``residual_share`` is the norm of the residual, as a fraction of the norm
    of the gradients (0 without error feedback). A prediction of 0 means unknown."""

    label: str
    axis: str
    codec: str
    algorithm: str
    num_bytes: int
    predicted_bytes: int = 0
    sent_bytes: int = 0
    predicted_coding_s: float = 0.0
    coding_s: float = 0.0
    residual_share: float = 0.0


def codec_lines(codecs: Sequence[CodecUse]) -> list[str]:
    """Codecs as text: for each bucket, predicted and measured bytes and seconds."""
    if not codecs:
        return []
    heads = ("codec", "of", "bytes sent (predicted)", "coding (predicted)", "residual")
    return aligned([heads, *map(_codec_texts, codecs)])


def _codec_texts(use: "CodecUse") -> tuple[str, ...]:
    foretold = f" ({size(use.predicted_bytes)})" if use.predicted_bytes else ""
    foretold_s = f" ({seconds(use.predicted_coding_s)})" if use.predicted_coding_s else ""
    residual = f"{use.residual_share:.0%} of the gradients" if use.residual_share else "-"
    what = f"{use.label} over {use.axis}, {size(use.num_bytes)}"
    return (
        f"{use.codec} ({use.algorithm})",
        what,
        size(use.sent_bytes) + foretold,
        seconds(use.coding_s) + foretold_s,
        residual,
    )

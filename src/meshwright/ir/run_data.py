"""The table [data] of a run file, with one struct for each kind of data."""

from typing import Literal

from meshwright.ir.run_model import Count, Fraction, Positive, Section

STANDARD_LIBRARY = "standard-library"


class _Data(Section, frozen=True, kw_only=True, tag_field="kind"):
    batch_size: Positive = 16
    """Samples in a global batch, over all ranks."""
    held_out: Fraction = 0.05
    """The fraction of the data that is kept out of training, for evaluation; 0: none."""


class TextData(_Data, frozen=True, kw_only=True, tag="text"):
    """Text, cut into windows of bytes. Every byte is a token. The end of the text is held out for evaluation."""

    paths: str | tuple[str, ...] = STANDARD_LIBRARY
    """Files or globs, joined in order; or ``standard-library``, which is Python's own documentation and sources."""
    sequence_length: Positive = 256
    """Tokens in a window."""
    max_bytes: Count = 0
    """The largest number of bytes to use; 0: all bytes, or 8,000,000 of ``standard-library``."""


class DigitsData(_Data, frozen=True, kw_only=True, tag="digits"):
    """scikit-learn's handwritten digits: ``image`` [n, 1, 8, 8] from 0 to 1, ``label`` [n] (``meshwright[demo]``)."""


class TensorsData(_Data, frozen=True, kw_only=True, tag="tensors"):
    """Named tensors with one row for each sample. The loss reads the tensors by their names."""

    path: str
    """A ``.npz``, ``.safetensors`` or ``.pt`` file (a dict of tensors)."""


class RandomData(_Data, frozen=True, kw_only=True, tag="random"):
    """Random tensors ``inputs`` and ``label``, to plan, verify and time a step. A model cannot learn from them."""

    shape: tuple[Positive, ...] = (64,)
    """Shape of one sample."""
    classes: Positive = 10
    """Number of classes."""
    samples: Positive = 1024
    """Number of samples."""


class _StoredData(_Data, frozen=True, kw_only=True):
    memory_bytes: Positive = 2**30
    """The memory of each rank for samples that are kept or fetched ahead."""
    cache_directory: str = ""
    """A folder on the local disk for samples that do not fit in memory; empty: none are kept on disk."""
    skip_bad: bool = False
    """Go on without samples that cannot be read, and count them, instead of stopping."""


class ImagesData(_StoredData, frozen=True, kw_only=True, tag="images"):
    """A folder with a folder of image files for each class, which need not fit in memory: ``image`` [n, 3, size, size]
    from 0 to 1, ``label`` [n]. Images are fetched before a step asks for them. Needs
    ``meshwright[demo]``."""

    path: str
    """The folder."""
    size: Count = 0
    """The height and width to which images are scaled; 0: all images have the same size already."""


class ShardsData(_StoredData, frozen=True, kw_only=True, tag="shards"):
    """Tar files in the manner of WebDataset, which need not fit in memory: the files of a sample share a name, and
    their suffixes name the tensors. Samples are fetched before a step asks for them."""

    paths: str | tuple[str, ...]
    """Files or globs."""


class TokensData(_StoredData, frozen=True, kw_only=True, tag="tokens"):
    """A file of tokens, cut into windows, which need not fit in memory. Windows are fetched before a step asks for
    them."""

    path: str
    """A ``.npy`` file of a vector of integers, or a file of integers of ``dtype`` alone."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """The type of a token in a file that is not ``.npy``."""
    sequence_length: Positive = 256
    """Tokens in a window."""


Stored = ImagesData | ShardsData | TokensData
"""The data that need not fit in memory."""
Data = TextData | DigitsData | TensorsData | RandomData | ImagesData | ShardsData | TokensData

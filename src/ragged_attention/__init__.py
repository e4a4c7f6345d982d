"""Attention kernels for ragged batches and QSA selections, for tensors of any framework.

Two operations, on NVIDIA GPUs and on the CPU, chosen by where the tensors are:

* :func:`ragged_flash_attention`: self-attention over sequences packed one after another, without a KV cache.
* :func:`qsa_sparse_attention`: grouped-query attention over the tokens that a QSA selection names, in a paged KV cache.

:func:`supports` says what runs where and why. Importing the package imports no framework and does not touch CUDA.
"""

from . import reference
from ._C import CudaError
from ._operations import qsa_sparse_attention, ragged_flash_attention
from ._support import Support, build_info, num_threads, set_num_threads, supports

__version__ = build_info()["version"]

__all__ = [
    "CudaError",
    "Support",
    "__version__",
    "build_info",
    "num_threads",
    "qsa_sparse_attention",
    "ragged_flash_attention",
    "reference",
    "set_num_threads",
    "supports",
]

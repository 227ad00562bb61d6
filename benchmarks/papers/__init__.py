"""Rows of the `kernels` suite that public models and papers wrote: nobody tuned a kernel for them.

Each row names its source. Most move 1 to 32 MiB, where caches decide; the least moves 64 KiB, the largest 256 MiB.
"""

from benchmarks.kernel_rows import Row
from benchmarks.papers import attention, images, layers, losses, training

SIZE = "papers"
PAPERS: tuple[Row, ...] = (*layers.ROWS, *attention.ROWS, *losses.ROWS, *training.ROWS, *images.ROWS)

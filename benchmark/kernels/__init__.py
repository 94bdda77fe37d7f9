"""What exact checkpoints cost beside the prefill that they are taken from, and beside SGLang's own tracking.

First the kernels' tests run (`checks.py`); with one red there is no figure. Then, for the layer shapes of published
models (`shapes.py`), on a CUDA device (`cuda.py`):

    prefill      SGLang's convolution and chunk kernels of one layer, by its own Triton functions (`upstream.py`)
    checkpoint   our launches for some exact positions of every sequence: states and windows of the convolution
    aligned      what SGLang does to keep *one* chunk-aligned position of every sequence, windows included

They take turns, each after a flush of the L2 cache, on the operands that SGLang's kernels really leave. A launch cannot
be faster than its bytes (`traffic.py`) at the bandwidth of a large copy, which is measured in the same run: the floor.

On a CPU (`cpu.py`): tokens a second of one core by the operators' references, on the same shapes with few heads.

    python benchmark/kernels [--models NAME,...] [--tokens N,N,...] [--checkpoints N] [--repetitions N] [--json FILE]
"""

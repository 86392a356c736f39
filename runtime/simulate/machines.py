"""GPUs by name: what their data sheets promise. Knows no model.

Peaks are dense, without structured sparsity. Sources: NVIDIA's data sheets of H100, H200, DGX B200 and GB300 NVL72,
whose figures with sparsity are halved here; the network is a port per GPU of 400 Gb/s (Hopper, B200) or 800 (GB300).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """bf16_flops, fp8_flops: multiply-adds count as two, per second. memory_bytes: of HBM. memory_rate: bytes per
    second. link_rate: bytes per second that a GPU sends within its domain of `domain` GPUs; network_rate: beyond it.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_rate: float
    link_rate: float
    domain: int
    network_rate: float


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # H100 SXM: 1979/3958 TFLOPS with sparsity, 80 GB HBM3, NVLink 900 GB/s both ways together, 8 in a server.
        Gpu(
            name="h100",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=80e9,
            memory_rate=3.35e12,
            link_rate=450e9,
            domain=8,
            network_rate=50e9,
        ),
        # H200 SXM: an H100 with 141 GB HBM3e.
        Gpu(
            name="h200",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=141e9,
            memory_rate=4.8e12,
            link_rate=450e9,
            domain=8,
            network_rate=50e9,
        ),
        # DGX B200, of 8: 72 PFLOPS FP8 with sparsity and 64 TB/s in all; NVLink 1.8 TB/s both ways together.
        Gpu(
            name="b200",
            bf16_flops=2250e12,
            fp8_flops=4500e12,
            memory_bytes=180e9,
            memory_rate=8.0e12,
            link_rate=900e9,
            domain=8,
            network_rate=50e9,
        ),
        # GB300 NVL72: 720 PFLOPS FP8 with sparsity, 576 TB/s and 130 TB/s of NVLink over 72 GPUs in one domain.
        Gpu(
            name="gb300",
            bf16_flops=2500e12,
            fp8_flops=5000e12,
            memory_bytes=279e9,
            memory_rate=8.0e12,
            link_rate=900e9,
            domain=72,
            network_rate=100e9,
        ),
    )
}

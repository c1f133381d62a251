"""GPUs that are known: by what their drivers call them, and what is said of those that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pat_vllm.cli.advise import AdviseOptions, advice_for
from pat_vllm.modelled.gpus import GPUS, Device, MiB, gpu_named, known_gpu

H100 = GPUS["H100"].device


def named(name: str, mib: int, capability: str, **more: object) -> str | None:
    """The key in `GPUS` by what a driver says."""
    gpu = known_gpu(replace(Device(mib * MiB, capability, name), **more))  # type: ignore[arg-type]
    keys = [key for key, known in GPUS.items() if gpu and gpu.source == known.source]
    return keys[0] if keys else None


@pytest.mark.parametrize(
    ("name", "mib", "capability", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", 81100, "8.0", "A100"),
        ("NVIDIA A100-SXM4-40GB", 40300, "8.0", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", 81100, "8.0", "A100"),
        ("NVIDIA A100-PCIE-40GB", 40300, "8.0", "A100 40GB"),
        ("NVIDIA A800-SXM4-80GB", 81100, "8.0", "A800"),
        ("NVIDIA A10", 22700, "8.6", "A10"),
        ("NVIDIA H100 80GB HBM3", 81080, "9.0", "H100"),
        ("NVIDIA H100 PCIe", 81080, "9.0", "H100 PCIe"),
        ("NVIDIA H100 NVL", 95300, "9.0", "H100 NVL"),
        ("NVIDIA H20", 97300, "9.0", "H20"),
        ("NVIDIA GH200 480GB", 97300, "9.0", "GH200"),
        ("NVIDIA B200", 182642, "10.0", "B200"),
        ("NVIDIA B300 SXM6 AC", 274500, "10.3", "B300"),
        ("NVIDIA L40", 45500, "8.9", "L40"),
        ("NVIDIA L40S", 45500, "8.9", "L40S"),
        ("NVIDIA GeForce RTX 4090", 24200, "8.9", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", 48500, "8.9", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97250, "12.0", "RTX PRO 6000"),
        ("AMD_Instinct_MI300X", 196592, "9.4", "MI300X"),
        ("NVIDIA H200", 81080, "9.0", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 81080, "9.0", None),
        ("NVIDIA H100 80GB HBM3", 81080 // 7, "9.0", None),
        ("NVIDIA A40", 45500, "8.9", None),
        ("", 81080, "9.0", None),
    ],
)
def test_a_device_is_known_by_name_and_memory(
    name: str, mib: int, capability: str, key: str | None
) -> None:
    assert named(name, mib, capability) == key


def test_gpus_from_ada_on_multiply_twice_as_fast_in_8_bits() -> None:
    """By NVIDIA's and AMD's datasheets, dense: H100 SXM 1979 TFLOPS, L4 242, RTX 4090 330, B200
    4500, MI300X 2615. Older ones multiply in 16 bits."""
    peaks = {name: GPUS[name].fp8_flops / 1e12 for name in GPUS}
    for name, expected in {
        "H100": 1979, "L4": 242, "RTX 4090": 330, "B200": 4500, "MI300X": 2615,
        "A100": 312, "A40": 150, "RTX 3090": 71,
    }.items():  # fmt: skip
        assert peaks[name] == pytest.approx(expected, rel=0.003), name


def test_every_known_gpu_is_one_that_advise_takes() -> None:
    for name, gpu in GPUS.items():
        assert known_gpu(gpu.device) == gpu and gpu_named(name.lower().replace(" ", "-")) == name
        assert 100 < gpu.flops / gpu.bandwidth < 500 or name in ("H20", "RTX 3090")
        advice, _ = advice_for(AdviseOptions("qwen3-8b", name, 8, responses=16, max_tokens=64))
        assert f" on 8 x {name} (" in advice.engines.title
    with pytest.raises(ValueError, match=r"gpu 'V100' is unknown; allowed are A10, .*, MI325X"):
        gpu_named("V100")


def test_a_gpu_has_the_link_that_its_driver_sees() -> None:
    sxm, pcie = (known_gpu(replace(H100, link=link)) for link in (None, "pcie"))  # type: ignore[arg-type]
    assert sxm is not None and (sxm.link, sxm.link_bandwidth) == ("nvlink", 450e9)
    assert pcie is not None and (pcie.link, pcie.link_bandwidth) == ("pcie", 50e9)
    a40 = known_gpu(replace(GPUS["A40"].device, link="nvlink"))
    assert a40 is not None and (a40.link, a40.link_bandwidth) == ("nvlink", 56e9)
    a100 = known_gpu(replace(GPUS["A100"].device, link="pcie"))
    assert a100 is not None and a100.link_bandwidth == 25e9


def test_of_an_unknown_gpu_the_driver_knows_the_bandwidth() -> None:
    other = Device(16000 * MiB, "8.9", "NVIDIA GeForce RTX 4080", "pcie")
    assert known_gpu(other) is None
    gpu = known_gpu(replace(other, bandwidth=717e9))
    assert gpu is not None and gpu.bandwidth == 717e9 and gpu.device.memory == other.memory
    ratios = sorted(g.flops / g.bandwidth for g in GPUS.values() if g.device.capability == "8.9")
    assert ratios[0] < gpu.flops / gpu.bandwidth < ratios[-1]
    assert "bandwidth by the driver" in gpu.source and gpu.link == "pcie"
    assert known_gpu(replace(other, bandwidth=717e9, capability="7.5")) is None
    assert known_gpu(replace(other, bandwidth=717e9, name="NVIDIA L4 MIG 1g.6gb")) is None

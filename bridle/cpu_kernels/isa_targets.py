"""The instruction sets that kernels are built for, best first, with the processor features that each set needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES, OBJECTS, MANIFEST = FOLDER / "sources", FOLDER / "objects", FOLDER / "manifest.json"


@dataclass(frozen=True, slots=True)
class IsaTarget:
    """A shared object for processors with the architecture `machine` and all of `features`, compiled with `flags`."""

    name: str
    machine: str
    features: frozenset[str]
    flags: tuple[str, ...]

    @property
    def path(self) -> Path:
        return OBJECTS / f"{self.name}.so"


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"})
_DOTPROD = frozenset({"asimd", "asimddp"})
_X86, _ARM = "x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17"
_BASE = "-mcpu=x86_64_v2-slow_unaligned_mem_32+avx2+fma+f16c"

TARGETS = (
    IsaTarget(
        "avx512-vnni", "x86_64", _AVX2 | _AVX512, ("-target", _X86, f"{_BASE}+avx512f+avx512bw+avx512vl+avx512vnni")
    ),
    IsaTarget("avx-vnni", "x86_64", _AVX2 | {"avx_vnni"}, ("-target", _X86, f"{_BASE}+avxvnni")),
    IsaTarget("avx2", "x86_64", _AVX2, ("-target", _X86, _BASE)),
    IsaTarget("neon-i8mm", "aarch64", _DOTPROD | {"i8mm"}, ("-target", _ARM, "-mcpu=generic+v8a+dotprod+i8mm")),
    IsaTarget("neon-dotprod", "aarch64", _DOTPROD, ("-target", _ARM, "-mcpu=generic+v8a+dotprod")),
)

"""Tests of the CPU features that are read from a processor's description."""

from __future__ import annotations

from bridle.cpu_kernels.features import TOLD, cpu_features, describe_cpu, features_in


def test_only_what_all_processors_have_counts() -> None:
    text = "processor: 0\nflags\t\t: fpu avx2 fma avx512_vnni\n\nprocessor: 1\nflags\t\t: fpu avx2 fma\n"
    assert features_in(text) == {"avx2", "fma"}
    assert features_in("Features\t: fp asimd asimddp i8mm\n") == {"asimd", "asimddp", "i8mm"}
    assert features_in("nothing\n") == frozenset()


def test_description_names_this_processor() -> None:
    told = describe_cpu()
    assert told["cpu"]
    assert set(told["cpu_features"]) == cpu_features() <= set(TOLD)

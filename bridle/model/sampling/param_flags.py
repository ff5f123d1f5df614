"""Flags for the operations that sampling parameters require. Flags are derived once per request rather than at each
token."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bridle.sampling import SamplingParams

_CACHED = 4096


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """The sampling operations that a row needs."""

    is_greedy: bool
    looks_back: bool  # earlier tokens change the row
    is_cut: bool  # one of the usual filters applies
    is_bent: bool  # a rarer filter applies, or the temperature depends on the row
    is_as_is: bool  # the row's unchanged probabilities are sampled, so their total is the row's


def kind_of(sampling: SamplingParams) -> SamplingFlags:
    """Return the operations that rows with these sampling parameters need."""
    is_cut = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    is_bent = sampling.typical_p < 1.0 or sampling.top_n_sigma > 0.0 or sampling.xtc_probability > 0.0
    is_bent = is_bent or sampling.dynatemp_range > 0.0 or sampling.has_mirostat
    looks_back = sampling.has_penalties or sampling.has_dry or sampling.watermark is not None
    is_as_is = sampling.temperature == 1.0 and not (is_cut or is_bent)
    return SamplingFlags(sampling.is_greedy, looks_back, is_cut, is_bent, is_as_is)


class Kinds:
    """A cache of flags, keyed by the sampling parameters object, which is the same at every step of a request."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[SamplingParams, SamplingFlags]] = OrderedDict()

    def of(self, sampling: SamplingParams) -> SamplingFlags:
        """Return the flags `kind_of(sampling)`, computed once per request."""
        known = self._known.get(id(sampling))
        if known is None:
            known = self._known[id(sampling)] = sampling, kind_of(sampling)  # the object is held: its id stays its own
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return known[1]

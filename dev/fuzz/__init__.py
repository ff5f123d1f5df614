"""Feeds damaged input to every parser of untrusted bytes. Each must accept or refuse it, within time and memory.

    python -m dev.fuzz                        # every parser, 2,000 inputs each
    python -m dev.fuzz gguf lmtp -n 100000    # two of them
    python -m dev.fuzz gguf --seed 812 -n 1   # one input again

An input follows from the parser's examples and its number alone, so a finding can be repeated.
"""

"""Feeds damaged input to every parser of untrusted bytes. Each parser must accept or refuse the input, within limits of
time and memory.

    python -m dev.fuzz                        # every parser, 2,000 inputs each
    python -m dev.fuzz gguf lmtp -n 100000    # two of them
    python -m dev.fuzz gguf --seed 812 -n 1   # one input again

An input depends only on the parser's example inputs and the seed, so a finding can be repeated.
"""

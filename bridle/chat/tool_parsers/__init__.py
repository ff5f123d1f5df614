"""Tool calls: how models write them, a file for each way, and what a request may ask for.

A format reads calls out of growing text and says, as a grammar, what calls look like. No I/O.
"""

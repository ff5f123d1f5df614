"""Tool calls: how models write them, and the tool fields of a request. To add a parser, add its format to `presets.py`.

A format reads calls out of growing text, and has a grammar of calls. No I/O.
"""

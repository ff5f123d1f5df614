"""Tool call formats of models, and the tool fields of a request. To add a parser, add its format to `presets.py`.

A format parses calls in growing text, and makes a grammar of calls. This package does no I/O.
"""

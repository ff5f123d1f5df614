"""Steering a language model from a script: `import pyaici.server as aici`.

The names and their meaning are those of AICI's Python controller, so its scripts run as they are; what goes beyond
them says so where it stands.
"""

"""Measures the recipes of `examples/recipes`. Each module has one recipe's cases and judges answers to them."""

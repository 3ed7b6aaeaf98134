"""Operators on tensors, each with a reference in torch that it is tested against. Knows neither models nor requests."""

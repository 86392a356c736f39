"""Arithmetic in two numerics modes; see base.py."""

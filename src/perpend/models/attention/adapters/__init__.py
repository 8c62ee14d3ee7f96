"""Families with an attention of their own, one file each; a new file here is found by itself.

An adapter is a module with `matches(class) -> bool` and `tapped(taps)`, a context manager that runs each
module's hooks between its attention and its output projection.
"""

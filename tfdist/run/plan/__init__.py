"""Predictions of the memory and traffic of a run for each option to distribute it.

The predictions do not need the devices, so you can make them before you have any.
"""

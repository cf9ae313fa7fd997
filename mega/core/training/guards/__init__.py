"""Checks of a training run in progress: NaN, equal replicas, slow ranks. ../judge.py decides how the run reacts.

finite      checks that all numbers are finite, and finds the rank and tensor of the first number that is not finite
audit       checks that all replicas of a tensor are bitwise identical
stragglers  finds the rank for which the other ranks wait
inject      fault injection, to test all these checks
"""

"""Checks of a running training: NaN, equal replicas, slow ranks. ../judge.py decides how the run reacts.

finite      checks that all numbers are finite, and finds the rank and tensor of the first that is not
audit       checks that ranks with the same tensor hold the same bits
stragglers  finds the rank that the others wait for
inject      fault injection, to test all of these
"""

"""Checks of a running training: NaN, equal copies, slow ranks. What follows from them is decided in ../judge.py.

finite      is every number finite, and if not, whose was the first that was not?
audit       do ranks that hold the same tensor still hold the same bits?
stragglers  which rank the others wait for
inject      damage on purpose, by which all of this is proven
"""

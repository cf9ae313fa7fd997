"""Whether the numbers of a run can be trusted. Nothing here changes them.

finite   is every number that a checkpoint would keep finite?
audit    do ranks that hold the same tensor still hold the same bits?
"""

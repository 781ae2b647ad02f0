"""Times measured on this machine, and the choice that is made by them.

keys.py     what a time is of: device, versions, layer, state of the call; the same function for writer and reader
store.py    the file: found, read, merged under a lock, replaced as a whole
profile.py  what selection asks, once a process
measure.py  times of every row of the table that ``auto`` may choose
"""
